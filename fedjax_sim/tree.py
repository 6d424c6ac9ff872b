"""Small algebra on pytrees, used by many methods."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array, Tree


def subtract(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.subtract, a, b)


def scaled_add(a: Tree, scale: Array | float, b: Tree) -> Tree:
    """a + scale·b."""
    return jax.tree.map(lambda x, y: x + scale * y, a, b)


def square_norm(a: Tree) -> Array:
    return sum((jnp.vdot(x, x) for x in jax.tree.leaves(a)), start=jnp.zeros(()))


def zeros_like(a: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, a)
