"""Maximum mean discrepancy between two sets of features: how differently two models see the same
minibatch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Bool, Float

from fedjax_sim.types import Array, Scalar

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


def mmd_rbf(
    a: Float[Array, "batch features"],
    b: Float[Array, "batch features"],
    mask: Bool[Array, " batch"],
) -> Scalar:
    """MMD² of the real examples of a, b, biased: mean over all pairs of k(a,a') + k(b,b') −
    2k(a,b').

        k(x, y) = Σ_bw exp(−‖x − y‖² / (2·bw)),   bw ∈ {10, 15, 20, 50}

    >>> x = jnp.array([[0.0], [1.0], [7.0]])
    >>> float(mmd_rbf(x, x, jnp.ones(3, bool))), float(
    ...     mmd_rbf(x, x.at[2].set(jnp.nan), jnp.array([1, 1, 0]) > 0)
    ... )
    (0.0, 0.0)
    """
    a, b = (jnp.where(mask[:, None], f, 0) for f in (a, b))  # padding may hold anything
    pairs = (mask[:, None] & mask).astype(a.dtype)  # [B, B]

    def kernel(
        x: Float[Array, "batch features"], y: Float[Array, "batch features"]
    ) -> Float[Array, "batch batch"]:
        distance = jnp.square(x).sum(1)[:, None] + jnp.square(y).sum(1) - 2 * x @ y.T  # [B, B]
        return sum(
            (jnp.exp(-distance / (2 * width)) for width in BANDWIDTHS),
            start=jnp.zeros_like(distance),
        )

    total = (pairs * (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))).sum()
    return total / jnp.maximum(pairs.sum(), 1)
