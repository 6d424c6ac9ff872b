"""Small controllers of heads, for ONE client at a time: they depend neither on the order nor on the
number of the previous participants, and are scored on validation rows after training.

bandit   arms (κ, o): the own head has the share o, the others exp(κ cos) of the rest. Thompson
         sampling: mean of an arm's scores plus normal noise of their standard error
pairs    weights = softmax_j (κ₀ cos_j + f_θ(pair_j)): one small network for every pair of the
         client and a candidate (itself among them), so an attention over candidates. f starts at
         0, where it is `similarity`. θ by an evolution strategy: each participant tries θ + σ ε_k,
         and θ ← θ + rate · σ · mean_k s_k ε_k

score    s_k = L_k before − L_k now, minus the mean of the round, in units of its spread; L_k is the
         validation loss of its model after training, before: in its previous participation (the
         first one scores nothing)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.fields import Real
from fedjax_sim.types import Array, Tree

KAPPAS, SHARES = (0.0, 2.0, 5.0, 10.0), (0.1, 0.3, 0.6, 0.9)
ARMS = tuple((kappa, share) for kappa in KAPPAS for share in SHARES)
FORGETS = 0.99  # of the arms' scores per round: what is best changes while heads become alike
KAPPA = 5.0  # where `pairs` starts
HIDDEN, FEATURES = 8, 3
TRIES = 0.3  # σ


class Tried(NamedTuple):
    """What ONE client keeps: its last score's loss, and what it tries in this round."""

    loss: Array  # []
    known: Array  # []  whether there is one
    what: Tree  # []  the arm, or ε [P]


class Arms(NamedTuple):
    """[B] sums of scores, older ones counting less."""

    tries: Array
    total: Array


class Score(NamedTuple):
    """ONE client's report."""

    fell: Array  # []  L before − L now
    use: Array  # []  whether there was one before
    what: Tree


# ---- the bandit ----------------------------------------------------------------------------------
def no_scores(dtype: type) -> Arms:
    nothing = jnp.zeros(len(ARMS), dtype)
    return Arms(nothing, nothing)


def draw_arm(arms: Arms, key: Array) -> Array:
    """[] int32: the best of one draw per arm; scores have unit spread, and each arm starts with
    one of 0."""
    mean = arms.total / (arms.tries + 1)
    noise = jax.random.normal(key, mean.shape, mean.dtype) / jnp.sqrt(arms.tries + 1)
    return jnp.argmax(mean + noise).astype(jnp.int32)


def arm_weights(arm: Array, alike: Array, usable: Array) -> Array:
    """[m+1] of cosines [m+1] with the client itself, which is last.

    >>> may = jnp.array([True, True, True])
    >>> print(arm_weights(jnp.int32(1), jnp.array([0.5, -0.5, 1.0]), may))
    [0.35 0.35 0.3 ]
    """
    kappas, shares = (jnp.asarray(column, alike.dtype) for column in zip(*ARMS, strict=True))
    myself = jnp.arange(usable.shape[0]) == usable.shape[0] - 1
    others = usable & ~myself
    rest = jax.nn.softmax(jnp.where(others, kappas[arm] * alike, -jnp.inf))
    share = jnp.where(others.any(), shares[arm], 1)
    return jnp.where(myself, share, jnp.where(others, (1 - share) * rest, 0))


def scored(arms: Arms, which: Array, scores: Array, use: Array) -> Arms:
    """The arms after a round: which [M], scores [M]."""
    hot = jax.nn.one_hot(which, len(ARMS), dtype=scores.dtype) * use[:, None]
    return Arms(FORGETS * arms.tries + hot.sum(0), FORGETS * arms.total + scores @ hot)


# ---- a network per pair --------------------------------------------------------------------------
def no_pairs(dtype: type) -> Array:
    """θ [P]: the hidden layer drawn, always the same one; the last layer 0."""
    first = jax.random.normal(jax.random.key(0), (FEATURES + 1, HIDDEN), dtype)
    return jnp.concatenate([first.reshape(-1), jnp.zeros(HIDDEN + 1, dtype)])


def pair_weights(theta: Array, alike: Array, sizes: Array, usable: Array) -> Array:
    """[m+1] of cosines and data sizes [m+1]; the client itself is last.

    >>> alike, sizes = jnp.array([0.5, -0.5, 1.0]), jnp.ones(3)
    >>> found = pair_weights(no_pairs(jnp.float32), alike, sizes, jnp.ones(3, bool))
    >>> bool(jnp.allclose(found, jax.nn.softmax(5 * alike)))
    True
    """
    myself = jnp.arange(usable.shape[0]) == usable.shape[0] - 1
    relative = jnp.log(jnp.maximum(sizes, 1) / jnp.maximum(sizes[-1], 1))
    pairs = jnp.stack([alike, relative, myself.astype(alike.dtype)], -1)  # [m+1, FEATURES]
    first = theta[: (FEATURES + 1) * HIDDEN].reshape(FEATURES + 1, HIDDEN)
    last = theta[(FEATURES + 1) * HIDDEN :]
    hidden = jnp.tanh(pairs @ first[:-1] + first[-1])
    logits = KAPPA * alike + hidden @ last[:-1] + last[-1]
    return jax.nn.softmax(jnp.where(usable, logits, -jnp.inf))


def moved(theta: Array, rate: Real, tried: Array, scores: Array, use: Array) -> Array:
    """θ after a round: tried [M, P] the ε of the participants, scores [M]."""
    return theta + rate * (jnp.where(use, scores, 0) @ tried) / jnp.maximum(use.sum(), 1)


# ---- scores --------------------------------------------------------------------------------------
def standard(fell: Array, use: Array) -> Array:
    """[M] minus the mean of those in use, in units of their spread; 0 for the others."""
    count = jnp.maximum(use.sum(), 1)
    away = jnp.where(use, fell - jnp.where(use, fell, 0).sum() / count, 0)
    spread = jnp.sqrt(jnp.square(away).sum() / count)
    return away / jnp.where(spread > 0, spread, 1)
