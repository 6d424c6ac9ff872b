"""Minibatches of ONE client: rows of the pool, reshuffled every epoch, the last one kept and
masked.

Semantics are those of the papers' data loaders: every epoch is a fresh permutation (with `--shuffle
off` the rows in their order), the last partial batch is kept and masked, fractional epochs are
counted in steps (`steps = max(1, round(epochs·⌈n/B⌉))`, 0 for a client without data).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Int, Num, UInt32

from fedjax_sim.local.augment import AUGMENTATIONS
from fedjax_sim.local.threefry import counter_bits
from fedjax_sim.platform import target
from fedjax_sim.types import Array, Count, Ctx, Env, Key, Scalar, Tree

VMAP_AXIS = "clients side by side"  # name of the vmap axis


class Batch(NamedTuple):
    x: Num[Array, " batch *shape"]  # images, normalised, or tokens
    y: Num[Array, " batch *target"]  # as the task has it
    mask: Bool[Array, " batch"]  # True for real examples
    key: Key  # of this step (noise in an objective)


def batches_per_epoch(env: Env, n: Int[Array, " *clients"]) -> Int[Array, " *clients"]:
    return -(-n // env.batch_size)


def steps_for(env: Env, n: Count, epochs: Scalar | float) -> Count:
    """Steps of a client with n examples; fractional epochs round to whole steps, at least one if
    there is any work."""
    epochs = jnp.asarray(epochs, env.dtype)
    steps = jnp.round(epochs * batches_per_epoch(env, n).astype(env.dtype)).astype(jnp.int32)
    return jnp.where((n > 0) & (epochs > 0), jnp.maximum(steps, 1), 0)


def most_steps(env: Env, epochs: float | None) -> tuple[int, bool]:
    """(the most steps that a client can have in `epochs`, whether all clients that train have just
    as many); None: of a Plan's."""
    largest = -(-env.fed.rows["train"].shape[1] // env.batch_size)
    # rounds as `steps_for` does
    number = np.asarray(env.max_epochs if epochs is None else epochs, env.dtype)
    return max(1, int(np.round(number * np.asarray(largest, env.dtype)))), env.even and (
        epochs is not None or env.same_epochs
    )


WORD_PLACES = 12  # bits for the place in a word that is sorted as one; the others are random


def epoch_permutations(
    key: Key, n: Count | int, padded: int, epochs: int
) -> Int[Array, "{epochs} {padded}"]:
    """[epochs, padded] int32: per epoch a permutation of 0..n−1 in the first n places (the rest is
    padding).

    A function of (key, n) alone: neither `padded`, which follows the largest client, nor `epochs`
    changes an order.
    """
    if epochs == 1:  # without an axis of length 1, which a TPU would fill up to 128
        return _permutations(key, jnp.uint32(0), n, padded)[None]
    return _permutations(key, jnp.arange(epochs, dtype=jnp.uint32)[:, None], n, padded)


def _permutations(
    key: Key, epoch: UInt32[Array, " *epochs"], n: Count | int, padded: int
) -> Int[Array, "... {padded}"]:
    """[*, padded] for epochs [] or [E, 1]."""
    place = jnp.arange(padded, dtype=jnp.uint32)
    noise = counter_bits(key, epoch, place) >> 1
    noise = jnp.where(place < n, noise, jnp.uint32(0xFFFFFFFF))  # padding sorts last
    coarse = noise >> WORD_PLACES << WORD_PLACES
    place = jnp.broadcast_to(place, noise.shape)
    if padded <= 2**WORD_PLACES:
        # random number and place in one word: XLA-CPU sorts one array 7 times faster than two. 19
        # random bits are left; equal ones keep their order, as in a stable sort
        word = lax.sort(coarse | place, dimension=-1, is_stable=False)
        return (word & jnp.uint32(2**WORD_PLACES - 1)).astype(jnp.int32)
    # a small client's order is the one it has among small ones
    noise = jnp.where(n > 2**WORD_PLACES, noise, coarse)
    return lax.sort((noise, place), dimension=-1, num_keys=1)[1].astype(jnp.int32)


def longest(env: Env, steps: Count) -> Count:
    """The bound of a loop over the clients of a chunk, and over what else is mapped: an unbatched
    scalar, so nothing is selected away."""
    axes = (VMAP_AXIS, *env.mapped) if env.vmap_width > 1 else env.mapped
    return lax.pmax(steps, axes) if axes else steps


# turns of a block of `repeat`, and blocks of one call, on accelerators
LEAST_BLOCK, MOST_BLOCKS = (8, 16)


class Turns(NamedTuple):
    """How many turns a loop over the clients of a chunk takes: `blocks` times `length`."""

    blocks: Count | int  # an unbatched scalar; a Python number where the compiler is to know it
    length: int
    masked: bool  # a client may have fewer turns than its chunk

    @property
    def total(self) -> Count | int:
        return self.blocks * self.length


def turns(env: Env, count: Count, most: int, exact: bool = False) -> Turns:
    """Turns of a loop: this client takes `count` [] of them, no client more than `most`; exact:
    every client whose result counts takes `most`.

    A CPU leaves the loop after the longest client. A GPU asks the host before every turn of a loop
    whose number of turns it does not know, and a TPU cannot plan ahead: there the number is known
    where all clients have equally much to do, and otherwise the loop is cut into at most
    MOST_BLOCKS blocks of known length.
    """
    if target() == "cpu":
        return Turns(longest(env, count), 1, env.vmap_width > 1 or bool(env.mapped))
    if exact or most <= LEAST_BLOCK:
        return Turns(1, most, not exact)
    length = max(LEAST_BLOCK, -(-most // MOST_BLOCKS))
    return Turns(-(-longest(env, count) // length), length, True)


def repeat(planned: Turns, body: Callable[[Count, Tree], Tree], start: Tree) -> Tree:
    """`body(k, carry)` for k = 0, 1, …; `body` masks the turns that a client does not have."""
    if planned.length == 1:
        return lax.fori_loop(0, planned.blocks, body, start)
    if isinstance(planned.blocks, int) and planned.blocks == 1:
        return lax.fori_loop(0, planned.length, body, start)
    inner = lambda i, carry: lax.fori_loop(
        0, planned.length, lambda j, c: body(i * planned.length + j, c), carry
    )
    return lax.fori_loop(0, planned.blocks, inner, start)


def by_itself(make: Callable[[], Array], counter: Count) -> Array:
    """`make()`, kept out of the loops that use it; `counter` is any scalar that is never negative
    and the same for all clients of a chunk.

    XLA-CPU fuses a gather into what reads it, where the row is then looked up for every element and
    padding becomes a branch: 0.4 ms of a LeNet-5 step, 0.04 ms apart. Neither a barrier nor
    `materialize` keeps a single reader apart; the branch of a conditional does. Accelerators fuse
    well, and a conditional costs them.
    """
    if target() != "cpu":
        return make()
    like = jax.eval_shape(make)
    return lax.cond(counter >= 0, make, lambda: jnp.zeros(like.shape, like.dtype))


def gather(
    env: Env, rows: Int[Array, " examples"], counter: Count
) -> tuple[Num[Array, " examples *shape"], Num[Array, " examples *target"]]:
    """Examples of the pool, normalised: (x [B, H, W, C], y [B]), tokens [B, T] as they are;
    `counter` as in `by_itself`."""
    fed = env.fed
    # the pool is two-dimensional on the device: a row is one flat slice, and nothing touches the
    # pool as a whole
    x = by_itself(lambda: fed.x.reshape(fed.x.shape[0], -1)[rows], counter)[
        ..., : math.prod(env.model.shape)
    ]
    x = x.reshape(*rows.shape, *env.model.shape)
    if x.dtype == jnp.int32:  # tokens are names, not numbers
        return x, fed.y[rows]
    x = x.astype(env.dtype)
    x = (x * fed.scale.astype(env.dtype) - fed.mean.astype(env.dtype)) / fed.std.astype(env.dtype)
    return x, fed.y[rows]


def stream(
    env: Env,
    ctx: Ctx,
    key: Key,
    epochs: float,
    split: str = "train",
    *,
    rows: Int[Array, " examples"] | None = None,
    n: Count | None = None,
) -> Callable[[Count], Batch]:
    """The client's minibatches as a function of the step number: reshuffled each epoch, the last
    one masked.

    rows [S], n []: draw from the first n of these rows of the pool instead of the client's whole
    split.
    """
    even = env.even and split == "train" and rows is None and n is None
    rows = env.fed.rows[split][ctx.id] if rows is None else rows
    n = env.fed.size[split][ctx.id] if n is None else n
    per_epoch, size = jnp.maximum(batches_per_epoch(env, n), 1), env.batch_size
    padded = -(-rows.shape[0] // size) * size
    number = max(1, math.ceil(epochs - 1e-9))
    if env.shuffle:
        order = epoch_permutations(key, n, padded, number)
    else:
        order = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), (number, padded))
    if even:
        order = order.reshape(-1, size)
    # a step's places side by side, because all clients are at the same step but not in the same
    # epoch
    else:
        step = jnp.arange(number * (padded // size))[:, None]
        place = (step % per_epoch) * size + jnp.arange(size)
        order = order[jnp.minimum(step // per_epoch, number - 1), place]
    # [steps, B] rows of the pool; padding repeats the client's own first row: no other client's
    # rows are read, so that a NaN in another client's data (0·nan is nan) has no effect here
    table = rows[jnp.where(order < n, order, 0)]
    augment = AUGMENTATIONS[env.fed.augment]

    def draw(step: Count) -> Batch:
        start = (step % per_epoch) * size
        x, y = gather(env, lax.dynamic_index_in_dim(table, step, keepdims=False), step)
        step_key = jax.random.fold_in(key, step)
        mask = (
            jnp.ones(size, bool)
            if even and env.full and target() != "cpu"
            else start + jnp.arange(size) < n
        )
        return Batch(augment(step_key, x), y, mask, step_key)

    return draw
