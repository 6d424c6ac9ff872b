"""Light augmentation of a minibatch, applied while it is gathered. Functions of (key, x [B, H, W, C])."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def crop_flip(key: jax.Array, x: jax.Array, padding: int = 4) -> jax.Array:
    """Random crop after zero padding (of the normalised image) and random horizontal flip, per example."""
    where, mirror = jax.random.split(key)
    size, (height, width) = x.shape[0], x.shape[1:3]
    wide = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    corner = jax.random.randint(where, (size, 2), 0, 2 * padding + 1)
    crop = jax.vmap(lambda image, c: lax.dynamic_slice(image, (c[0], c[1], 0), (height, width, x.shape[3])))
    flip = jax.random.bernoulli(mirror, 0.5, (size, 1, 1, 1))
    out = crop(wide, corner)
    return jnp.where(flip, out[:, :, ::-1], out)


AUGMENTATIONS = {"": lambda key, x: x, "crop_flip": crop_flip}
