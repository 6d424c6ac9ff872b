"""FedPolicy: an agent decides which block of the aggregate each participant gets back."""

from fedjax_sim.methods.fedpolicy.method import FedPolicy, Redistribution, Report
from fedjax_sim.methods.fedpolicy.state import STATES, Server, observation_size

__all__ = ["STATES", "FedPolicy", "Redistribution", "Report", "Server", "observation_size"]
