"""A small quadratic program on the simplex, solved inside the compiled round.

    min_α αᵀAα   subject to   α ≥ 0,  Σα = 1,   A positive semi-definite [K, K]

Accelerated projected gradient with restarts finds the support; active-set steps on it, A_SS x = 1,
α_S = x/Σx, then give the exact answer. Of everything seen, the point with the smallest duality gap
2(αᵀAα − min_j (Aα)_j) is returned, so the second part can only improve on the first.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from fedjax_sim.types import Array

GRADIENT_STEPS, ACTIVE_SET_STEPS = 300, 12
RIDGE = 1e-13  # of the largest entry, where two columns are the same


def project(point: Array, allowed: Array) -> Array:
    """The nearest point of the simplex over the allowed coordinates; point [K], allowed [K] bool.

    >>> project(jnp.array([2.0, 1.5, -1.0, 9.0]), jnp.array([True, True, True, False])).tolist()
    [0.75, 0.25, 0.0, 0.0]
    """
    sorted_down = -jnp.sort(-jnp.where(allowed, point, -jnp.inf))
    real = jnp.isfinite(sorted_down)
    total = jnp.cumsum(jnp.where(real, sorted_down, 0))
    place = jnp.arange(1, point.shape[0] + 1)
    inside = real & (sorted_down * place > total - 1)
    last = jnp.maximum(inside.sum(), 1)
    level = (total[last - 1] - 1) / last
    return jnp.where(allowed, jnp.maximum(point - level, 0), 0)


def simplex_qp(matrix: Array, allowed: Array) -> Array:
    """α [K]; coordinates that are not allowed are 0, and at least one must be.

    >>> simplex_qp(jnp.diag(jnp.array([1.0, 3.0])), jnp.array([True, True])).round(4).tolist()
    [0.75, 0.25]
    """
    size, dtype = matrix.shape[0], matrix.dtype
    matrix = jnp.where(allowed[:, None] & allowed, (matrix + matrix.T) / 2, 0)
    largest = jnp.abs(matrix).max()
    matrix = matrix / jnp.where(largest > 0, largest, 1)
    step = 1 / jnp.maximum(jnp.abs(matrix).sum(1).max(), 1)  # a bound of the largest eigenvalue

    def gap(point: Array) -> Array:
        slope = matrix @ point
        return point @ slope - jnp.where(allowed, slope, jnp.inf).min()

    def accelerated(_: Array, carry: tuple) -> tuple:
        point, ahead, speed = carry
        new = project(ahead - step * (matrix @ ahead), allowed)
        faster = (1 + jnp.sqrt(1 + 4 * speed**2)) / 2
        wrong_way = (ahead - new) @ (
            new - point
        ) > 0  # the momentum works against the gradient: start anew
        faster = jnp.where(wrong_way, 1, faster)
        return new, new + jnp.where(wrong_way, 0, (speed - 1) / faster) * (new - point), faster

    def active_set(_: Array, carry: tuple) -> tuple:
        best, least, support = carry
        inner = jnp.where(support[:, None] & support, matrix, 0)
        x = jnp.linalg.solve(inner + jnp.diag(jnp.where(support, RIDGE, 1)), support.astype(dtype))
        point = jnp.where(support, x / x.sum(), 0)
        slope = matrix @ point
        usable = jnp.isfinite(point).all() & (point >= 0).all()
        now = jnp.where(usable, gap(jnp.where(usable, point, best)), jnp.inf)
        best, least = jnp.where(now < least, point, best), jnp.minimum(now, least)
        entering = allowed & ~support & (slope < point @ slope)
        following = (support & (point > 0)) | entering
        return (
            best,
            least,
            jnp.where(jnp.isfinite(point).all() & following.any(), following, support),
        )

    even = allowed / jnp.maximum(allowed.sum(), 1).astype(dtype)
    point, _, _ = lax.fori_loop(0, GRADIENT_STEPS, accelerated, (even, even, jnp.ones((), dtype)))
    # where even weights are as good as any, they stay
    point = jnp.where(gap(even) <= gap(point), even, point)
    support = point > 1e-3 / size
    return lax.fori_loop(0, ACTIVE_SET_STEPS, active_set, (point, gap(point), support))[0]
