"""fedjax_sim: federated learning, one XLA program per round."""
__version__ = "0.1.0"
