"""pFedRLLA: layer-wise personal mixtures, the head's weights by an agent that sees embeddings of
heads."""

from fedjax_sim.methods.pfedrlla.control import Report, Server
from fedjax_sim.methods.pfedrlla.encoder import Encoder, mhae, pca, project
from fedjax_sim.methods.pfedrlla.method import PFedRLLA
from fedjax_sim.methods.pfedrlla.mixing import RULES, Rule, part_weights
from fedjax_sim.methods.pfedrlla.regimes import REGIMES, Own

__all__ = [
    "REGIMES",
    "RULES",
    "Encoder",
    "Own",
    "PFedRLLA",
    "Report",
    "Rule",
    "Server",
    "mhae",
    "part_weights",
    "pca",
    "project",
]
