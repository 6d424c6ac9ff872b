"""The multi-head autoencoder (MHAE): weight matrices of any size become one short vector per head.

    layer        A_l: the layer's weights as [32, M_l], minus the mean of its 32 rows
    projection   basis=shared   F_l = A_l V_l [32, 32]: V_l the 32 leading right singular vectors of
                                all A_l of the first cohort, stacked; then F_l minus its mean over
                                clients, in units of its spread
                 basis=own      F_l = U(A_l) [32, 32]: its own left singular vectors, from the
                                eigenvectors of A_l A_lᵀ, largest first (the paper's)
    encoder      h_1 … h_L = LSTM²(vec F_1 … vec F_L)       1024 → 128, two layers, a sequence of L
    embedding    e = Σ_l h_l                                [128]
    decoder      F̂_1 … F̂_L = LSTM²(h_1 … h_L)              128 → 1024, two layers
    loss         Σ_l mean (F̂_l − F_l)²         Adam 5e-3, weight decay 1e-5 (added to the gradient)

Why a basis of the whole run: eigenvalues of neighbours differ by less than heads of one group do,
so each head's own vectors come in another order and turn into each other, and two heads of one
group are as far apart as two of different groups. Why minus the mean: heads share a start, and
beside it all cosines are 1.

A singular vector is known up to its sign: the entry of largest size is made positive. Directions
without any weight (centring leaves at most 31) are arbitrary, so they are 0. Biases are not used; a
number of weights that is no multiple of 32 is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_sim.platform import target
from fedjax_sim.types import Array, Tree

BASES = ("shared", "own")
NEGLIGIBLE = 1e-5  # eigenvalues below this share of the largest are noise
ROUNDING = 1e-10  # a spread below this share of the centre's square is none
FOLLOWED = 0.1  # how much of centre and spread a round renews
RATE, DECAY = 5e-3, 1e-5
LAYERS = 2  # of both LSTMs
GATES = "ifgo"  # input, forget, cell, output, as Flax names them
# entries of a matrix that is better shared out over the cores of a machine than kept by each
WIDE = 2**20
FEW = 8  # rows whose outer products are cheaper to compute twice than to store


# ---- the projection ------------------------------------------------------------------------------
def as_rows(weights: Array, side: int) -> Array:
    """[side, M] of ONE layer's weights [inputs…, outputs]; the outputs vary slowest, as PyTorch
    stores them."""
    flat = weights.reshape(-1, weights.shape[-1]).T.reshape(-1)
    return jnp.pad(flat, (0, -flat.shape[0] % side)).reshape(side, -1)


def as_matrix(weights: Array, side: int) -> Array:
    """A [side, M] of ONE layer's weights: its rows minus their mean."""
    rows = as_rows(weights, side)
    return rows - rows.mean(0)


def product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def leading(gram: Array) -> tuple[Array, Array]:
    """(eigenvalues [n], eigenvectors [n, n]) of a Gram matrix, largest first; both 0 where
    negligible."""
    sizes, vectors = jnp.linalg.eigh(gram)
    sizes, vectors = sizes[::-1], vectors[:, ::-1]
    real = sizes > NEGLIGIBLE * sizes[0]
    return jnp.where(real, sizes, 0), jnp.where(real, vectors, 0)


def with_signs(vectors: Array) -> Array:
    """Columns with their largest entry positive."""
    peak = jnp.take_along_axis(vectors, jnp.abs(vectors).argmax(0)[None], 0)
    return vectors * jnp.sign(peak)


def project(weights: Array, side: int) -> Array:
    """U [side, side] of ONE layer's weights, its own left singular vectors.

    >>> # nothing is left of equal rows
    >>> project(jnp.ones((4, 8)), 4).tolist() == jnp.zeros((4, 4)).tolist()
    True
    """
    matrix = as_matrix(weights, side)
    return with_signs(leading(product(matrix, matrix.T))[1])


def common_basis(stack: Array) -> Array:
    """V [M, side]: right singular vectors of matrices [K, side, M] above one another, through the
    smaller Gram matrix."""
    _, side, width = stack.shape
    rows = stack.reshape(-1, width)
    if rows.shape[0] > width:
        vectors = leading(product(rows.T, rows))[1][:, :side]
    else:
        sizes, left = leading(product(rows, rows.T))
        left = left[:, :side] / jnp.sqrt(jnp.where(sizes[:side] > 0, sizes[:side], 1))
        vectors = product(rows.T, left)
    return with_signs(jnp.pad(vectors, ((0, 0), (0, side - vectors.shape[1]))))


