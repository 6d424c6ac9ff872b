"""Who weighs what in ONE client's mixture: [m+1] weights over the previous participants and, last,
the client itself."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.types import Array

RULES = {
    "weighted": "by data sizes, n_j / Σ n over the previous participants and itself",
    "agent": "what the agent says",
    "even": "all alike, itself among them",
    "mean": "the mean of the previous participants, without itself",
    "local": "its own alone: the part never leaves the client",
}


def part_weights(rule: str, action: Array, sizes: Array, usable: Array) -> Array:
    """[m+1] weights that sum to 1. sizes, usable: [m+1], itself last; usable[m] is True.

    >>> sizes, usable = jnp.array([2.0, 4.0, 2.0]), jnp.array([True, True, True])
    >>> for rule in ("weighted", "mean"):
    ...     print(rule, part_weights(rule, sizes / 8, sizes, usable))
    weighted [0.25 0.5  0.25]
    mean [0.5 0.5 0. ]
    """
    if rule == "agent":
        return action
    myself = jnp.arange(usable.shape[0]) == usable.shape[0] - 1
    others = usable & ~myself
    shares = {
        "weighted": jnp.where(usable, sizes, 0),
        "even": usable,
        "mean": jnp.where(others.any(), others, myself),
        "local": myself,
    }[rule].astype(sizes.dtype)
    return shares / jnp.maximum(shares.sum(), 1e-9)
