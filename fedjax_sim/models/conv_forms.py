"""Convolution written in several ways with equal values; `layers.py` says which layer takes which.

All functions are for ONE client: `x [B,H,W,ci]`, kernel `w [k,k,ci,co]`, as in PyTorch a
cross-correlation.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from fedjax_sim.models.pool import materialize, relu_pool_corners, relu_pool_narrow
from fedjax_sim.models.products import patch_product
from fedjax_sim.types import Array


def pad_map(x: Array, pad: int) -> Array:
    """Zeros around the map `[B,H,W,C]`."""
    return jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0))) if pad else x


def lax_conv(
    x: Float[Array, "batch height width channels"],
    w: Float[Array, "side side channels out"],
    stride: int = 1,
    pad: int = 0,
    out: Any = None,
) -> Float[Array, "batch _ _ out"]:
    """The reference, XLA's own convolution; out: the result's type where it is not that of the
    operands.

    >>> lax_conv(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)))[0, 0, 0].tolist()
    [9.0]
    """
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        ((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=out,
    )


def patches_conv(
    x: Float[Array, "batch height width channels"],
    w: Float[Array, "side side channels out"],
    stride: int = 1,
    pad: int = 0,
) -> Float[Array, "batch _ _ out"]:
    """One GEMM: the k*k shifted maps side by side, `[B·h·w, k·k·ci] @ [k·k·ci, co]`.

    >>> patches_conv(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)))[0, 0, 0].tolist()
    [9.0]
    """
    k, _, ci, co = w.shape
    B, H, W, _ = x.shape
    h, v = (H + 2 * pad - k) // stride + 1, (W + 2 * pad - k) // stride + 1
    if h == v == 1:  # a dense layer over the taps that meet the map
        i, j = min(k - pad, H), min(k - pad, W)
        return (
            x[:, :i, :j].reshape(B, -1) @ w[pad : pad + i, pad : pad + j].reshape(-1, co)
        ).reshape(B, 1, 1, co)
    if stride > 1 and ci < 16:
        return _space_to_depth_conv(x, w, stride, pad, h, v)
    if k == 1 and stride == 1:
        return (pad_map(x, pad).reshape(-1, ci) @ w.reshape(ci, co)).reshape(B, h, v, co)
    if stride == 1:
        x = pad_map(x, pad)
        taps = [x[:, i : i + h, j : j + v] for i in range(k) for j in range(k)]
    else:
        # padded row stride*a + i  =  block a + i//stride, phase i%stride: slices without a step
        x = pad_to_blocks(x, stride, pad, h + (k - 1) // stride, v + (k - 1) // stride)
        parts = [divmod(i, stride) for i in range(k)]
        taps = [x[:, a : a + h, p, b : b + v, q] for a, p in parts for b, q in parts]
    patches = jnp.concatenate(taps, -1) if k > 1 else taps[0]
    return patch_product(patches.reshape(B * h * v, -1), w.reshape(-1, co)).reshape(B, h, v, co)


def pad_to_blocks(x: Array, s: int, pad: int, rows: int, cols: int) -> Array:
    """`x [B,H,W,C]` with `pad` zeros before, as rows x cols blocks of s x s:
    `[B,rows,s,cols,s,C]`."""
    B, C = x.shape[0], x.shape[3]
    # what no window reaches is cut off
    x = x[:, : max(s * rows - pad, 0), : max(s * cols - pad, 0)]
    after = s * rows - pad - x.shape[1], s * cols - pad - x.shape[2]
    x = jnp.pad(x, ((0, 0), (pad, after[0]), (pad, after[1]), (0, 0)))
    return x.reshape(B, rows, s, cols, s, C)


def _space_to_depth_conv(x, w, s, pad, h, v):
    """Strided convolution of few channels: an unstrided one over s*s*ci channels, few wide
    slices."""
    k, _, ci, co = w.shape
    n = -(-k // s)  # kernel size in blocks
    B = x.shape[0]
    x = pad_to_blocks(x, s, pad, h + n - 1, v + n - 1)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(B, h + n - 1, v + n - 1, s * s * ci)
    w = jnp.pad(w, ((0, n * s - k), (0, n * s - k), (0, 0), (0, 0)))
    w = w.reshape(n, s, n, s, ci, co).transpose(0, 2, 1, 3, 4, 5).reshape(n, n, s * s * ci, co)
    return patches_conv(x, w)


def block_pool(
    x: Float[Array, "batch height width channels"],
    w: Float[Array, "side side channels out"],
    b: Float[Array, " out"],
) -> Float[Array, "batch _ _ out"]:
    """`relu(max_pool2(conv(x, w) + b))`, odd k, no padding, from one GEMM.

    A patch is the field of t x t outputs, cut from blocks of t x t inputs as n·n wide slices; the
    GEMM's columns are those outputs, from t·t shifted copies of the kernel, so pooling needs no
    strided reads. t = 2 is one window (k=5: 1.44x the flops of plain patches, a third of the
    bytes). For few channels t = 4, four windows: 2.6x the flops, but a quarter of the rows, each
    long enough for the vector unit, and windows come out in the blocks that the next `block_pool`
    wants: the transposition here and the one there cancel.
    """
    k, _, ci, co = w.shape
    B, H, W, _ = x.shape
    h, v = (H - k + 1) // 2, (W - k + 1) // 2  # the pooled map (floor)
    t = 4 if co <= 8 and h % 2 == v % 2 == 0 else 2
    s = t // 2  # s x s windows
    h, v = h // s, v // s  # patches
    n = -(-(k + t - 1) // t)  # blocks across a patch
    x = pad_to_blocks(x, t, 0, h + n - 1, v + n - 1)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(B, h + n - 1, v + n - 1, t * t * ci)
    patches = jnp.concatenate([x[:, i : i + h, j : j + v] for i in range(n) for j in range(n)], -1)
    patches = (materialize(patches) if t == 4 else patches).reshape(B * h * v, -1)
    # columns: corner of the window, window, channel
    field = n * t - k
    places = [
        (2 * i + p, 2 * j + q) for p in (0, 1) for q in (0, 1) for i in range(s) for j in range(s)
    ]
    kernel = jnp.stack(
        [jnp.pad(w, ((i, field - i), (j, field - j), (0, 0), (0, 0))) for i, j in places], 3
    )
    kernel = (
        kernel.reshape(n, t, n, t, ci, t * t * co)
        .transpose(0, 2, 1, 3, 4, 5)
        .reshape(-1, t * t * co)
    )
    pool = relu_pool_narrow if s * s * co <= 16 else relu_pool_corners
    y = pool(patch_product(patches, kernel), jnp.tile(b, s * s), (B, h, v, s * s * co))
    return y.reshape(B, h, v, s, s, co).transpose(0, 1, 3, 2, 4, 5).reshape(B, h * s, v * s, co)
