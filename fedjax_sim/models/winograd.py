"""Winograd's minimal filtering: convolution with fewer multiplications.

In one dimension F(m, r) gives m outputs of an r-tap filter with n = m+r-1 products,

    y = Aᵀ [ (G g) ⊙ (Bᵀ d) ],      d: n inputs, g: r taps;

nested in two dimensions, and summed over channels, the products become n·n GEMMs. All for ONE
client.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedjax_sim.models.conv_forms import pad_to_blocks
from fedjax_sim.models.pool import (
    materialize,
    materialize_both_ways,
    materialize_gradient,
    relu_max,
)
from fedjax_sim.models.products import patch_product
from fedjax_sim.types import Array

# and infinity; chosen for small constants
POINTS = {4: (0.0, 1.0, -1.0), 6: (0.0, 1.0, -1.0, 0.5, -0.5)}


@cache
def toom_cook(m: int, r: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`A [n,m], G [n,r], Bt [n,n]` of F(m, r) by evaluation at `POINTS[n]` and infinity (float64).

    >>> A, G, Bt = toom_cook(2, 3)
    >>> d, g = np.array([1.0, 2, 3, 4]), np.array([1.0, 0, -1])
    >>> (A.T @ ((G @ g) * (Bt @ d))).tolist()          # [1-3, 2-4]
    [-2.0, -2.0]
    """
    n = m + r - 1

    def powers(columns):
        a = np.array([[p**j for j in range(columns)] for p in POINTS[n]] + [[0.0] * columns])
        a[-1, -1] = 1
        return a

    return powers(m), powers(r), np.linalg.inv(powers(n)).T


def combine(coefficients: Sequence[float] | np.ndarray, arrays: Sequence[Array]) -> Array:
    """`Σ c·a` without the terms whose coefficient is zero; constants take the arrays' dtype."""
    terms = [
        a if c == 1 else jnp.asarray(c, a.dtype) * a
        for c, a in zip(np.asarray(coefficients), arrays, strict=True)
        if abs(c) > 1e-12
    ]
    total = terms[0]
    for t in terms[1:]:
        total = total + t
    return total


def transform(matrix: np.ndarray, x: Array) -> Array:
    """`matrix @ x` along the first axis, as one exact GEMM (no TF32)."""
    return jnp.matmul(jnp.asarray(matrix, x.dtype), x, precision="highest")


def winograd_pool(
    x: Float[Array, "batch height width channels"],
    w: Float[Array, "side side channels out"],
    b: Float[Array, " out"],
) -> Float[Array, "batch _ _ out"]:
    """`relu(max_pool2(conv(x, w) + b))` by F(2x2, kxk), k = 3 or 5, no padding.

    A tile is a pooling window: (k+1)² GEMMs `[B·h·v, ci] @ [ci, co]`, 2.8x (k=5) or 2.25x (k=3)
    fewer multiplications. They are separate GEMMs because XLA-CPU runs one batched product twice as
    slowly.
    """
    k, _, ci, co = w.shape
    B, H, W, _ = x.shape
    A, G, Bt = toom_cook(2, k)
    n, s = k + 1, (k + 1) // 2
    h, v = (H - k + 1) // 2, (W - k + 1) // 2
    x = pad_to_blocks(x, 2, 0, h + s - 1, v + s - 1).reshape(B, h + s - 1, 2, 2 * (v + s - 1), ci)
    # [B,h,2(v+s-1),ci]
    rows = [materialize_gradient(x[:, a : a + h, p]) for a in range(s) for p in (0, 1)]
    tiles = []
    for i in range(n):
        t = materialize_both_ways(combine(Bt[i], rows)).reshape(B, h, v + s - 1, 2, ci)
        cols = [materialize_gradient(t[:, :, a : a + v, p]) for a in range(s) for p in (0, 1)]
        tiles += [combine(Bt[j], cols).reshape(B * h * v, ci) for j in range(n)]
    u = jnp.split(transform(np.kron(G, G), w.reshape(k * k, ci * co)), n * n)
    m = [patch_product(t, ui.reshape(ci, co)) for t, ui in zip(tiles, u, strict=True)]
    half = [[combine(A[:, a], [m[n * i + j] for i in range(n)]) for j in range(n)] for a in (0, 1)]
    y = tuple(materialize(combine(A[:, c], half[a])) for a in (0, 1) for c in (0, 1))
    return relu_max(y, b, (B, h, v, co))
