"""The keys of a run: every random draw follows from the seed, the round and its stage."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import Key, State

# stages: every random draw of a round is keyed by (seed, round, stage[, client id])
SAMPLE, TRAIN, DROP, SLOW, ACT, LEARN, PERSONAL, SETUP, SERVER = STAGES = range(9)


def seed_key(seed: int) -> Key:
    """The raw PRNG key [2] of a seed below 2^64; all of its bits count. NumPy's: no device is
    asked."""
    key: Any = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return key


def weights_key(key: Key) -> Key:
    """The key of the initial weights of a run, from its raw key [2]."""
    return jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), 0x1217)


def stage_key(state: State, which: int) -> Key:
    """The key of one stage of the coming round. All stages' keys are written as one draw, which XLA
    then makes once."""
    now = jax.random.fold_in(state.key, state.t)
    return jax.vmap(jax.random.fold_in, (None, 0))(now, jnp.arange(len(STAGES)))[which]
