"""The ring buffer against a NumPy list that simply keeps the last `capacity` valid rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import replay as ring

CAPACITY = 7


@pytest.mark.parametrize(
    "sizes", [(3,), (3, 3), (4, 3), (5, 5, 5), (20,), (2, 20, 3), (0, 4), (7, 7)]
)
def test_ring_equals_numpy(sizes):
    rng = np.random.default_rng(sum(sizes))
    buffer = ring.empty({"x": jnp.zeros(2), "a": jnp.zeros((), jnp.int32)}, CAPACITY)
    expected: list[tuple] = []
    cursor = 0
    for size in sizes:
        x = rng.normal(size=(size, 2)).astype(np.float32)
        a = rng.integers(0, 100, size).astype(np.int32)
        mask = rng.random(size) < 0.8
        buffer = jax.jit(ring.add)(
            buffer, {"x": jnp.asarray(x), "a": jnp.asarray(a)}, jnp.asarray(mask)
        )
        expected += [(x[i], a[i]) for i in range(size) if mask[i]]
        cursor = (cursor + mask.sum()) % CAPACITY
        last = expected[-CAPACITY:]
        assert int(buffer.size) == len(last) and int(buffer.cursor) == cursor
        # oldest first: the slots from the cursor on if the ring is full, from 0 if it is not
        order = (np.arange(len(last)) + (cursor if len(last) == CAPACITY else 0)) % CAPACITY
        if last:
            np.testing.assert_array_equal(
                buffer.rows["x"][order], np.stack([row[0] for row in last])
            )
            np.testing.assert_array_equal(buffer.rows["a"][order], [row[1] for row in last])


def test_samples_only_what_is_stored():
    buffer = ring.empty(jnp.zeros((), jnp.int32), CAPACITY)
    buffer = ring.add(buffer, jnp.arange(10, 13), jnp.ones(3, bool))  # not full: 3 of 7
    # more rows than are stored
    drawn = np.asarray(ring.sample(buffer, jax.random.key(0), (50, 60)))
    assert drawn.shape == (50, 60) and set(drawn.ravel()) == {10, 11, 12}
    counts = np.bincount(drawn.ravel())[10:]
    assert (abs(counts - 1000) < 4 * np.sqrt(3000 * 2 / 9)).all()  # uniform
    buffer = ring.add(buffer, jnp.arange(13, 19), jnp.ones(6, bool))  # wraps: 12..18 stay
    assert set(np.asarray(ring.sample(buffer, jax.random.key(1), (2000,)))) == set(range(12, 19))


def test_empty_ring_samples_zeros_not_garbage():
    buffer = ring.empty(jnp.ones(2), CAPACITY)
    np.testing.assert_array_equal(ring.sample(buffer, jax.random.key(0), (4,)), np.zeros((4, 2)))


def test_lengths_must_agree():
    with pytest.raises(AssertionError):
        ring.add(ring.empty(jnp.zeros(2), 4), jnp.zeros((3, 2)), jnp.ones(2, bool))


@pytest.mark.parametrize("rows", [3, 7, 8, 30])
def test_no_slot_is_written_twice(rows):
    """A scatter may write the same slot in any order, so the rows that would be overwritten at once
    are dropped."""
    mask = np.random.default_rng(rows).random(rows) < 0.8
    slots = np.asarray(ring.places(jnp.array(4), jnp.asarray(mask), CAPACITY))
    written = slots[slots < CAPACITY]
    assert len(set(written)) == len(written) == min(mask.sum(), CAPACITY)
    last = np.flatnonzero(mask)[-CAPACITY:]  # the newest rows, in order from the cursor on
    np.testing.assert_array_equal(
        slots[last], (4 + mask.sum() - len(last) + np.arange(len(last))) % CAPACITY
    )
