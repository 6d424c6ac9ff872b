"""Weights [m+1] that follow from models, for ONE client: by the similarity of heads, and by mirror
descent on the loss of its validation rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.local import gather, repeat, turns
from fedjax_sim.local.score import loss_metric, predict_net, sums_of
from fedjax_sim.plans import mix, overlay, part
from fedjax_sim.tree import subtract
from fedjax_sim.types import Array, Ctx, Env, Tree

VAL_ROWS = 128  # validation rows scored at once, at most


def pieces(rows: int) -> int:
    """Rows of a batch, where so many are scored in as few and as even batches as possible: every
    row of padding is paid for."""
    return max(1, -(-rows // max(1, -(-rows // VAL_ROWS))))


def inner(a: Tree, b: Tree) -> Array:
    return sum(
        (jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)),
        start=jnp.zeros(()),
    )


# ---- similarity ----------------------------------------------------------------------------------
def cosines(env: Env, peers: Tree, own: Tree, usable: Array) -> Array:
    """[m+1] cosines of nets (or parts) with the last of them, each minus the mean of those in use.

    They share a start, beside which all cosines would be 1. One peer is read at a time. 0 where
    nothing is left of a net; 1 with itself.
    """
    alike = usable / usable.sum()
    centre = mix(env, jnp.broadcast_to(alike, (env.num_groups, alike.shape[0])), peers, own)
    mine = subtract(own["params"], centre["params"])

    def one(peer: Tree) -> Array:
        theirs = subtract(peer["params"], centre["params"])
        size = jnp.sqrt(inner(theirs, theirs) * inner(mine, mine))
        return jnp.where(size > 0, inner(theirs, mine) / jnp.where(size > 0, size, 1), 0)

    return jnp.append(lax.map(one, peers), 1)


def by_similarity(sharpness: Array | float, alike: Array, usable: Array) -> Array:
    """[m+1] weights ∝ exp(sharpness · cosine) of those in use.

    >>> by_similarity(0.0, jnp.array([0.3, -0.2, 1.0]), jnp.array([True, False, True])).tolist()
    [0.5, 0.0, 0.5]
    """
    return jax.nn.softmax(jnp.where(usable, sharpness * alike, -jnp.inf))


# ---- mirror descent ------------------------------------------------------------------------------
def val_slope(env: Env, net: Tree, groups: tuple[str, ...], ctx: Ctx) -> tuple[Array, Tree]:
    """(mean loss of `net` on ONE client's validation rows, its gradient with respect to the
    parameters of the groups)."""
    rows, n = env.fed.rows["val"][ctx.id], env.fed.size["val"][ctx.id]
    batch, metric = pieces(rows.shape[0]), loss_metric(env)
    padded = jnp.pad(rows, (0, -rows.shape[0] % batch))
    head = part(net, groups)

    def some(params: Tree, i: Array) -> Array:
        x, y = gather(env, lax.dynamic_slice(padded, (i * batch,), (batch,)), i)
        real = (i * batch + jnp.arange(batch) < n).astype(env.dtype)
        there = overlay(net, {**head, "params": params})
        return sums_of((metric,), predict_net(env, there, x), y, real)["loss"]["total"]

    add = lambda i, total: jax.tree.map(jnp.add, total, jax.value_and_grad(some)(head["params"], i))
    zero = (jnp.zeros((), env.dtype), jax.tree.map(jnp.zeros_like, head["params"]))
    total = repeat(turns(env, -(-n // batch), padded.shape[0] // batch), add, zero)
    return jax.tree.map(lambda a: a / jnp.maximum(n, 1).astype(a.dtype), total)


def mirror_descent(
    slope: Callable[[Array], tuple], usable: Array, steps: int, dtype: type
) -> Array:
    """[m+1] the best point of `steps` steps p ← p exp(−g / (√i (max g − min g))) / Z from equal
    weights; slope(p) = (what is minimised, its gradient g [m+1]).

    >>> far = jnp.array([1.0, 0.0])
    >>> found = mirror_descent(lambda p: (((p - far) ** 2).sum(), 2 * (p - far)),
    ...                        jnp.ones(2, bool), 20, jnp.float32)
    >>> bool(found[0] > 0.99)
    True
    """

    def step(i: Array, carry: tuple) -> tuple:
        point, best, least = carry
        now, g = slope(point)
        better = now < least
        best, least = jnp.where(better, point, best), jnp.where(better, now, least)
        low, high = jnp.where(usable, g, jnp.inf).min(), jnp.where(usable, g, -jnp.inf).max()
        unit = jnp.where(high > low, high - low, 1) * jnp.sqrt(i + 1.0)
        point = point * jnp.exp(-jnp.where(usable, g - low, 0) / unit).astype(dtype)
        return point / point.sum(), best, least

    even = (usable / usable.sum()).astype(dtype)
    start = (even, even, jnp.asarray(jnp.inf, dtype))
    return lax.fori_loop(0, steps + 1, step, start)[1]


def by_gradient(
    env: Env, net: Tree, peers: Tree, own: Tree, usable: Array, steps: int, ctx: Ctx
) -> Array:
    """[m+1] weights of the heads `peers` [m, …] and `own` (parts) under the rest of `net`, by
    mirror descent on the validation loss of the mixture; the gradient is exact."""
    groups = tuple(own["params"])

    def slope(weights: Array) -> tuple[Array, Array]:
        head = mix(env, jnp.broadcast_to(weights, (env.num_groups, weights.shape[0])), peers, own)
        loss, found = val_slope(env, overlay(net, head), groups, ctx)
        worth = lax.map(lambda peer: inner(found, peer), peers["params"])
        return loss, jnp.append(worth, inner(found, own["params"]))

    return mirror_descent(slope, usable, steps, env.dtype)
