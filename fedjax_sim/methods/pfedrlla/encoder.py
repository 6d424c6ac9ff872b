"""The multi-head autoencoder (MHAE): weight matrices of any size become one short vector per head.

    projection   A_l: the layer's weights as [32, M_l], minus the mean of its 32 rows
                 F_l = U(A_l) [32, 32]: left singular vectors, from the eigenvectors of A_l A_lᵀ, largest first
    encoder      h_1 … h_L = LSTM²(vec F_1 … vec F_L)       1024 → 128, two layers, the L layers as a sequence
    embedding    e = Σ_l h_l                                [128]
    decoder      F̂_1 … F̂_L = LSTM²(h_1 … h_L)              128 → 1024, two layers
    loss         Σ_l mean (F̂_l − F_l)²                      Adam 5e-3, weight decay 1e-5 (added to the gradient)

A singular vector is known up to its sign: the entry of largest size is made positive. Directions without any weight
(centring leaves at most 31) are arbitrary, so they are 0. Biases are not used; a number of weights that is no multiple of
32 is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_sim.types import Array, Tree

NEGLIGIBLE = 1e-5  # eigenvalues below this share of the largest are noise
RATE, DECAY = 5e-3, 1e-5
LAYERS = 2  # of both LSTMs


# ---- the projection -----------------------------------------------------------------------------------------------
def project(weights: Array, side: int) -> Array:
    """F [side, side] of ONE layer's weights [inputs…, outputs]; the outputs vary slowest, as PyTorch stores them.

    >>> project(jnp.ones((4, 8)), 4).tolist() == jnp.zeros((4, 4)).tolist()       # nothing is left of equal rows
    True
    """
    flat = weights.reshape(-1, weights.shape[-1]).T.reshape(-1)
    matrix = jnp.pad(flat, (0, -flat.shape[0] % side)).reshape(side, -1)  # A [side, M]
    matrix = matrix - matrix.mean(0)
    gram = jnp.matmul(matrix, matrix.T, precision=lax.Precision.HIGHEST)
    sizes, vectors = jnp.linalg.eigh(gram)
    sizes, vectors = sizes[::-1], vectors[:, ::-1]
    peak = jnp.take_along_axis(vectors, jnp.abs(vectors).argmax(0)[None], 0)
    return jnp.where(sizes > NEGLIGIBLE * sizes[0], vectors * jnp.sign(peak), 0)


def matrices(params: Tree, groups: tuple[str, ...]) -> list[Array]:
    """The weight matrices (not the biases) of the named groups, in order."""
    return [a for g in groups for a in jax.tree.leaves(params[g]) if a.ndim > 1]


def features(params: Tree, groups: tuple[str, ...], side: int) -> Array:
    """[L, side²]: what the encoder reads of ONE net."""
    return jnp.stack([project(a, side).reshape(-1) for a in matrices(params, groups)])


# ---- the autoencoder ----------------------------------------------------------------------------------------------
class Mhae(nn.Module):
    """A sequence of projected layers [L, W] -> (encodings [L, E], reconstructions [L, W])."""

    embedding: int
    width: int
    dtype: type = jnp.float32

    def setup(self):
        cell = lambda size: nn.RNN(nn.OptimizedLSTMCell(size, dtype=self.dtype, param_dtype=self.dtype))
        self.down = [cell(self.embedding) for _ in range(LAYERS)]
        self.up = [cell(self.width) for _ in range(LAYERS)]

    def encode(self, x: Array) -> Array:
        for layer in self.down:
            x = layer(x)
        return x

    def __call__(self, x: Array) -> tuple[Array, Array]:
        codes = out = self.encode(x)
        for layer in self.up:
            out = layer(out)
        return codes, out


class Encoder(NamedTuple):
    """The MHAE as the server keeps it; this is `server.encoder` of a run."""

    params: Tree
    optimiser: Tree
    rounds: Array  # []  int32, rounds it has seen; the agent's counter beside it
    loss: Array  # []  mean reconstruction loss when it was last trained


class Functions(NamedTuple):
    """An autoencoder as pure functions."""

    init: Callable  # (L) -> Encoder
    embed: Callable  # (encoder, features [..., L, W]) -> [..., E]
    loss: Callable  # (params, features [L, W]) -> []                                              ONE client
    train: Callable  # (encoder, features [M, L, W], use [M]) -> Encoder, one step per client in use


def embed(network: Mhae, params: Tree, x: Array) -> Array:
    """e = Σ_l h_l of features [..., L, W]."""
    return network.apply(params, x, method="encode").sum(-2)  # type: ignore[union-attr]


def mhae(side: int = 32, embedding: int = 128, rate: float = RATE, dtype: type = jnp.float32) -> Functions:
    """The autoencoder for layers projected to side × side."""
    network = Mhae(embedding, side * side, dtype)
    rule = optax.chain(optax.add_decayed_weights(DECAY), optax.scale_by_adam(), optax.scale(-rate))

    def init(layers: int) -> Encoder:
        # always the same start, as the methods' state has no key of its own
        params = network.init(jax.random.key(0), jnp.zeros((layers, side * side), dtype))
        return Encoder(params, rule.init(params), jnp.int32(0), jnp.zeros((), dtype))

    def loss(params: Tree, x: Array) -> Array:
        _, found = network.apply(params, x)  # type: ignore[misc]
        return jnp.square(found - x).mean(-1).sum()

    def train(encoder: Encoder, x: Array, use: Array) -> Encoder:
        order, count = jnp.argsort(~use, stable=True), use.sum()

        def step(i: Array, carry: tuple) -> tuple:
            params, state, total = carry
            value, gradient = jax.value_and_grad(loss)(params, x[order[i]])
            change, state = rule.update(gradient, state, params)
            return optax.apply_updates(params, change), state, total + value

        start = (encoder.params, encoder.optimiser, jnp.zeros((), dtype))
        params, state, total = lax.fori_loop(0, count, step, start)
        now = jnp.where(count > 0, total / jnp.maximum(count, 1), encoder.loss)
        return encoder._replace(params=params, optimiser=state, loss=now)

    return Functions(init, lambda encoder, x: embed(network, encoder.params, x), loss, train)


# ---- what it is compared with -------------------------------------------------------------------------------------
def pca(rows: Array, dims: int) -> Array:
    """[B, dims] principal components of rows [B, D], through the Gram matrix [B, B]: D may be millions.

    >>> print(jnp.abs(pca(jnp.array([[0.0, 0.0], [3.0, 4.0]]), 1)).ravel())
    [2.5 2.5]
    """
    rows = rows - rows.mean(0)
    sizes, vectors = jnp.linalg.eigh(jnp.matmul(rows, rows.T, precision=lax.Precision.HIGHEST))
    sizes, vectors = sizes[::-1][:dims], vectors[:, ::-1][:, :dims]
    peak = jnp.take_along_axis(vectors, jnp.abs(vectors).argmax(0)[None], 0)
    return vectors * jnp.sign(peak) * jnp.sqrt(jnp.maximum(sizes, 0))
