"""The plain networks: `mlp`, `lenet5`, `cnn4`, `cnn6`, as one flax module over a list of groups."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_sim.models.layers import ConvRelu, Linear


class PlainNet(nn.Module):
    """Convolution blocks conv1…, hidden layers fc1… with ReLU, and the head fc.

    `convs` holds (channels, k, pad, pool) per convolution block, `hidden` the widths of the hidden layers.
    """

    convs: tuple[tuple[int, int, int, bool], ...]
    hidden: tuple[int, ...]
    classes: int
    conv: str = "auto"
    dtype: Any = jnp.float32

    def setup(self):
        for i, (channels, k, pad, pool) in enumerate(self.convs, 1):
            setattr(self, f"conv{i}", ConvRelu(channels, k, pad, pool, self.conv, self.dtype))
        for i, width in enumerate(self.hidden, 1):
            setattr(self, f"fc{i}", Linear(width, self.dtype))
        self.fc = Linear(self.classes, self.dtype)

    def features(self, x, train=False, mask=None, tap=None):
        """`[B,H,W,C] -> [B,d]`; there is no BatchNorm, so `train` and `mask` change nothing."""
        x = x.astype(self.dtype)
        for i in range(1, len(self.convs) + 1):
            x = getattr(self, f"conv{i}")(x)
            if tap is not None:
                x = tap(f"conv{i}", x)
        x = x.reshape(x.shape[0], -1)
        for i in range(1, len(self.hidden) + 1):
            x = nn.relu(getattr(self, f"fc{i}")(x))
        return x

    def head(self, features):
        """`[B,d] -> [B,classes]`."""
        return self.fc(features)

    def __call__(self, x):
        return self.head(self.features(x))


def plain_groups(convs: tuple, hidden: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of (convolution groups, dense groups), in order."""
    return (tuple(f"conv{i}" for i in range(1, len(convs) + 1)), (*(f"fc{i}" for i in range(1, len(hidden) + 1)), "fc"))
