"""What each upload was worth to the aggregate: leave one out.

    Θ⁺ = Σ_k w_k θ_k / W            Θ⁺ without k = (W Θ⁺ − w_k θ_k) / (W − w_k)          (Θ if
    nobody else reported) contribution_k = ACC(Θ⁺) − ACC(Θ⁺ without k)

ACC: on the server's validation rows. Costs M forward passes over them per round, `Env.vmap_width`
models side by side: no more than those are held at a time beside the cohort's own uploads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.local.score import held_merit
from fedjax_sim.types import Array, Cohort, Env, Tree


def without(env: Env, cohort: Cohort, old: Tree, net: Tree, weight: Array) -> Tree:
    """The mean of the other uploads; group by group, `old` where there are none. weight [G]."""

    def rest(g: int, mean: Array, own: Array, before: Array) -> Array:
        left = cohort.weight[g] - weight[g]
        alone = left <= 1e-6 * cohort.weight[g]  # what is left is rounding
        others = (cohort.weight[g] * mean - weight[g] * own) / jnp.where(alone, 1, left)
        return jnp.where(alone, before, others).astype(mean.dtype)

    return jax.tree.map(rest, env.group_of(cohort.mean), cohort.mean, net, old)


def contributions(env: Env, old: Tree, acc: Array, cohort: Cohort) -> Array:
    """[M] contribution_k; 0 for who did not report. acc: ACC(Θ⁺); old: Θ, the net before the
    round."""

    def one(upload: tuple[Tree, Array]) -> Array:
        return acc - held_merit(env, without(env, cohort, old, *upload))

    each = lax.map(
        one,
        (cohort.nets, cohort.weights[:, None] * cohort.plan.send),
        batch_size=env.vmap_width if env.vmap_width > 1 else None,
    )
    return jnp.where(cohort.ok, each, 0)
