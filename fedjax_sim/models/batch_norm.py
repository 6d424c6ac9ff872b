"""BatchNorm over the real examples of a padded batch."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_sim.platform import exact
from fedjax_sim.types import Array

EPSILON, MOMENTUM = 1e-5, 0.1


def batch_moments(x: Array, weights: Array | None) -> tuple[Array, Array, Array]:
    """`(n, mean [C], biased variance [C])` of the rows of `x [R,C]`; `weights [R]` is 1 or 0
    (padding).

    Two passes (the variance around the mean), because `E[x²] - E[x]²` cancels in float32. The sums
    are products with the weights, so that masking costs no pass of its own.

    >>> n, mean, var = batch_moments(jnp.array([[1.0], [3.0], [9.0]]), jnp.array([1.0, 1.0, 0.0]))
    >>> n.item(), mean.tolist(), var.tolist()
    (2.0, [2.0], [1.0])
    """
    if weights is None:
        weights = jnp.ones(x.shape[0], x.dtype)
    n = weights.sum()
    share = weights / jnp.maximum(n, 1)
    add = exact(jnp.matmul)  # a rounded 1/n would shift all means alike
    mean = add(share, x)
    return n, mean, add(share, jnp.square(x - mean))


class BatchNorm(nn.Module):
    """PyTorch's BatchNorm over all but the last axis of `x [...,C]`; `weights` marks the real rows.

    Training normalises with the batch's mean and biased variance and moves the running statistics
    by 0.1 towards the mean and the *unbiased* variance. Where PyTorch fails, at one real value or
    none, the running statistics are used and stay as they are.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, train: bool, weights: Array | None) -> Array:
        C = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones_init(), (C,), self.dtype)
        bias = self.param("bias", nn.initializers.zeros_init(), (C,), self.dtype)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (C,), self.dtype)
        running_var = self.variable("batch_stats", "var", jnp.ones, (C,), self.dtype)
        mean, var = running_mean.value, running_var.value
        if train:
            n, batch_mean, batch_var = batch_moments(x.reshape(-1, C), weights)
            enough = n > 1
            unbiased = batch_var * (n / jnp.maximum(n - 1, 1))
            if not self.is_initializing():
                move = jnp.where(enough, MOMENTUM, 0).astype(self.dtype)
                running_mean.value = mean + move * jax.lax.stop_gradient(batch_mean - mean)
                running_var.value = var + move * jax.lax.stop_gradient(unbiased - var)
            mean, var = jnp.where(enough, batch_mean, mean), jnp.where(enough, batch_var, var)
        factor = scale * jax.lax.rsqrt(var + EPSILON)
        return x * factor + (bias - mean * factor)
