"""The random draws of a run as plain Python lists, for loops that check the engine's arithmetic
without its code.

Only two things come from the simulator: `Participation` (who is sampled, who reports) and
`local.epoch_permutations` (one epoch's). Keys follow the documented rule, written out
here: a draw of a round is keyed by (seed, round, stage), a client's by (seed, round, stage, client
id), a client's several passes of one round also by the pass ("salt"). How many steps there are and
how an epoch is cut into minibatches is computed here, in NumPy.
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np

from fedjax_sim.engine.keys import DROP, SAMPLE, TRAIN
from fedjax_sim.local import epoch_permutations


def stage_key(seed, t, stage):
    """Key of one stage of round t (from 0)."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), t), stage)


@functools.partial(jax.jit, static_argnums=0)
def _cohort(participation, seed, t, dropout):
    ids, invited = participation.sample(stage_key(seed, t, SAMPLE), t)
    return ids, invited, participation.reports(stage_key(seed, t, DROP), ids, dropout)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _permutations(seed, t, client, salt, n, padded, epochs):
    key = jax.random.fold_in(jax.random.fold_in(stage_key(seed, t, TRAIN), client), salt)
    return epoch_permutations(key, n, padded, epochs)


def reporting(
    participation, seed: int, t: int, dropout: float = 0.0
) -> tuple[list[int], list[int]]:
    """(clients that take part and report, clients that take part and fail) in round t."""
    ids, invited, fine = (np.asarray(a) for a in _cohort(participation, seed, t, dropout))
    return ids[invited & fine].tolist(), ids[invited & ~fine].tolist()


def minibatches(
    fed, seed: int, t: int, client: int, *, batch_size: int, epochs: float, salt: int = 0
) -> list[np.ndarray]:
    """Rows of the pool of every step of ONE client in round t; the last minibatch of an epoch may
    be short."""
    rows = fed.client_rows(client)
    n, widest = len(rows), fed.rows["train"].shape[1]
    per_epoch = math.ceil(n / batch_size)
    steps = max(1, round(epochs * per_epoch)) if n and epochs > 0 else 0
    padded = math.ceil(widest / batch_size) * batch_size
    permutations = np.asarray(
        _permutations(seed, t, client, salt, n, padded, max(1, math.ceil(epochs)))
    )
    whole = [
        rows[order[:n][i : i + batch_size]]
        for order in permutations
        for i in range(0, n, batch_size)
    ]
    return whole[:steps]
