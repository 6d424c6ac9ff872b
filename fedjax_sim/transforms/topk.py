"""Sparse uploads with error feedback (Stich et al., 2018): only the largest entries of an update
travel.

    Δ = w_k − (the net it started from) + e_k;     sent: start + top(Δ);     e_k ← Δ − top(Δ)

top keeps, array by array, the `share` of the entries that are largest in size, at least one. e_k
stays on the client and is added the next time. Sums and reports that are payload go whole. Wire: an
entry takes 32 bits and as many as name its place; a share of 1 goes without places.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import field
from fedjax_sim.plans import BITS_PER_PARAMETER, Wire
from fedjax_sim.transforms import register_transform
from fedjax_sim.transforms.base import Sent, Transform
from fedjax_sim.transforms.clip import travelling
from fedjax_sim.types import Array, Ctx, Env, Tree


def kept(size: int, share: float) -> int:
    """Entries of an array that are sent.

    >>> kept(1000, 0.01), kept(3, 0.01), kept(10, 1.0)
    (10, 1, 10)
    """
    return min(size, max(1, math.ceil(size * share)))


def largest(a: Array, share: float) -> Array:
    """`a` with its largest entries, 0 elsewhere; the first ones among equals.

    >>> largest(jnp.array([1.0, -3.0, 2.0, 0.0]), 0.5).tolist()
    [0.0, -3.0, 2.0, 0.0]
    """
    flat = a.reshape(-1)
    places = lax.top_k(jnp.abs(flat), kept(a.size, share))[1]
    return jnp.zeros_like(flat).at[places].set(flat[places]).reshape(a.shape)


@register_transform("topk")
class TopK(Transform):
    """Only the largest `share` of an update is sent, the rest is remembered."""

    share: float = field(0.01, gt=0, le=1, help="share of each array's entries that is sent")

    def begin(self, env: Env, net: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, net["params"]) if self.share < 1 else ()

    def send(
        self, env: Env, mine: Tree, start: Tree, sent: Sent, mask: Array, ctx: Ctx
    ) -> tuple[Tree, Sent]:
        if self.share == 1:
            return mine, sent
        new, old = sent.net["params"], start["params"]
        whole = jax.tree.map(lambda w, a, e: w - a + e, new, old, mine)
        part = travelling(env, jax.tree.map(lambda a: largest(a, self.share), whole), mask)
        left = travelling(env, jax.tree.map(jnp.subtract, whole, part), mask)
        params = jax.tree.map(jnp.add, old, part)
        return left, sent._replace(net={**sent.net, "params": params})

    def wire(self, env: Env, net: Tree) -> Wire:
        plain = self.inner.wire(env, net)
        if self.share == 1:
            return plain
        sizes = [
            [a.size for a in jax.tree.leaves(net["params"].get(name, {}))]
            for name in env.model.groups
        ]
        place = lambda size: BITS_PER_PARAMETER + max(1, math.ceil(math.log2(size)))
        return plain._replace(
            up=tuple(sum(kept(n, self.share) * place(n) for n in group) for group in sizes)
        )
