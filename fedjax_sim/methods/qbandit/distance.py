"""How far the models of one cohort are from each other, from the stacked uploads [M, …]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array, Cohort, Env


def divergence(env: Env, cohort: Cohort) -> Array:
    """[M] d_k = (Σ_{ℓ≤L_k} ‖Δ_k^ℓ − mean_{j:L_j≥ℓ} Δ_j^ℓ‖²)^{1/2}; 0 for who did not report.

    A client that shares layer ℓ started from the server's layer ℓ, so the server's value falls out
    of the difference and the uploads stand for the updates. The mean is a plain one."""
    total = jnp.zeros(cohort.ok.shape, env.dtype)
    for g, name in enumerate(env.model.groups):
        shares = (cohort.ok & (cohort.plan.send[:, g] > 0)).astype(env.dtype)  # [M]
        for leaf in jax.tree.leaves(cohort.nets["params"][name]):
            flat = leaf.reshape(leaf.shape[0], -1)  # [M, P]
            mean = shares @ flat / jnp.maximum(shares.sum(), 1)
            total += shares * jnp.square(flat - mean).sum(1)
    return jnp.sqrt(total)


def pairwise_distance(env: Env, cohort: Cohort) -> Array:
    """[] mean over pairs of reporting clients of ‖w_i − w_j‖, whole models after local training; 0
    for less than two."""
    there = cohort.ok.astype(env.dtype)
    count = there.sum()
    # [M, M] inner products, around the mean model for accuracy
    products = jnp.zeros((there.shape[0],) * 2, env.dtype)
    for leaf in jax.tree.leaves(cohort.nets["params"]):
        flat = leaf.reshape(leaf.shape[0], -1)
        flat = (flat - there @ flat / jnp.maximum(count, 1)) * there[:, None]
        products += jnp.matmul(flat, flat.T, precision="highest")
    squares = jnp.diagonal(products)
    apart = jnp.sqrt(jnp.maximum(squares[:, None] + squares[None] - 2 * products, 0))  # [M, M]
    pairs = there[:, None] * there[None] * (1 - jnp.eye(there.shape[0]))
    return (apart * pairs).sum() / jnp.maximum(count * (count - 1), 1)
