"""3x3 convolution, padding 1, of maps so small that the whole map is one Winograd tile (late ResNet stages).

With zeros outside the map the tile needs fewer products than Winograd's general one: for two neighbours

    y₀ = x₀g₁ + x₁g₂ = (x₀+x₁)g₁ + x₁(g₂-g₁),     y₁ = x₀g₀ + x₁g₁ = (x₀+x₁)g₁ + x₀(g₀-g₁):

three products instead of four, nine GEMMs `[B,ci] @ [ci,co]` for a 2x2 map where patches multiply 36 times.
A 4x4 map is one tile of F(4x4,3x3): 36 GEMMs where patches multiply 144 times. The transforms are products with
small constant matrices over whole maps, which XLA neither recomputes nor cuts in slices. All for ONE client.
"""
from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.models.winograd import toom_cook, transform


@cache
def tile_matrices(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`A [n,size], G [n,3], Bt [n,size]` with `y = Aᵀ((G g) ⊙ (Bt x))` for a row of 2 or 4 with zeros around.

    >>> A, G, Bt = tile_matrices(2)
    >>> (A.T @ ((G @ [1.0, 2.0, 3.0]) * (Bt @ [1.0, 10.0]))).tolist()        # [1·2 + 10·3, 1·1 + 10·2]
    [32.0, 21.0]
    """
    if size == 2:
        return (np.array([[1.0, 1], [1, 0], [0, 1]]), np.array([[0.0, 1, 0], [0, -1, 1], [1, -1, 0]]),
                np.array([[1.0, 1], [0, 1], [1, 0]]))
    A, G, Bt = toom_cook(size, 3)
    return A, G, Bt[:, 1:-1]                                # the first and last input are padding


def fits_one_tile(x: jax.Array, k: int, stride: int, pad: int) -> bool:
    """Whether `one_tile_conv` computes this layer."""
    return (k, stride, pad) == (3, 1, 1) and x.shape[1] == x.shape[2] and x.shape[1] in (2, 4)


def one_tile_conv(x: jax.Array, w: jax.Array) -> jax.Array:
    """The 3x3 convolution with padding 1 of `x [B,H,H,ci]`, H = 2 or 4, `w [3,3,ci,co]` -> `[B,H,H,co]`.

    >>> one_tile_conv(jnp.ones((1, 2, 2, 1)), jnp.ones((3, 3, 1, 1))).ravel().tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    B, H, _, ci = x.shape
    co = w.shape[3]
    A, G, Bt = tile_matrices(H)
    n = len(G) ** 2
    v = transform(np.kron(Bt, Bt), x.transpose(1, 2, 0, 3).reshape(H * H, B * ci))      # [n, B·ci]
    u = transform(np.kron(G, G), w.reshape(9, ci * co))                                 # [n, ci·co]
    m = [vi.reshape(B, ci) @ ui.reshape(ci, co)
         for vi, ui in zip(jnp.split(v, n), jnp.split(u, n), strict=True)]
    y = transform(np.kron(A, A).T, jnp.stack(m).reshape(n, B * co))                     # [H·H, B·co]
    return y.reshape(H, H, B, co).transpose(2, 0, 1, 3)