def in_basis(weights: Array, side: int, basis: Array) -> Array:
    """A V [side, side] of ONE layer. The mean of the rows is subtracted from the small product: it
    is the same matrix."""
    flat = weights.reshape(-1, weights.shape[-1])  # [inputs, outputs]
    if flat.shape[1] % side:
        seen = product(as_rows(weights, side), basis)
    # contracted where they lie: to write the weights transposed costs three times the product
    else:
        blocks = flat.reshape(flat.shape[0], side, -1)
        shaped = basis.reshape(-1, flat.shape[0], side)
        seen = jnp.einsum("irj,jis->rs", blocks, shaped, precision=lax.Precision.HIGHEST)
    return seen - seen.mean(0)


class Frame(NamedTuple):
    """How the heads of a run are seen; an agent that continues in another run needs it."""

    basis: tuple  # L × V_l [M_l, side]
    centre: Array  # [L, side²] mean of F over clients
    spread: Array  # [L] mean square of an entry of F − centre


def matrices(params: Tree, groups: tuple[str, ...]) -> list[Array]:
    """The weight matrices (not the biases) of the named groups, in order."""
    return [a for g in groups for a in jax.tree.leaves(params[g]) if a.ndim > 1]


def no_frame(params: Tree, groups: tuple[str, ...], side: int) -> Frame:
    """Before anything is known; in the shapes of ONE net's."""
    layers = matrices(params, groups)
    basis = tuple(jnp.zeros((-(-a.size // side), side), a.dtype) for a in layers)
    return Frame(
        basis,
        jnp.zeros((len(layers), side * side), layers[0].dtype),
        jnp.zeros(len(layers), layers[0].dtype),
    )


def make_frame(params: Tree, groups: tuple[str, ...], side: int) -> tuple[Frame, Array]:
    """(the frame of K nets [K, …], their features [K, L, side²])."""
    stacks = jax.vmap(lambda net: tuple(as_matrix(a, side) for a in matrices(net, groups)))(params)
    basis = tuple(common_basis(stack) for stack in stacks)
    seen = jnp.stack(
        [product(a, v).reshape(a.shape[0], -1) for a, v in zip(stacks, basis, strict=True)], 1
    )
    centre = seen.mean(0)
    return Frame(basis, centre, jnp.square(seen - centre).mean((0, 2))), seen


def follow(frame: Frame, seen: Array, use: Array) -> Frame:
    """Centre and spread a little nearer to those of the features [K, L, side²] of the clients in
    use [K]."""
    count = jnp.maximum(use.sum(), 1)
    mean = lambda a: jnp.where(use[:, None, None], a, 0).sum(0) / count
    step = jnp.where(use.any(), FOLLOWED, 0).astype(seen.dtype)
    centre = frame.centre + step * (mean(seen) - frame.centre)
    return frame._replace(
        centre=centre,
        spread=frame.spread + step * (mean(jnp.square(seen - centre)).mean(-1) - frame.spread),
    )


def placed(frame: Any, seen: Array) -> Array:
    """Features [..., L, side²] as the encoder reads them: around 0, and as large as entries of
    singular vectors."""
    if frame == ():
        return seen
    # clients that are still equal differ by rounding only
    least = ROUNDING * jnp.square(frame.centre).mean(-1)
    width = jnp.sqrt(jnp.maximum(frame.spread, least) * frame.centre.shape[-1] ** 0.5)[:, None]
    return (seen - frame.centre) / jnp.where(width > 0, width, 1)


def features(params: Tree, groups: tuple[str, ...], side: int, frame: Any = ()) -> Array:
    """[L, side²]: ONE net's projected layers, in the frame's basis if there is one."""
    layers = matrices(params, groups)
    if frame == ():
        return jnp.stack([project(a, side).reshape(-1) for a in layers])
    return jnp.stack(
        [in_basis(a, side, v).reshape(-1) for a, v in zip(layers, frame.basis, strict=True)]
    )


# ---- the autoencoder -----------------------------------------------------------------------------
class Mhae(nn.Module):
    """The weights of the four LSTMs, as Flax names and draws them; what is computed with them is
    below."""

    embedding: int
    width: int
    dtype: type = jnp.float32

    def setup(self):
        cell = lambda size: nn.RNN(
            nn.OptimizedLSTMCell(size, dtype=self.dtype, param_dtype=self.dtype)
        )
        self.down = [cell(self.embedding) for _ in range(LAYERS)]
        self.up = [cell(self.width) for _ in range(LAYERS)]

    def __call__(self, x: Array) -> Array:
        for layer in (*self.down, *self.up):
            x = layer(x)  # type: ignore[assignment]
        return x


def cells(params: Tree, *names: str) -> list[Tree]:
    """The weights of the named LSTMs, layer by layer."""
    return [params["params"][f"{name}_{i}"]["cell"] for name in names for i in range(LAYERS)]


def lstm(cell: Tree, x: Array, nudge: Array | None = None) -> Array:
    """[..., L, H] out of a sequence x [..., L, I] by ONE layer; nudge [L, 4, H] is added to what
    enters the gates.

    Nothing is multiplied with the state before the first step, which is 0. Vectors meet each matrix
    where it lies: Flax writes the four gates' matrices side by side at every step, and their
    gradients apart again.
    """
    out: list[Array] = []
    c: Array | None = None
    for t in range(x.shape[-2]):
        entering = []
        for k, gate in enumerate(GATES):
            z = cell[f"h{gate}"]["bias"]
            z = out[-1] @ cell[f"h{gate}"]["kernel"] + z if out else z
            z = z + x[..., t, :] @ cell[f"i{gate}"]["kernel"]
            entering.append(z if nudge is None else z + nudge[t, k])
        i, f, o = (jax.nn.sigmoid(entering[k]) for k in (0, 1, 3))
        new = i * jnp.tanh(entering[2])
        c = new if c is None else f * c + new
        out.append(o * jnp.tanh(c))
    return jnp.stack(out, -2)


def reconstruct(params: Tree, nudges: list, x: Array) -> tuple[Array, list[Array]]:
    """(the loss of ONE client's features x [L, W], [x, and what each LSTM makes of it])."""
    seen = [x]
    for cell, nudge in zip(cells(params, "down", "up"), nudges, strict=True):
        seen.append(lstm(cell, seen[-1], nudge))
    return jnp.square(seen[-1] - x).mean(-1).sum(), seen


@jax.jit  # traced once, however often a round is
def slopes(params: Tree, x: Array) -> tuple[Array, list[Array], list[Array]]:
    """(loss, what each LSTM read and at last wrote, the loss's slopes [L, 4, H] at the gates of
    each): ONE client.

    All that its gradient is made of: few numbers beside it.
    """
    nudges = [
        jnp.zeros((x.shape[0], len(GATES), c["hi"]["bias"].shape[0]), x.dtype)
        for c in cells(params, "down", "up")
    ]
    (value, seen), found = jax.value_and_grad(reconstruct, 1, has_aux=True)(params, nudges, x)
    return value, seen, found


def outer(a: Array, b: Array) -> Array:
    """aᵀ b of a few rows [T, I] and [T, O], entry by entry: who reads the product computes it, and
    it is never stored."""
    if not 0 < a.shape[0] <= FEW:
        return a.T @ b
    return sum((a[t][:, None] * b[t] for t in range(1, a.shape[0])), a[0][:, None] * b[0])


def gradient(seen: list[Array], found: list[Array]) -> Tree:
    """The gradient with respect to the weights, from `slopes`."""
    out = {}
    names = [f"{name}_{i}" for name in ("down", "up") for i in range(LAYERS)]
    for name, x, h, slope in zip(names, seen[:-1], seen[1:], found, strict=True):
        cell: dict[str, Tree] = {}
        for k, gate in enumerate(GATES):
            cell[f"i{gate}"] = {"kernel": outer(x, slope[:, k])}
            cell[f"h{gate}"] = {"kernel": outer(h[:-1], slope[1:, k]), "bias": slope[:, k].sum(0)}
        out[name] = {"cell": cell}
    return {"params": out}


def before_writing(sure: Array, read: Callable, *arguments: Any) -> Any:
    """read(*arguments); `sure` is always true. On the CPU a conditional: the compiler knows no
    order between what is read of the weights and their update, and would copy all of them to be
    safe."""
    if target() != "cpu":
        return read(*arguments)
    shapes = jax.eval_shape(read, *arguments)
    nothing = lambda *_: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return lax.cond(sure, read, nothing, *arguments)


class Encoder(NamedTuple):
    """The MHAE as the server keeps it; this is `server.encoder` of a run."""

    params: Tree
    optimiser: Tree
    rounds: Array  # []  int32, rounds it has seen; the agent's counter beside it
    loss: Array  # []  mean reconstruction loss when it was last trained

    def shared_out(self, devices: int) -> Tree:
        """[leaf: whether] for `layout.server_shardings`: the decoder and its moments, which are
        read in training only and are nearly all there is; a small one is not worth the messages."""
        *_, rows, columns = self.params["params"]["up_0"]["cell"]["hi"]["kernel"].shape
        worth = rows * columns >= WIDE and columns % devices == 0
        decoder = lambda path: any(str(getattr(step, "key", "")).startswith("up_") for step in path)
        return jax.tree_util.tree_map_with_path(lambda path, _: worth and decoder(path), self)


class Functions(NamedTuple):
    """An autoencoder as pure functions."""

    init: Callable  # (L) -> Encoder
    embed: Callable  # (encoder, features [..., L, W]) -> [..., E]
    # (params, features [L, W]) -> []                                              ONE client
    loss: Callable
    train: Callable  # (encoder, features [M, L, W], use [M]) -> Encoder, one step per client in use


@jax.jit
def embed(params: Tree, x: Array) -> Array:
    """e = Σ_l h_l of features [..., L, W]."""
    for cell in cells(params, "down"):
        x = lstm(cell, x)
    return x.sum(-2)


def mhae(
    side: int = 32, embedding: int = 128, rate: float = RATE, dtype: type = jnp.float32
) -> Functions:
    """The autoencoder for layers projected to side × side."""
    network = Mhae(embedding, side * side, dtype)
    rule = optax.chain(optax.add_decayed_weights(DECAY), optax.scale_by_adam(), optax.scale(-rate))

    def init(layers: int) -> Encoder:
        # always the same start, as the methods' state has no key of its own
        params = network.init(jax.random.key(0), jnp.zeros((layers, side * side), dtype))
        return Encoder(params, rule.init(params), jnp.int32(0), jnp.zeros((), dtype))

    def train(encoder: Encoder, x: Array, use: Array) -> Encoder:
        order, count = jnp.argsort(~use, stable=True), use.sum()

        def step(i: Array, carry: tuple) -> tuple:
            params, state, total = carry
            value, *found = before_writing(i < count, slopes, params, x[order[i]])
            change, state = rule.update(gradient(*found), state, params)
            return optax.apply_updates(params, change), state, total + value

        def learn(encoder: Encoder) -> Encoder:
            start = (encoder.params, encoder.optimiser, jnp.zeros((), dtype))
            params, state, total = lax.fori_loop(0, count, step, start)
            return encoder._replace(
                params=params, optimiser=state, loss=total / jnp.maximum(count, 1)
            )

        # a conditional around the loop: without it a round in which nothing is learned copies the
        # 168 MB of the loop's state
        return lax.cond(count > 0, learn, lambda same: same, encoder)

    loss = lambda params, x: reconstruct(params, [None] * 2 * LAYERS, x)[0]
    return Functions(init, lambda encoder, x: embed(encoder.params, x), loss, train)


# ---- what it is compared with --------------------------------------------------------------------
def pca(rows: Array, dims: int) -> Array:
    """[B, dims] principal components of rows [B, D], through the Gram matrix [B, B]: D may be
    millions.

    >>> print(jnp.abs(pca(jnp.array([[0.0, 0.0], [3.0, 4.0]]), 1)).ravel())
    [2.5 2.5]
    """
    rows = rows - rows.mean(0)
    sizes, vectors = leading(product(rows, rows.T))
    return with_signs(vectors[:, :dims]) * jnp.sqrt(sizes[:dims])
