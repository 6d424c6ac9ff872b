"""ONE client: its minibatches, its losses, its descent, its scores. Traced code; knows no cohort
and no method."""

from fedjax_sim.local.batches import (
    VMAP_AXIS,
    Batch,
    batches_per_epoch,
    by_itself,
    epoch_permutations,
    gather,
    longest,
    most_steps,
    repeat,
    steps_for,
    stream,
    turns,
)
from fedjax_sim.local.descend import Aux, Trained, descend, forward, local_loss, supervised, upload

__all__ = [
    "VMAP_AXIS",
    "Aux",
    "Batch",
    "Trained",
    "batches_per_epoch",
    "by_itself",
    "descend",
    "epoch_permutations",
    "forward",
    "gather",
    "local_loss",
    "longest",
    "most_steps",
    "repeat",
    "steps_for",
    "stream",
    "supervised",
    "turns",
    "upload",
]
