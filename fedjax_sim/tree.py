"""Small algebra on pytrees, used by many methods."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.platform import target
from fedjax_sim.types import Array, Tree


def subtract(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.subtract, a, b)


def scaled_add(a: Tree, scale: Array | float, b: Tree) -> Tree:
    """a + scale·b."""
    return jax.tree.map(lambda x, y: x + scale * y, a, b)


def square_norm(a: Tree) -> Array:
    return sum((jnp.vdot(x, x) for x in jax.tree.leaves(a)), start=jnp.zeros(()))


def norm(a: Tree) -> Array:
    """[] Euclidean norm, approximate on accelerators (fast products): for logs. Matrices on a TPU
    as in `_witness`."""

    def square(x: Array) -> Array:
        if target() == "tpu" and jnp.ndim(x) == 2:
            return (jnp.ones((8, x.shape[0]), x.dtype) @ (x * x))[0].sum()
        return jnp.vdot(x, x)

    return jnp.sqrt(sum((square(x) for x in jax.tree.leaves(a)), start=jnp.zeros(())))


def finite(a: Tree) -> Array:
    """[] whether all of its real numbers are."""
    reals = [x for x in jax.tree.leaves(a) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)]
    return jnp.isfinite(sum((_witness(x) for x in reals), start=jnp.zeros(())))


def _witness(x: Array) -> Array:
    """[] a number that is finite if all of x is (and x is not astronomically large).

    A TPU reduces a matrix to a number eight times more slowly than it multiplies with it: there the
    columns are added up by a product, whose left side has several rows because XLA makes a sum of a
    product with one.
    """
    if target() == "tpu" and jnp.ndim(x) == 2:
        x = jnp.ones((8, x.shape[0]), x.dtype) @ x
    return jnp.vdot(x, x)


def zeros_like(a: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, a)
