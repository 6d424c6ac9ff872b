"""The layers of all models, and the one place that chooses how a convolution is computed.

Every form gives the same values (tests compare them in float64); `conv=` selects one for a whole
model:

* `lax`: XLA's convolution. The reference. On CPU inside a loop 15-30x slower than the others.
* `select`: XLA's convolution, and 2x2 pooling whose gradient is one elementwise pass.
* `patches`: shifted maps side by side and one GEMM. With kernels that differ per client (`vmap`)
  this is a batched GEMM, where `lax` becomes a grouped convolution with a slow backward pass.
* `block`: 2x2 pooling folded into the patches; layers without pooling take `patches`.
* `winograd`: fewer multiplications; layers it cannot do (strides, 1x1, 7x7) take `patches`.
* `auto`: the fastest measured per layer shape on CPU; on accelerators what their compilers estimate
  best, `ON_DEVICE`.

With `activations=jnp.bfloat16` (`narrow.py`) pooling stands apart from the convolution, which is
XLA's own on accelerators.

`docs/performance.md` tells what was measured, what did not pay, and how to measure again.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from fedjax_sim.models import narrow
from fedjax_sim.models.conv_forms import block_pool, lax_conv, pad_map, patches_conv
from fedjax_sim.models.pool import lax_max, lax_pool, pool2, pool3, select_max2, select_pool2
from fedjax_sim.models.products import dense_product
from fedjax_sim.models.small_maps import fits_tiles, tiles_conv
from fedjax_sim.models.winograd import winograd_pool
from fedjax_sim.platform import target
from fedjax_sim.types import Array

FORMS = ("auto", "lax", "select", "patches", "block", "winograd")
XLAS_OWN = ("lax", "select")  # the convolution itself is XLA's
# what `auto` is on accelerators, by their compilers' figures
ON_DEVICE = {"tpu": "lax", "gpu": "select"}


def device_form(conv: str) -> str:
    """`auto` as it is on an accelerator; on a CPU it is chosen layer by layer."""
    return ON_DEVICE.get(target(), conv) if conv == "auto" else conv


def pooled_form(conv: str, k: int, ci: int, co: int) -> str:
    """The form of `relu(max_pool2(conv))` for a k x k kernel from ci to co channels."""
    conv = device_form(conv)
    if conv == "auto":
        return "winograd" if (k == 5 and ci >= 16) or (k == 3 and ci >= 4) else "block"
    if (conv == "block" and k % 2 == 0) or (conv == "winograd" and k not in (3, 5)):
        return "patches"
    return conv


def conv_relu_pool(
    x: Float[Array, "batch height width channels"],
    w: Float[Array, "side side channels out"],
    b: Float[Array, " out"],
    *,
    pad: int = 0,
    conv: str = "auto",
) -> Float[Array, "batch _ _ out"]:
    """`relu(max_pool2(conv(x, w) + b))` for ONE client: `x [B,H,W,ci]`, `w [k,k,ci,co]` ->
    `[B,H',W',co]`.

    >>> conv_relu_pool(jnp.ones((1, 6, 6, 1)), jnp.ones((3, 3, 1, 1)), jnp.zeros(1))[
    ...     0, :, :, 0
    ... ].tolist()
    [[9.0, 9.0], [9.0, 9.0]]
    """
    form = pooled_form(conv, w.shape[0], w.shape[2], w.shape[3])
    if form == "lax":
        return lax_pool(lax_conv(x, w, 1, pad), 2, 2, 0, b)
    if form == "select":
        return select_pool2(lax_conv(x, w, 1, pad), b)
    if form == "patches":
        return pool2(patches_conv(x, w, 1, pad), b)
    return (block_pool if form == "block" else winograd_pool)(pad_map(x, pad), w, b)


def uniform_fan_in(fan_in: int):
    """PyTorch's default for linear and convolution layers, weight and bias: U(±1/sqrt(fan_in))."""
    bound = 1 / math.sqrt(fan_in)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def kaiming_fan_out(key, shape, dtype):
    """He et al.: N(0, 2 / (k·k·co)) for a kernel `[k,k,ci,co]`."""
    k, _, _, co = shape
    return jax.random.normal(key, shape, dtype) * jnp.asarray(math.sqrt(2 / (k * k * co)), dtype)


