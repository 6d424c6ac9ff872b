"""The smallest model with BatchNorm: one hidden layer, normalised; for what running statistics must
do."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from fedjax_sim.models import Model, from_module
from fedjax_sim.models.batch_norm import BatchNorm
from fedjax_sim.models.layers import Linear


class Body(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train, mask):
        return nn.relu(
            BatchNorm()(
                Linear(self.width)(x), train, None if mask is None else mask.astype(x.dtype)
            )
        )


class TinyNorm(nn.Module):
    classes: int

    def setup(self):
        self.body, self.fc = Body(5), Linear(self.classes)

    def features(self, x, train=False, mask=None, tap=None):
        return self.body(x.reshape(x.shape[0], -1), train, mask)

    def head(self, features):
        return self.fc(features)

    def __call__(self, x):
        return self.head(self.features(x))


def tiny_bn(shape: tuple[int, int, int], classes: int) -> Model:
    return from_module(
        "tiny_bn",
        TinyNorm(classes),
        shape=shape,
        groups=("body", "fc"),
        dense=("body", "fc"),
        width=5,
        classes=classes,
        stages=(),
        dtype=jnp.float32,
    )
