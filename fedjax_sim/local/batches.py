"""Minibatches of ONE client: rows of the pool, reshuffled every epoch, the last one kept and masked.

Semantics are those of the papers' data loaders: every epoch is a fresh permutation (with `--shuffle off` the rows in
their order), the last partial batch is kept and masked, fractional epochs are counted in steps
(`steps = max(1, round(epochs·⌈n/B⌉))`, 0 for a client without data).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.local.augment import AUGMENTATIONS
from fedjax_sim.local.threefry import counter_bits
from fedjax_sim.platform import target
from fedjax_sim.types import Array, Ctx, Env

LANES = "lanes"  # the name of the vmap axis over clients that are trained side by side


class Batch(NamedTuple):
    x: Array  # [B, H, W, C] normalised
    y: Array  # [B]
    mask: Array  # [B] True for real examples
    key: Array  # []  PRNG key of this step (noise in an objective)


def batches_per_epoch(env: Env, n: Array) -> Array:
    return -(-n // env.batch_size)


def steps_for(env: Env, n: Array, epochs: Array | float) -> Array:
    """Steps of a client with n examples; fractional epochs round to whole steps, at least one if there is any work."""
    epochs = jnp.asarray(epochs, env.dtype)
    steps = jnp.round(epochs * batches_per_epoch(env, n).astype(env.dtype)).astype(jnp.int32)
    return jnp.where((n > 0) & (epochs > 0), jnp.maximum(steps, 1), 0)


WORD_PLACES = 12  # bits for the place in a word that is sorted as one; the others are random


def epoch_orders(key: Array, n: Array, padded: int, epochs: int) -> Array:
    """[epochs, padded] int32: per epoch a permutation of 0..n−1 in the first n places (the rest is padding).

    A function of (key, n) alone: neither `padded`, which follows the largest client, nor `epochs` changes an order.
    """
    place = jnp.arange(padded, dtype=jnp.uint32)
    noise = counter_bits(key, jnp.arange(epochs, dtype=jnp.uint32)[:, None], place[None]) >> 1
    noise = jnp.where(place < n, noise, jnp.uint32(0xFFFFFFFF))  # padding sorts last
    coarse = noise >> WORD_PLACES << WORD_PLACES
    place = jnp.broadcast_to(place, noise.shape)
    if padded <= 2**WORD_PLACES:
        # random number and place in one word: XLA-CPU sorts one array 7 times faster than two. 19 random bits are left;
        # equal ones keep their order, as in a stable sort
        word = lax.sort(coarse | place, dimension=1, is_stable=False)
        return (word & jnp.uint32(2**WORD_PLACES - 1)).astype(jnp.int32)
    noise = jnp.where(n > 2**WORD_PLACES, noise, coarse)  # a small client's order is the one it has among small ones
    return lax.sort((noise, place), dimension=1, num_keys=1)[1].astype(jnp.int32)


def longest(env: Env, steps: Array) -> Array:
    """The bound of a loop over the lanes of a chunk: an unbatched scalar, so nothing is selected away."""
    return lax.pmax(steps, LANES) if env.lanes > 1 else steps


def by_itself(make: Callable[[], Array], counter: Array) -> Array:
    """`make()`, kept out of the loops that use it; `counter` is any scalar that is never negative and the same in all lanes.

    XLA-CPU fuses a gather into what reads it, where the row is then looked up for every element and padding becomes a
    branch: 0.4 ms of a LeNet-5 step, 0.04 ms apart. Neither a barrier nor `settle` keeps a single reader apart; the
    branch of a conditional does. Accelerators fuse well, and a conditional costs them.
    """
    if target() != "cpu":
        return make()
    like = jax.eval_shape(make)
    return lax.cond(counter >= 0, make, lambda: jnp.zeros(like.shape, like.dtype))


def gather(env: Env, rows: Array, counter: Array) -> tuple[Array, Array]:
    """Examples of the pool, normalised: (x [B, H, W, C], y [B]); `counter` as in `by_itself`."""
    fed = env.fed
    # one row = one flat slice: the gather stays a copy of contiguous bytes
    x = by_itself(lambda: fed.x.reshape(fed.x.shape[0], -1)[rows], counter)
    x = x.reshape(*rows.shape, *fed.x.shape[1:]).astype(env.dtype)
    x = (x * fed.scale.astype(env.dtype) - fed.mean.astype(env.dtype)) / fed.std.astype(env.dtype)
    return x, fed.y[rows]


def stream(
    env: Env, ctx: Ctx, key: Array, epochs: float, split: str = "train", *, rows: Array | None = None, n: Array | None = None
) -> Callable[[Array], Batch]:
    """The client's minibatches as a function of the step number: reshuffled each epoch, the last one masked.

    rows [S], n []: draw from the first n of these rows of the pool instead of the client's whole split.
    """
    rows = env.fed.rows[split][ctx.id] if rows is None else rows
    n = env.fed.size[split][ctx.id] if n is None else n
    per_epoch, size = batches_per_epoch(env, n), env.batch_size
    padded = -(-rows.shape[0] // size) * size
    number = max(1, math.ceil(epochs - 1e-9))
    if env.shuffle:
        order = epoch_orders(key, n, padded, number)
    else:
        order = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), (number, padded))
    # [epochs, padded] rows of the pool; padding repeats the client's own first row: nothing of others is ever read,
    # so that a NaN in somebody else's data (0·nan is nan) stays with its owner
    table = rows[jnp.where(order < n, order, 0)]
    augment = AUGMENTATIONS[env.fed.augment]

    def draw(step: Array) -> Batch:
        epoch, start = step // jnp.maximum(per_epoch, 1), (step % jnp.maximum(per_epoch, 1)) * size
        x, y = gather(env, lax.dynamic_slice(table, (epoch, start), (1, size))[0], step)
        step_key = jax.random.fold_in(key, step)
        return Batch(augment(step_key, x), y, start + jnp.arange(size) < n, step_key)

    return draw
