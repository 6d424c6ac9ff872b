"""All settings of a run as one typed tree: kinds (text → value) → settings (each declared once) →
tree (`Experiment`, its hash and config.json) → given (flat names and values → Experiment)."""

from fedjax_sim.experiment.tree import Experiment, Found

__all__ = ["Experiment", "Found"]
