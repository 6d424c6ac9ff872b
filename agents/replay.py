"""A uniform ring buffer as a pytree: fixed memory, no host, usable under jit, scan and vmap."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from agents.types import Array


class Replay(NamedTuple):
    """`rows[:size]` are valid; `cursor` is where the next row goes."""

    rows: Any  # a pytree of arrays [capacity, ...]
    cursor: Array  # [] int32
    size: Array  # [] int32


def empty(example: Any, capacity: int) -> Replay:
    """A ring of `capacity` rows shaped like ONE `example` row.

    >>> empty({"x": jnp.zeros(3)}, capacity=5).rows["x"].shape
    (5, 3)
    """
    rows = jax.tree.map(
        lambda x: jnp.zeros((capacity, *jnp.shape(x)), jnp.asarray(x).dtype), example
    )
    return Replay(rows, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def places(cursor: Array, mask: Array, capacity: int) -> Array:
    """Where each row [B] goes: a slot, or `capacity` (out of range: dropped) if it is masked or
    overwritten at once.

    No slot is named twice, because the order in which a scatter writes the same slot is not
    defined.

    >>> # four rows for three slots
    >>> print(places(jnp.array(1), jnp.array([True, True, False, True, True]), 3))
    [3 2 3 0 1]
    """
    rank = jnp.cumsum(mask) - 1  # [B] its place among the rows that are kept
    kept = mask & (rank >= mask.sum() - capacity)
    return jnp.where(kept, (cursor + rank) % capacity, capacity)


def add(replay: Replay, rows: Any, mask: Array) -> Replay:
    """Appends the rows [B, ...] whose `mask` [B] is True, in order, overwriting the oldest.

    Masked rows take no place. If more rows arrive than the ring holds, the last `capacity` of them
    stay.
    """
    chex.assert_rank(mask, 1)
    chex.assert_equal_shape_prefix([mask, *jax.tree.leaves(rows)], 1)
    capacity = jax.tree.leaves(replay.rows)[0].shape[0]
    mask = mask.astype(bool)
    count = mask.sum(dtype=jnp.int32)
    slot = places(replay.cursor, mask, capacity)
    stored = jax.tree.map(
        lambda ring, new: ring.at[slot].set(new.astype(ring.dtype), mode="drop"), replay.rows, rows
    )
    return Replay(
        stored,
        ((replay.cursor + count) % capacity).astype(jnp.int32),
        jnp.minimum(replay.size + count, capacity).astype(jnp.int32),
    )


def sample(replay: Replay, key: Array, shape: tuple[int, ...]) -> Any:
    """`shape` rows drawn uniformly with replacement (so any number of rows, however few are
    stored).

    An empty ring yields its zero rows: the caller decides when there is enough to learn from.
    """
    index = jax.random.randint(key, shape, 0, jnp.maximum(replay.size, 1))
    return jax.tree.map(lambda ring: ring[index], replay.rows)
