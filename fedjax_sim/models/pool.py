"""Max-pooling with ReLU, and `materialize`, which keeps XLA-CPU from recomputing a gradient
once per use."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from fedjax_sim.types import Array


def materialize(g: Array) -> Array:
    """`g` itself, written to memory once.

    XLA-CPU fuses cheap producers into every consumer that reads them, so a gradient used four times
    (once per corner of a pooling window) is recomputed four times, with everything before it. A
    division counts as expensive and is computed once; `lax.optimization_barrier` does not have this
    effect.

    >>> bool(materialize(jnp.float32(3)) == 3)
    True
    """
    return g / (1 + 0 * g)


@jax.custom_vjp
def materialize_gradient(x: Array) -> Array:
    """The identity, whose gradient is materialized."""
    return x


materialize_gradient.defvjp(lambda x: (x, None), lambda _, g: (materialize(g),))


@jax.custom_vjp
def materialize_both_ways(x: Array) -> Array:
    """The identity, materialized in both directions."""
    return materialize(x)


materialize_both_ways.defvjp(lambda x: (materialize(x), None), lambda _, g: (materialize(g),))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def relu_max(values: tuple[Array, ...], b: Array, shape: tuple[int, ...]) -> Array:
    """`max(0, b + max(values[0], values[1], …))` elementwise: bias, ReLU, max-pool.

    The values are the corners of pooling windows. As in PyTorch the first winner takes the whole
    gradient (jax's own gradient of `maximum` splits ties), and a window whose result is not
    positive takes none. The bias `b [co]` (last axis) is added after the maximum: the same value
    with fewer additions, also in its gradient. The result has `shape`: the gradient is materialized
    before it is flattened, because a flattened fusion divides to find each index.

    >>> # not twice a half
    >>> jax.grad(lambda a: relu_max((a, a), jnp.zeros(1), (1,))[0])(jnp.array([2.0])).item()
    1.0
    """
    return _relu_max_forward(values, b, shape)[0]


def _maximum(values):
    best = values[0]
    for v in values[1:]:
        best = jnp.maximum(best, v)
    return best


def _sum_rows(g):
    """The sum over all axes but the last, as a product."""
    return jnp.ones(g.size // g.shape[-1], g.dtype) @ g.reshape(-1, g.shape[-1])


def _relu_max_forward(values, b, shape):
    out = materialize(jnp.maximum(_maximum(values) + b, 0)).reshape(shape)
    return out, (values, out)


def _to_first_winner(values, g):
    """For each of the values the gradient of their maximum: g where it is the first that attains
    it, else 0."""
    best, taken, gradients = _maximum(values), False, []
    for v in values:
        won = (v == best) & jnp.logical_not(taken)
        gradients.append(jnp.where(won, g, 0))
        taken = taken | won
    return gradients


def _relu_max_backward(shape, residual, g):
    values, out = residual
    g = materialize(jnp.where(out > 0, g, 0)).reshape(values[0].shape)
    return tuple(materialize(part) for part in _to_first_winner(values, g)), _sum_rows(g)


relu_max.defvjp(_relu_max_forward, _relu_max_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def relu_pool_narrow(y: Array, b: Array, shape: tuple[int, ...]) -> Array:
    """`relu_max` of the four corners side by side, `y [R,4·co]`, for few channels.

    Rows of few channels do not fill the vector unit, so the gradient is spread over the four
    corners by a product with the one-hot matrix `[co,4·co]` (exact: one nonzero term), and whole
    rows are compared.

    >>> y = jnp.array([[1.0, 2.0, 2.0, 0.0]])
    >>> jax.grad(lambda y: relu_pool_narrow(y, jnp.zeros(1), (1, 1)).sum())(y).tolist()
    [[0.0, 1.0, 0.0, 0.0]]
    """
    return _narrow_forward(y, b, shape)[0]


def _corners(y):
    co = y.shape[1] // 4
    return [y[:, i * co : (i + 1) * co] for i in range(4)]


def _narrow_forward(y, b, shape):
    out = materialize(jnp.maximum(_maximum(_corners(y)) + b, 0)).reshape(shape)
    return out, (y, out)


def _narrow_backward(shape, residual, g):
    y, out = residual
    g = materialize(jnp.where(out > 0, g, 0)).reshape(y.shape[0], -1)
    corners = _corners(y)
    best = _maximum(corners)
    winner = jnp.full(best.shape, 3, g.dtype)
    for i in (2, 1, 0):
        winner = jnp.where(corners[i] == best, jnp.asarray(i, g.dtype), winner)
    co = g.shape[1]
    spread = jnp.tile(jnp.eye(co, dtype=g.dtype), (1, 4))
    spread_g, spread_winner = (jnp.matmul(a, spread, precision="highest") for a in (g, winner))
    corner = jnp.repeat(jnp.arange(4, dtype=g.dtype), co)
    return jnp.where(spread_winner == corner, spread_g, 0), _sum_rows(g)


relu_pool_narrow.defvjp(_narrow_forward, _narrow_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def relu_pool_corners(y: Array, b: Array, shape: tuple[int, ...]) -> Array:
    """As `relu_pool_narrow`, where the corners are wide enough to be compared one by one and joined
    again.

    >>> y = jnp.array([[1.0, 2.0, 2.0, 0.0]])
    >>> jax.grad(lambda y: relu_pool_corners(y, jnp.zeros(1), (1, 1)).sum())(y).tolist()
    [[0.0, 1.0, 0.0, 0.0]]
    """
    return _narrow_forward(y, b, shape)[0]


def _corners_backward(shape, residual, g):
    y, out = residual
    g = materialize(jnp.where(out > 0, g, 0)).reshape(y.shape[0], -1)
    return jnp.concatenate(_to_first_winner(_corners(y), g), 1), _sum_rows(g)


relu_pool_corners.defvjp(_narrow_forward, _corners_backward)


def pool2(
    y: Float[Array, "batch height width channels"], b: Float[Array, " channels"]
) -> Float[Array, "batch _ _ channels"]:
    """Bias, ReLU and 2x2 max-pool, stride 2, of `y [B,H,W,C]`; an odd last row or column is left
    out (floor).

    >>> pool2(jnp.arange(16.0).reshape(1, 4, 4, 1), jnp.zeros(1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    B, H, W, C = y.shape
    h, w = H // 2, W // 2
    y = y[:, : 2 * h, : 2 * w].reshape(B, h, 2, w, 2, C)
    return relu_max(tuple(y[:, :, p, :, q] for p in (0, 1) for q in (0, 1)), b, (B, h, w, C))


@jax.custom_vjp
def select_pool2(
    y: Float[Array, "batch height width channels"], b: Float[Array, " channels"]
) -> Float[Array, "batch _ _ channels"]:
    """As `pool2`, whose gradient is one elementwise pass over the map: each place asks whether it
    is its window's winner.

    For GPUs, which read the corners of a window from their cache, and run XLA's own gradient of
    `reduce_window` as three passes with an index for every window.

    >>> jax.grad(lambda y: select_pool2(y, jnp.zeros(1)).sum())(
    ...     jnp.ones((1, 2, 2, 1))
    ... ).ravel().tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    return _select_forward(y, b)[0]


def _window_corners(y):
    B, H, W, C = y.shape
    h, w = H // 2, W // 2
    y = y[:, : 2 * h, : 2 * w].reshape(B, h, 2, w, 2, C)
    return [y[:, :, p, :, q] for p in (0, 1) for q in (0, 1)]


def _select_forward(y, b):
    out = jnp.maximum(_maximum(_window_corners(y)) + b, 0)
    return out, (y, out)


def _to_winner(y, g):
    """The gradient g of the windows' maxima at its place in the map."""
    corners = _window_corners(y)
    best, winner = _maximum(corners), jnp.full(g.shape, 3, jnp.int8)
    for i in (2, 1, 0):
        winner = jnp.where(corners[i] == best, jnp.int8(i), winner)
    (B, h, w, C), (_, H, W, _) = g.shape, y.shape
    spread = lambda a: a[:, :, None, :, None]  # [B,h,1,w,1,C]
    corner = jnp.arange(4, dtype=jnp.int8).reshape(1, 1, 2, 1, 2, 1)
    full = jnp.where(spread(winner) == corner, spread(g), 0).reshape(B, 2 * h, 2 * w, C)
    return jnp.pad(full, ((0, 0), (0, H - 2 * h), (0, W - 2 * w), (0, 0)))


def _select_backward(residual, g):
    y, out = residual
    g = jnp.where(out > 0, g, 0)
    return _to_winner(y, g), g.sum((0, 1, 2))


select_pool2.defvjp(_select_forward, _select_backward)


@jax.custom_vjp
def select_max2(
    y: Float[Array, "batch height width channels"],
) -> Float[Array, "batch _ _ channels"]:
    """The maximum alone, without bias and ReLU, with the gradient of `select_pool2`.

    >>> jax.grad(lambda y: select_max2(y).sum())(jnp.ones((1, 2, 2, 1))).ravel().tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    return _maximum(_window_corners(y))


select_max2.defvjp(lambda y: (_maximum(_window_corners(y)), y), lambda y, g: (_to_winner(y, g),))


def pool3(y: Float[Array, "batch height width channels"]) -> Float[Array, "batch _ _ channels"]:
    """ReLU and 3x3 max-pool, stride 2, padding 1, of `y [B,H,W,C]` (the ImageNet stem).

    >>> pool3(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    B, H, W, C = y.shape
    h, w = -(-H // 2), -(-W // 2)
    # one row and column of -inf before, enough after for an even size: [B, h+1, 2, w+1, 2, C]
    y = jnp.pad(
        y, ((0, 0), (1, 2 * h + 1 - H), (1, 2 * w + 1 - W), (0, 0)), constant_values=-jnp.inf
    )
    y = materialize_gradient(y).reshape(B, h + 1, 2, w + 1, 2, C)
    taps = [divmod(i, 2) for i in range(3)]  # padded row 2a+i = block a+i//2, phase i%2
    window = tuple(y[:, a : a + h, p, b : b + w, q] for a, p in taps for b, q in taps)
    return relu_max(window, jnp.zeros(C, y.dtype), (B, h, w, C))


def lax_pool(y: Array, window: int, stride: int, pad: int, b: Array | float = 0.0) -> Array:
    """The reference: max-pool by `lax.reduce_window` (the first winner takes the gradient), bias,
    ReLU.

    In this order the bias and its gradient cost a quarter, and the maximum is the same: rounding
    keeps the order. On a TPU the gradient step of LeNet-5 has 0.6, that of cnn4 0.45 of the cycles
    it has with the bias first.
    """
    return relu(lax_max(y, window, stride, pad) + b)


def lax_max(
    y: Float[Array, "batch height width channels"], window: int, stride: int, pad: int
) -> Float[Array, "batch _ _ channels"]:
    """The maximum alone, without bias and ReLU."""
    pads = ((0, 0), (pad, pad), (pad, pad), (0, 0))
    return lax.reduce_window(
        y, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), pads
    )


def relu(x: Array) -> Array:
    """`max(x, 0)` with gradient 0 at 0."""
    return jax.nn.relu(x)
