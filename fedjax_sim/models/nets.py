"""The plain networks: `mlp`, `lenet5`, `cnn4`, `cnn6`, as one flax module over a list of groups."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_sim.models.layers import ConvRelu, Linear
from fedjax_sim.models.narrow import full, kept


class PlainNet(nn.Module):
    """Convolution blocks conv1…, hidden layers fc1… with ReLU, and the head fc.

    `convs` holds (channels, k, pad, pool) per convolution block, `hidden` the widths of the hidden
    layers.
    """

    convs: tuple[tuple[int, int, int, bool], ...]
    hidden: tuple[int, ...]
    classes: int
    conv: str = "auto"
    dtype: Any = jnp.float32
    activations: Any = None  # bfloat16, or None: as dtype

    def setup(self):
        for i, (channels, k, pad, pool) in enumerate(self.convs, 1):
            setattr(
                self,
                f"conv{i}",
                ConvRelu(channels, k, pad, pool, self.conv, self.dtype, self.activations),
            )
        for i, width in enumerate(self.hidden, 1):
            setattr(self, f"fc{i}", Linear(width, self.dtype, self.activations))
        self.fc = Linear(self.classes, self.dtype, self.activations)

    def features(self, x, train=False, mask=None, tap=None):
        """`[B,H,W,C] -> [B,d]`; there is no BatchNorm, so `train` and `mask` change nothing."""
        x = kept(x.astype(self.dtype), self.activations)
        for i in range(1, len(self.convs) + 1):
            x = getattr(self, f"conv{i}")(x)
            if tap is not None:
                x = kept(tap(f"conv{i}", full(x)), self.activations)
        x = x.reshape(x.shape[0], -1)
        for i in range(1, len(self.hidden) + 1):
            x = kept(nn.relu(getattr(self, f"fc{i}")(x)), self.activations)
        return full(x)

    def head(self, features):
        """`[B,d] -> [B,classes]`."""
        return self.fc(features)

    def __call__(self, x):
        return self.head(self.features(x))


def plain_groups(convs: tuple, hidden: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of (convolution groups, dense groups), in order."""
    return (
        tuple(f"conv{i}" for i in range(1, len(convs) + 1)),
        (*(f"fc{i}" for i in range(1, len(hidden) + 1)), "fc"),
    )
