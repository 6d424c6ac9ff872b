"""ONE client: its minibatches, its losses, local SGD, its scores. Traced code; knows no cohort
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
from fedjax_sim.local.sgd import Aux, Trained, forward, local_loss, local_sgd, supervised, upload

__all__ = [
    "VMAP_AXIS",
    "Aux",
    "Batch",
    "Trained",
    "batches_per_epoch",
    "by_itself",
    "epoch_permutations",
    "forward",
    "gather",
    "local_loss",
    "local_sgd",
    "longest",
    "most_steps",
    "repeat",
    "steps_for",
    "stream",
    "supervised",
    "turns",
    "upload",
]
