"""3x3 convolution, padding 1, of maps so small that a few Winograd tiles cover them (ResNet on
small images).

With zeros outside the map a tile needs fewer products than Winograd's general one: for two
neighbours

    y₀ = x₀g₁ + x₁g₂ = (x₀+x₁)g₁ + x₁(g₂-g₁),     y₁ = x₀g₀ + x₁g₁ = (x₀+x₁)g₁ + x₀(g₀-g₁):

three products instead of four, nine GEMMs `[B,ci] @ [ci,co]` for a 2x2 map where patches multiply
36 times. A 4x4 map is one tile of F(4x4,3x3): 36 GEMMs where patches multiply 144 times. An 8x8 map
is four of them, with the four tiles in the rows of each GEMM. The transforms are products with
small constant matrices over whole maps, which XLA neither recomputes nor cuts in slices, and no
patches are built. All for ONE client.
"""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedjax_sim.models.pool import materialize, materialize_gradient
from fedjax_sim.models.products import patch_product
from fedjax_sim.models.winograd import toom_cook, transform
from fedjax_sim.types import Array

SIZES = (2, 4, 8)


@cache
def tile_matrices(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`A [tiles,n,size], G [n,3], Bt [tiles,n,size]` with `y = Σ_tiles Aᵀ((G g) ⊙ (Bt x))` for a
    row with zeros around.

    >>> A, G, Bt = tile_matrices(2)
    >>> # [1·2 + 10·3, 1·1 + 10·2]
    >>> (A[0].T @ ((G @ [1.0, 2.0, 3.0]) * (Bt[0] @ [1.0, 10.0]))).tolist()
    [32.0, 21.0]
    """
    if size == 2:
        return (
            np.array([[[1.0, 1], [1, 0], [0, 1]]]),
            np.array([[0.0, 1, 0], [0, -1, 1], [1, -1, 0]]),
            np.array([[[1.0, 1], [0, 1], [1, 0]]]),
        )
    tiles = size // 4
    A, G, Bt = toom_cook(4, 3)  # A [6,4], Bt [6,6]: outputs 4t … 4t+3 from inputs 4t-1 … 4t+4
    wide_A, wide_Bt = np.zeros((tiles, 6, size)), np.zeros((tiles, 6, size + 2))
    for t in range(tiles):
        wide_A[t, :, 4 * t : 4 * t + 4] = A
        wide_Bt[t, :, 4 * t : 4 * t + 6] = Bt
    return wide_A, G, wide_Bt[:, :, 1:-1]  # the first and last input are padding


def in_two_dimensions(matrix: np.ndarray) -> np.ndarray:
    """`[tiles,n,size]` of a row -> `[n·n·tiles·tiles, size·size]` of a map, ordered by product,
    then by tile."""
    tiles, n, size = matrix.shape
    return np.einsum("tpi,uqj->pqtuij", matrix, matrix).reshape(n * n * tiles * tiles, size * size)


def fits_tiles(x: Array, k: int, stride: int, pad: int) -> bool:
    """Whether `tiles_conv` computes this layer."""
    return (k, stride, pad) == (3, 1, 1) and x.shape[1] == x.shape[2] and x.shape[1] in SIZES


def tiles_conv(
    x: Float[Array, "batch height width channels"], w: Float[Array, "side side channels out"]
) -> Float[Array, "batch _ _ out"]:
    """The 3x3 convolution with padding 1 of `x [B,H,H,ci]`, H = 2, 4 or 8, `w [3,3,ci,co]` ->
    `[B,H,H,co]`.

    >>> tiles_conv(jnp.ones((1, 2, 2, 1)), jnp.ones((3, 3, 1, 1))).ravel().tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    B, H, _, ci = x.shape
    co = w.shape[3]
    A, G, Bt = tile_matrices(H)
    n = len(G) ** 2
    # materialized where parts are joined: XLA turns the product with a concatenation into a sum of
    # products
    # [n·tiles², B·ci]
    v = materialize_gradient(
        transform(in_two_dimensions(Bt), x.transpose(1, 2, 0, 3).reshape(H * H, B * ci))
    )
    u = materialize_gradient(transform(np.kron(G, G), w.reshape(9, ci * co)))  # [n, ci·co]
    m = [
        patch_product(vi.reshape(-1, ci), ui.reshape(ci, co))  # [tiles²·B, co]
        for vi, ui in zip(jnp.split(v, n), jnp.split(u, n), strict=True)
    ]
    # [H·H, B·co]
    y = transform(in_two_dimensions(A).T, materialize(jnp.stack(m)).reshape(-1, B * co))
    return y.reshape(H, H, B, co).transpose(2, 0, 1, 3)
