"""Activations in bfloat16: what travels between layers has half the bytes; weights, their gradients
and sums stay float32.

Rounded to bfloat16:

* the operands of a product or a convolution, which adds up in float32;
* what a layer hands on, after bias and ReLU or BatchNorm, and what comes back through it; on GPU
  and CPU also the map before a pooling.

The gradient of a weight is float32 as it was added up (see `kernel_gradient` for GPUs), and so are
biases, logits, losses and BatchNorm's statistics. A CPU computes in float32 with numbers that were
rounded: it shows what the option does to a model, and is slower for it. All for ONE client.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.models.conv_forms import lax_conv
from fedjax_sim.models.products import dense_product
from fedjax_sim.platform import target
from fedjax_sim.types import Array

NARROW, WIDE = jnp.bfloat16, jnp.float32


def _round(x: Array) -> Array:
    """float32 numbers that bfloat16 has. XLA leaves out a conversion there and back, but never
    this."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def narrow(x: Array) -> Array:
    """
    >>> narrow(jnp.float32(1.001)).item()
    1.0
    """
    return (_round(x) if target() == "cpu" else x).astype(NARROW)


@jax.custom_vjp
def wide(x: Array) -> Array:
    """bfloat16 as float32; its gradient is rounded."""
    return x.astype(WIDE)


wide.defvjp(lambda x: (x.astype(WIDE), None), lambda _, g: (narrow(g),))


def kept(x: Array, activations: Any) -> Array:
    """`x` as it is handed on to the next layer."""
    return x if activations is None else narrow(x)


def full(x: Array) -> Array:
    """`x` as one computes with it: never bfloat16."""
    return wide(x) if x.dtype == NARROW else x


@jax.custom_vjp
def rounded(w: Array) -> Array:
    """Weights as an operand, in float32; their gradient is not rounded."""
    return _round(w)


rounded.defvjp(lambda w: (_round(w), None), lambda _, g: (g,))


@jax.custom_vjp
def rounded_back(y: Array) -> Array:
    """The identity, whose gradient is rounded: it will be an operand."""
    return y


rounded_back.defvjp(lambda y: (y, None), lambda _, g: (_round(g),))


# ---- dense layers --------------------------------------------------------------------------------
def product(x: Array, w: Array) -> Array:
    """`x @ w` of bfloat16 `x [B,in]` and float32 weights `[in,out]`, as float32.

    >>> product(narrow(jnp.ones((1, 2))), jnp.array([[1.001], [1.0]])).item()
    2.0
    """
    return rounded_back(dense_product(wide(x), rounded(w))) if target() == "cpu" else _product(x, w)


def _dot(a, b, over_a, over_b):
    return lax.dot_general(a, b, (((over_a,), (over_b,)), ((), ())), preferred_element_type=WIDE)


@jax.custom_vjp
def _product(x, w):
    return _product_forward(x, w)[0]


def _product_forward(x, w):
    w = w.astype(NARROW)
    return _dot(x, w, 1, 0), (x, w)


def _product_backward(residual, g):
    (x, w), g = residual, g.astype(NARROW)
    return _dot(g, w, 1, 1).astype(NARROW), _dot(x, g, 0, 0)


_product.defvjp(_product_forward, _product_backward)


# ---- convolutions, on accelerators ---------------------------------------------------------------
@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def conv(x: Array, w: Array, stride: int, pad: int, out: Any = NARROW) -> Array:
    """XLA's convolution of bfloat16 `x [B,H,W,ci]` and float32 weights `[k,k,ci,co]`, as `out`.

    >>> w = jnp.ones((3, 3, 1, 1))
    >>> g = jax.grad(lambda w: conv(jnp.ones((1, 4, 4, 1), NARROW), w, 1, 0).astype(WIDE).sum())(w)
    >>> g.dtype.name, g.ravel()[:2].tolist()
    ('float32', [4.0, 4.0])
    """
    return _conv_forward(x, w, stride, pad, out)[0]


def _conv_forward(x, w, stride, pad, out):
    w = w.astype(NARROW)
    return lax_conv(x, w, stride, pad, out), (x, w)


def _conv_backward(stride, pad, out, residual, g):
    (x, w), g = residual, g.astype(NARROW)
    (back,) = jax.linear_transpose(lambda x: lax_conv(x, w, stride, pad), x)(g)
    return back, kernel_gradient(x, g, w.shape[0], stride, pad)


conv.defvjp(_conv_forward, _conv_backward)


def kernel_gradient(x: Array, g: Array, k: int, stride: int, pad: int) -> Array:
    """`[k,k,ci,co]` in float32: the map convolved with its gradient; channels are the batch, and
    the batch is added up.

    JAX's own gradient has the operands' type. On a GPU this one had it too before it became
    float32: cuDNN gives no other, and XLA would rather write both operands down once more as
    float32.
    """
    type_there = NARROW if target() == "gpu" else WIDE
    ends = [
        k - 1 - size - pad + stride * (out - 1) + 1
        for size, out in zip(x.shape[1:3], g.shape[1:3], strict=True)
    ]
    summed = lax.conv_general_dilated(
        x,
        g,
        (1, 1),
        [(pad, end) for end in ends],
        rhs_dilation=(stride, stride),
        dimension_numbers=("CHWN", "IHWO", "HWNC"),
        preferred_element_type=type_there,
    )
    return summed.astype(WIDE)
