"""`jax.random.bits` for small arrays on a CPU: the same numbers from straight-line code.

XLA-CPU runs jax's generator as a loop over its rounds whose steps cost more than the arithmetic when the array is small
(a client's shuffle: some hundred numbers). Twenty rounds of Threefry-2x32 (Salmon et al. 2011) written out fuse into one
operation.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.platform import target

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def small_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32 random bits of `shape`, equal to `jax.random.bits(key, shape, jnp.uint32)`.

    >>> key = jax.random.key(0)
    >>> bool((small_bits(key, (2, 3)) == jax.random.bits(key, (2, 3), jnp.uint32)).all())
    True
    """
    plain = (
        target() == "cpu"
        and getattr(jax.config, "jax_threefry_partitionable", False)
        and str(jax.random.key_impl(key)) == "threefry2x32"
        and math.prod(shape) < 2**32
    )
    if not plain:
        return jax.random.bits(key, shape, jnp.uint32)
    first, second = jax.random.key_data(key)
    keys = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x = jnp.zeros(shape, jnp.uint32) + keys[0]  # the counter's upper half is zero
    y = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + keys[1]
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x ^ y
