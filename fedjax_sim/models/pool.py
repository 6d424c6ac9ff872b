"""Max-pooling with ReLU, and `settle`, which keeps XLA-CPU from recomputing a gradient once per use."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def settle(g: jax.Array) -> jax.Array:
    """`g` itself, written to memory once.

    XLA-CPU fuses cheap producers into every consumer that reads them, so a gradient used four times (once per
    corner of a pooling window) is recomputed four times, with everything before it. A division counts as
    expensive and is computed once; `lax.optimization_barrier` does not have this effect.

    >>> bool(settle(jnp.float32(3)) == 3)
    True
    """
    return g / (1 + 0 * g)


@jax.custom_vjp
def settled(x: jax.Array) -> jax.Array:
    """The identity, whose gradient is settled."""
    return x


settled.defvjp(lambda x: (x, None), lambda _, g: (settle(g),))


@jax.custom_vjp
def relu_max(values: tuple[jax.Array, ...]) -> jax.Array:
    """`max(0, values[0], values[1], …)` elementwise: ReLU and max-pool of windows given as arrays.

    As in PyTorch the first winner takes the whole gradient (jax's own gradient of `maximum` splits ties), and
    a window whose maximum is not positive takes none.

    >>> jax.grad(lambda a: relu_max((a, a)))(2.0).item()   # all of it once, not twice one half each
    1.0
    """
    return _relu_max_forward(values)[0]


def _relu_max_forward(values):
    best = values[0]
    for v in values[1:]:
        best = jnp.maximum(best, v)
    return jnp.maximum(best, 0), (values, best)


def _relu_max_backward(residual, g):
    values, best = residual
    g = settle(jnp.where(best > 0, g, 0))
    gradients, taken = [], jnp.zeros(best.shape, bool)
    for v in values:
        won = (v == best) & ~taken
        gradients.append(jnp.where(won, g, 0))
        taken = taken | won
    return (tuple(gradients),)


relu_max.defvjp(_relu_max_forward, _relu_max_backward)


def pool2(y: jax.Array) -> jax.Array:
    """ReLU and 2x2 max-pool, stride 2, of `y [B,H,W,C]`; an odd last row or column is left out (floor).

    >>> pool2(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    B, H, W, C = y.shape
    h, w = H // 2, W // 2
    y = y[:, :2 * h, :2 * w].reshape(B, h, 2, w, 2, C)
    return relu_max(tuple(y[:, :, p, :, q] for p in (0, 1) for q in (0, 1)))


def pool3(y: jax.Array) -> jax.Array:
    """ReLU and 3x3 max-pool, stride 2, padding 1, of `y [B,H,W,C]` (the ImageNet stem).

    >>> pool3(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    B, H, W, C = y.shape
    h, w = -(-H // 2), -(-W // 2)
    # one row and column of -inf before, enough after for an even size: [B, h+1, 2, w+1, 2, C]
    y = jnp.pad(y, ((0, 0), (1, 2 * h + 1 - H), (1, 2 * w + 1 - W), (0, 0)), constant_values=-jnp.inf)
    y = settled(y).reshape(B, h + 1, 2, w + 1, 2, C)
    taps = [divmod(i, 2) for i in range(3)]                     # padded row 2a+i = block a+i//2, phase i%2
    return relu_max(tuple(y[:, a:a + h, p, b:b + w, q] for a, p in taps for b, q in taps))


def lax_pool(y: jax.Array, window: int, stride: int, pad: int) -> jax.Array:
    """The reference: ReLU and max-pool by `lax.reduce_window` (the first winner takes the gradient)."""
    return lax.reduce_window(relu(y), -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1),
                             ((0, 0), (pad, pad), (pad, pad), (0, 0)))


def relu(x: jax.Array) -> jax.Array:
    """`max(x, 0)` with gradient 0 at 0."""
    return jax.nn.relu(x)
