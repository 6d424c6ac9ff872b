"""FedCA: class-prioritised aggregation; clients report how often they confuse each class.

    client:  trains from Θ with the run's loss (C3E unless another is named)
             keeps its soft confusion, and sends the struggler vector
             S_k[i] = clip( Σ_{j≠i} Conf_ij / Count_i, 0, 1 )
    server:  G = mean_k S_k;  𝒫 = the p classes with the largest G
             for c in 𝒫:  u_k^(c) = max(0, 1 − S_k[c]) / Σ_j …          (uniform if all are 0)
                          Θ^(c) = Σ_k u_k^(c) θ_k
             Θ ← mean_{c∈𝒫} Θ^(c)  =  Σ_k ū_k θ_k,   ū_k = mean_{c∈𝒫} u_k^(c)

The confusion is tracked whatever the loss is. Equal struggler vectors give FedAvg with uniform
weights. Wire: |w| down, |w| + C up.  State: Conf_k, Count_k.  Evaluated: global.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import field
from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import local_sgd
from fedjax_sim.local.losses import Confusion
from fedjax_sim.methods import register
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Tree, Upload


def priorities_for(classes: int) -> int:
    """p by default: 4 for 10 classes and 15 for 100 as in the paper's code, on the line between and
    beyond them.

    >>> [priorities_for(c) for c in (2, 3, 10, 100)]
    [2, 3, 4, 15]
    """
    return min(classes, max(1, round(4 + 11 * (classes - 10) / 90)))


def struggle(confusion: Confusion) -> Array:
    """S [C] of ONE client: the share of each class's mass that is predicted as something else."""
    wrong = confusion.conf.sum(1) - jnp.diagonal(confusion.conf)
    return jnp.clip(wrong / confusion.count, 0, 1)


def priority_weights(struggles: Array, ok: Array, p: int) -> Array:
    """ū [M] from all struggler vectors [M, C]; those not ok [M] weigh nothing.

    >>> priority_weights(jnp.array([[0.0, 0.9], [0.0, 0.7]]), jnp.array([True, True]), 1).round(
    ...     2
    ... ).tolist()
    [0.25, 0.75]
    """
    struggles = jnp.where(ok[:, None], struggles, 0)
    here = ok.astype(struggles.dtype)
    worst = lax.top_k(struggles.sum(0) / jnp.maximum(here.sum(), 1), p)[1]  # [p] classes
    skill = jnp.maximum(0, 1 - struggles[:, worst]) * here[:, None]  # [M, p]
    total = skill.sum(0)
    uniform = here[:, None] / jnp.maximum(here.sum(), 1)
    return jnp.where(total > 0, skill / jnp.where(total > 0, total, 1), uniform).mean(1)


@register("fedca")
class FedCA(Method):
    """Averages that favour clients good at the worst classes."""

    needs_classes = "its weights come from every client's confusion of classes"

    priorities: int = field(
        0, ge=0, help="p, number of prioritised classes (0: by the number of classes)"
    )
    weights = "uniform"
    needs = frozenset({"confusion", "stack"})
    loss = "c3e"
    payload = frozenset({"report"})

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, done = local_sgd(env, net, client, ctx)
        return client, self.upload(env, ctx, done, report=struggle(client.confusion))

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        p = min(self.priorities or priorities_for(env.model.classes), env.model.classes)
        weights = priority_weights(cohort.reports, cohort.ok, p)
        return Server(
            jax.tree.map(
                lambda nets: jnp.tensordot(weights.astype(nets.dtype), nets, 1), cohort.nets
            )
        )

    def log(self, env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        shares = jnp.where(cohort.ok[:, None], cohort.reports, 0).sum(0) / jnp.maximum(
            cohort.count, 1
        )
        return dict(struggle_mean=shares.mean(), struggle_worst=shares.max())

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        return 0, env.model.classes
