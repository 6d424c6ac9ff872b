"""ResNet-18 (He et al. 2016) with either stem; groups stem, stage1 … stage4, fc."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_sim.errors import unknown
from fedjax_sim.models.batch_norm import BatchNorm
from fedjax_sim.models.layers import Conv, Linear, pool3_relu
from fedjax_sim.models.narrow import full, kept
from fedjax_sim.models.record import Model, from_module
from fedjax_sim.models.registry import too_small

WIDTHS = (64, 128, 256, 512)
STEMS = ("imagenet", "cifar")


class Stem(nn.Module):
    """`imagenet`: conv 7x7/2, BatchNorm, ReLU, max-pool 3x3/2; `cifar`: conv 3x3, BatchNorm,
    ReLU."""

    stem: str
    conv: str
    dtype: Any
    activations: Any

    @nn.compact
    def __call__(self, x, train, rows):
        k, stride, pad = (7, 2, 3) if self.stem == "imagenet" else (3, 1, 1)
        x = Conv(64, k, stride, pad, self.conv, self.dtype, self.activations, name="conv")(x)
        x = kept(BatchNorm(self.dtype, name="bn")(full(x), train, rows(x)), self.activations)
        return pool3_relu(x, self.conv) if self.stem == "imagenet" else nn.relu(x)


class Block(nn.Module):
    """`relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))`; a 1x1 convolution as shortcut if shapes
    differ."""

    channels: int
    stride: int
    conv: str
    dtype: Any
    activations: Any

    @nn.compact
    def __call__(self, x, train, rows):
        def conv_bn(x, k, stride, name):
            x = Conv(
                self.channels,
                k,
                stride,
                k // 2,
                self.conv,
                self.dtype,
                self.activations,
                name=f"conv{name}",
            )(x)
            return kept(
                BatchNorm(self.dtype, name=f"bn{name}")(full(x), train, rows(x)), self.activations
            )

        y = nn.relu(conv_bn(x, 3, self.stride, "1"))
        y = conv_bn(y, 3, 1, "2")
        if self.stride > 1 or x.shape[-1] != self.channels:
            x = conv_bn(x, 1, self.stride, "_shortcut")
        return kept(nn.relu(full(y) + full(x)), self.activations)


class Stage(nn.Module):
    """Two blocks, the first with the stride."""

    channels: int
    stride: int
    conv: str
    dtype: Any
    activations: Any

    @nn.compact
    def __call__(self, x, train, rows):
        x = Block(
            self.channels, self.stride, self.conv, self.dtype, self.activations, name="block1"
        )(x, train, rows)
        return Block(self.channels, 1, self.conv, self.dtype, self.activations, name="block2")(
            x, train, rows
        )


class ResNet18(nn.Module):
    """Stem, four stages, global average pooling, linear head."""

    classes: int
    stem_kind: str = "imagenet"
    conv: str = "auto"
    dtype: Any = jnp.float32
    activations: Any = None  # bfloat16, or None: as dtype

    def setup(self):
        self.stem = Stem(self.stem_kind, self.conv, self.dtype, self.activations)
        for i, channels in enumerate(WIDTHS, 1):
            setattr(
                self,
                f"stage{i}",
                Stage(channels, 1 if i == 1 else 2, self.conv, self.dtype, self.activations),
            )
        self.fc = Linear(self.classes, self.dtype, self.activations)

    def features(self, x, train=False, mask=None, tap=None):
        """`[B,H,W,C] -> [B,512]`."""

        def rows(x):  # the mask repeated over the map: [B·h·w]
            return (
                None
                if mask is None
                else jnp.repeat(mask.astype(self.dtype), x.shape[1] * x.shape[2])
            )

        x = kept(x.astype(self.dtype), self.activations)
        for name in ("stem", *(f"stage{i}" for i in range(1, 5))):
            x = getattr(self, name)(x, train, rows)
            if tap is not None:
                x = kept(tap(name, full(x)), self.activations)
        return full(x).mean((1, 2))

    def head(self, features):
        """`[B,512] -> [B,classes]`."""
        return self.fc(features)

    def __call__(self, x):
        return self.head(self.features(x))


def build_resnet18(
    shape: tuple[int, int, int],
    classes: int,
    *,
    dtype: Any,
    conv: str,
    activations: Any = None,
    stem: str = "imagenet",
) -> Model:
    """The record of ResNet-18; `build("resnet18", …)` calls this."""
    if stem not in STEMS:
        raise unknown("stem of resnet18", stem, STEMS)
    if min(shape[:2]) < 2:
        raise too_small("resnet18", shape)
    stages = (("stem", 64), *((f"stage{i}", c) for i, c in enumerate(WIDTHS, 1)))
    return from_module(
        "resnet18",
        ResNet18(classes, stem, conv, dtype, activations),
        shape=shape,
        groups=(*(name for name, _ in stages), "fc"),
        dense=("fc",),
        width=512,
        classes=classes,
        stages=stages,
        dtype=dtype,
        activations=activations,
    )