def pool3_relu(x: Array, conv: str) -> Array:
    """ReLU and max-pool 3x3, stride 2, padding 1."""
    if x.dtype == narrow.NARROW and target() == "cpu":
        return narrow.narrow(pool3_relu(narrow.wide(x), conv))
    return lax_pool(x, 3, 2, 1) if device_form(conv) in XLAS_OWN else pool3(x)


def narrow_conv(
    x: Float[Array, "batch height width channels"],
    w: Float[Array, "side side channels out"],
    stride: int,
    pad: int,
    conv: str,
    out: Any = narrow.NARROW,
) -> Float[Array, "batch _ _ out"]:
    """Convolution of bfloat16 maps for ONE client: a CPU takes the form `conv` says, in float32."""
    if target() != "cpu":
        return narrow.conv(x, w, stride, pad, out)
    return narrow.narrow(plain_conv(narrow.wide(x), narrow.rounded(w), stride, pad, conv))


def narrow_pool2(y: Array, conv: str) -> Array:
    """2x2 max-pooling, without bias and ReLU."""
    return lax_max(y, 2, 2, 0) if device_form(conv) == "lax" else select_max2(y)


class Linear(nn.Module):
    """`x @ kernel + bias`, kernel `[in, out]`; never less than float32."""

    width: int
    dtype: Any = jnp.float32
    activations: Any = None  # bfloat16, or None: as dtype

    @nn.compact
    def __call__(self, x):
        init = uniform_fan_in(x.shape[-1])
        kernel = self.param("kernel", init, (x.shape[-1], self.width), self.dtype)
        bias = self.param("bias", init, (self.width,), self.dtype)
        if self.activations is not None:
            return (
                narrow.product(x if x.dtype == narrow.NARROW else narrow.narrow(x), kernel) + bias
            )
        return dense_product(x, kernel) + bias


class ConvRelu(nn.Module):
    """Convolution with bias and ReLU, and 2x2 max-pooling if `pool`."""

    channels: int
    k: int
    pad: int = 0
    pool: bool = True
    conv: str = "auto"
    dtype: Any = jnp.float32
    activations: Any = None

    @nn.compact
    def __call__(self, x):
        init = uniform_fan_in(self.k * self.k * x.shape[-1])
        kernel = self.param(
            "kernel", init, (self.k, self.k, x.shape[-1], self.channels), self.dtype
        )
        bias = self.param("bias", init, (self.channels,), self.dtype)
        if self.activations is not None:
            # a TPU's vector unit knows float32 alone: it packs and unpacks a map that is bfloat16
            # before the pooling
            out = narrow.WIDE if target() == "tpu" else narrow.NARROW
            y = narrow_conv(x, kernel, 1, self.pad, self.conv, out)
            y = narrow_pool2(y, self.conv) if self.pool else y
            return narrow.narrow(nn.relu(narrow.full(y) + bias))
        if self.pool:
            return conv_relu_pool(x, kernel, bias, pad=self.pad, conv=self.conv)
        return nn.relu(plain_conv(x, kernel, 1, self.pad, self.conv) + bias)


def plain_conv(
    x: Float[Array, "batch height width channels"],
    w: Float[Array, "side side channels out"],
    stride: int,
    pad: int,
    conv: str,
) -> Float[Array, "batch _ _ out"]:
    """Convolution without pooling for ONE client, in the form `conv` says.

    >>> plain_conv(jnp.ones((1, 2, 2, 1)), jnp.ones((3, 3, 1, 1)), 1, 1, "auto").ravel().tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    conv = device_form(conv)
    if conv in XLAS_OWN:
        return lax_conv(x, w, stride, pad)
    # with few channels the transforms of a large map outweigh everything
    tiles = conv == "winograd" or (conv == "auto" and (x.shape[1] <= 4 or x.shape[3] >= 32))
    if tiles and fits_tiles(x, w.shape[0], stride, pad):
        return tiles_conv(x, w)
    return patches_conv(x, w, stride, pad)


class Conv(nn.Module):
    """Convolution without bias, Kaiming-normal (fan out): ResNet's."""

    channels: int
    k: int
    stride: int = 1
    pad: int = 0
    conv: str = "auto"
    dtype: Any = jnp.float32
    activations: Any = None

    @nn.compact
    def __call__(self, x):
        shape = (self.k, self.k, x.shape[-1], self.channels)
        kernel = self.param("kernel", kaiming_fan_out, shape, self.dtype)
        convolve = plain_conv if self.activations is None else narrow_conv
        return convolve(x, kernel, self.stride, self.pad, self.conv)
