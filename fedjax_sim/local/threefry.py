"""Random bits as a function of (key, counter) from straight-line code, the same in every array
size.

XLA-CPU runs jax's generator as a loop over its rounds whose steps cost more than the arithmetic
when the array is small (a client's shuffle: some hundred numbers). Twenty rounds of Threefry-2x32
(Salmon et al. 2011) written out fuse into one operation; and a bit that depends on its own counter
alone does not change when another client's table grows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def counter_bits(key: Array, high: Array, low: Array) -> Array:
    """uint32 random bits at the counters (high, low), of their common shape.

    >>> key = jax.random.key(0)
    >>> places = jnp.arange(6, dtype=jnp.uint32)
    >>> bool(
    ...     (
    ...         counter_bits(key, jnp.uint32(0), places) == jax.random.bits(key, (6,), jnp.uint32)
    ...     ).all()
    ... )
    True
    """
    words = jax.random.key_data(key)
    if words.shape[-1] != 2:  # another generator: two words of it as a Threefry key
        words = words[..., :2] ^ words[..., 2:4]
    first, second = words[..., 0], words[..., 1]
    keys = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x, y = jnp.broadcast_arrays(jnp.asarray(high, jnp.uint32), jnp.asarray(low, jnp.uint32))
    x, y = x + keys[0], y + keys[1]
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x ^ y
