"""temporary"""

from fedjax_sim.engine.round import simulate

__all__ = ["simulate"]
