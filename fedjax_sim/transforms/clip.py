"""Clipping: the update that ONE client sends has at most the norm `norm`.

    Δ = w_k − (the net it started from), in the groups that travel; with it the sums and the report
    that are payload
    f = min(1, norm / ‖(Δ, sums, report)‖);     sent: start + f·Δ,  f·sums,  f·report

The norm is over parameters; BatchNorm's running statistics go as they are. A client that stays
below sends, bit for bit, what it would have sent. This alone is no differential privacy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.fields import Real, field
from fedjax_sim.transforms import register_transform
from fedjax_sim.transforms.base import Sent, Transform
from fedjax_sim.tree import square_norm
from fedjax_sim.types import Array, Ctx, Env, Tree


def is_float(a: Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def travelling(env: Env, change: Tree, mask: Array) -> Tree:
    """Parameters [group, …] with 0 in the groups that stay."""
    place = {name: i for i, name in enumerate(env.model.groups)}
    return {
        name: jax.tree.map(lambda a, i=place[name]: jnp.where(mask[i], a, 0), sub)
        for name, sub in change.items()
    }


@register_transform("clip")
class Clip(Transform):
    """Limits the norm of what a client sends to `norm`."""

    norm: Real = field(1.0, gt=0, help="the largest norm of an update")

    def send(
        self, env: Env, mine: Tree, start: Tree, sent: Sent, mask: Array, ctx: Ctx
    ) -> tuple[Tree, Sent]:
        new, old = sent.net["params"], start["params"]
        change = travelling(env, jax.tree.map(jnp.subtract, new, old), mask)
        beside = [a for a in jax.tree.leaves((sent.sums, sent.report)) if is_float(a)]
        length = jnp.sqrt(square_norm((change, beside)))
        share = jnp.minimum(1, self.norm / jnp.where(length > 0, length, 1)).astype(env.dtype)
        short = lambda whole, cut: jnp.where(share < 1, cut, whole)
        # a private group is not sent, and keeps its value
        params = jax.tree.map(lambda w, a, d: short(w, a + share * d), new, old, change)
        scaled = lambda tree: jax.tree.map(
            lambda a: short(a, share * a) if is_float(a) else a, tree
        )
        return mine, Sent({**sent.net, "params": params}, scaled(sent.sums), scaled(sent.report))
