"""Models of tokens: `lstm` and a small causal `transformer`, as functions of one client's weights.

x [B, T] of whole numbers below the vocabulary -> features [B, T, d], each of what stands there and
before it, and the linear head `fc` makes logits [B, T, C] of them; for one target per example
(`places=False`) the features are of the last place.

Small vocabularies are embedded by a product with one-hot rows, whose gradient is a product too: no
scatter, and all clients' tables side by side in one operation. The LSTM's weights get their
gradient from one product over all places after the scan (`recur`), not from a sum that the scan
carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, Shaped

from fedjax_sim.errors import UserError
from fedjax_sim.models.record import Model
from fedjax_sim.types import Array, Key

ONE_HOT = 512  # vocabularies up to this are embedded by products
HEAD = "fc"


def linear(key: Key, into: int, out: int, dtype: Any) -> dict[str, Array]:
    """PyTorch's start of a linear layer."""
    first, second = jax.random.split(key)
    bound = 1 / math.sqrt(into)
    draw = lambda key, shape: jax.random.uniform(key, shape, dtype, -bound, bound)
    return {"kernel": draw(first, (into, out)), "bias": draw(second, (out,))}


def apply(layer: dict[str, Array], x: Float[Array, "*places into"]) -> Float[Array, "*places out"]:
    """x [..., in] @ kernel + bias, as one product of rows."""
    rows = x.reshape(-1, x.shape[-1])
    return (rows @ layer["kernel"] + layer["bias"]).reshape(*x.shape[:-1], -1)


def embed(
    table: Float[Array, "tokens features"], x: Int[Array, "batch time"]
) -> Float[Array, "batch time features"]:
    """table [V, e], x [B, T] -> [B, T, e]."""
    if table.shape[0] > ONE_HOT:
        return table[x]
    rows = jax.nn.one_hot(x.reshape(-1), table.shape[0], dtype=table.dtype)
    return (rows @ table).reshape(*x.shape, -1)


def as_tokens_model(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    width: int,
    init: Callable[[Key], dict],
    hidden: Callable[[dict, Array], Array],
    groups: tuple[str, ...],
    places: bool,
) -> Model:
    """The record of a model whose `hidden(params, x)` is [B, T, d]."""

    def start(key: Key) -> dict:
        params = init(key)
        return {"params": {g: params[g] for g in groups}, "batch_stats": {}}

    def features(
        net: dict,
        x: Int[Array, "batch time"],
        *,
        train: bool = False,
        mask: Shaped[Array, " batch"] | None = None,
        tap: Callable | None = None,
    ) -> tuple[Float[Array, "batch *time features"], dict]:
        found = hidden(net["params"], x.astype(jnp.int32))
        return (found if places else found[:, -1]), net.get("batch_stats", {})

    def head(
        net: dict, features: Float[Array, "batch *time features"]
    ) -> Float[Array, "batch *time classes"]:
        return apply(net["params"][HEAD], features)

    return Model(name, start, features, head, groups, HEAD, (HEAD,), width, classes, shape, ())


# ---- LSTM ----------------------------------------------------------------------------------------
def _cell(z: Array, c: Array) -> tuple[Array, Array, tuple[Array, ...]]:
    i, f, g, o = jnp.split(z, 4, -1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    c = f * c + i * g
    return o * jnp.tanh(c), c, (i, f, g, o)


def _forward(inputs: Array, recurrent: Array) -> tuple[Array, Array, tuple[Array, ...]]:
    """inputs [T, B, 4h] -> (h [T, B, h], c [T, B, h], gates [T, B, h] each)."""

    def step(carry: tuple[Array, Array], z: Array) -> tuple[tuple[Array, Array], tuple]:
        h, c, gates = _cell(z + carry[0] @ recurrent, carry[1])
        return (h, c), (h, c, gates)

    zero = jnp.zeros((inputs.shape[1], recurrent.shape[0]), inputs.dtype)
    return lax.scan(step, (zero, zero), inputs)[1]


@jax.custom_vjp
def recur(inputs: Array, recurrent: Array) -> Array:
    """What an LSTM's places say, h [T, B, h], of its inputs' part of the gates [T, B, 4h]; gates i,
    f, g, o."""
    return _forward(inputs, recurrent)[0]


def _recur_forward(inputs: Array, recurrent: Array) -> tuple[Array, tuple]:
    h, c, gates = _forward(inputs, recurrent)
    return h, (h, c, gates, recurrent)


def _recur_backward(kept: tuple, slope: Array) -> tuple[Array, Array]:
    h, c, gates, recurrent = kept
    before = lambda a: jnp.concatenate([jnp.zeros_like(a[:1]), a[:-1]])

    def step(carry: tuple[Array, Array], at: tuple) -> tuple[tuple[Array, Array], Array]:
        dh, dc = carry
        slope, c, earlier, (i, f, g, o) = at
        t = jnp.tanh(c)
        dh = dh + slope
        dc = dc + dh * o * (1 - t * t)
        dz = jnp.concatenate(
            [
                dc * g * i * (1 - i),
                dc * earlier * f * (1 - f),
                dc * i * (1 - g * g),
                dh * t * o * (1 - o),
            ],
            -1,
        )
        return (dz @ recurrent.T, dc * f), dz

    zero = jnp.zeros_like(h[0])
    dz = lax.scan(step, (zero, zero), (slope, c, before(c), gates), reverse=True)[1]
    rows = lambda a: a.reshape(-1, a.shape[-1])
    return dz, rows(before(h)).T @ rows(dz)  # one product for the weights of all places


recur.defvjp(_recur_forward, _recur_backward)


def build_lstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    dtype: Any,
    vocabulary: int,
    places: bool,
    embed_width: int,
    width: int,
    layers: int,
) -> Model:
    """Embedding, `layers` LSTM layers of `width`, linear head."""
    names = tuple(f"lstm{i}" for i in range(1, layers + 1))

    def init(key: Key) -> dict:
        keys = jax.random.split(key, layers + 2)
        params: dict[str, Any] = {
            "embed": {"table": jax.random.normal(keys[0], (vocabulary, embed_width), dtype)}
        }
        bound = 1 / math.sqrt(width)
        for i, name in enumerate(names):
            a, b, c = jax.random.split(keys[i + 1], 3)
            into = embed_width if i == 0 else width
            draw = lambda key, shape: jax.random.uniform(key, shape, dtype, -bound, bound)
            params[name] = {
                "kernel": draw(a, (into, 4 * width)),
                "recurrent": draw(b, (width, 4 * width)),
                "bias": draw(c, (4 * width,)),
            }
        params[HEAD] = linear(keys[-1], width, classes, dtype)
        return params

    def hidden(params: dict, x: Int[Array, "batch time"]) -> Float[Array, "batch time features"]:
        h = embed(params["embed"]["table"], x).swapaxes(0, 1)  # [T, B, e]
        for name in names:
            h = recur(apply(params[name], h), params[name]["recurrent"])
        return h.swapaxes(0, 1)

    return as_tokens_model(
        "lstm", shape, classes, width, init, hidden, ("embed", *names, HEAD), places
    )


# ---- transformer ---------------------------------------------------------------------------------
def normed(x: Array, layer: dict[str, Array] | None = None) -> Array:
    """Layer normalisation over the last axis, with a scale and a shift where there is a layer."""
    centred = x - x.mean(-1, keepdims=True)
    unit = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return unit if layer is None else unit * layer["scale"] + layer["shift"]


def attend(
    qkv: Float[Array, "batch time three_features"], heads: int
) -> Float[Array, "batch time features"]:
    """Causal attention: [B, T, 3d] -> [B, T, d]."""
    batch, length, wide = qkv.shape
    # [B, H, T, d/H]
    q, k, v = (a.reshape(batch, length, heads, -1).swapaxes(1, 2) for a in jnp.split(qkv, 3, -1))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), -1)
    return (weights @ v).swapaxes(1, 2).reshape(batch, length, wide // 3)


def build_transformer(
    shape: tuple[int, ...],
    classes: int,
    *,
    dtype: Any,
    vocabulary: int,
    places: bool,
    width: int,
    heads: int,
    layers: int,
) -> Model:
    """Embedding with places, `layers` blocks (normalised before attention and before two linear
    layers), linear head."""
    if width % heads:
        raise UserError(
            f"a transformer of width {width} cannot be split into {heads} heads; the width must be"
            " a multiple of their number"
        )
    names = tuple(f"block{i}" for i in range(1, layers + 1))

    def init(key: Key) -> dict:
        keys = jax.random.split(key, layers + 3)
        small = lambda key, shape: 0.02 * jax.random.normal(key, shape, dtype)
        params: dict[str, Any] = {
            "embed": {
                "table": small(keys[0], (vocabulary, width)),
                "place": small(keys[1], (shape[0], width)),
            }
        }
        norm = lambda: {"scale": jnp.ones(width, dtype), "shift": jnp.zeros(width, dtype)}
        for i, name in enumerate(names):
            a, b, c, d = jax.random.split(keys[i + 2], 4)
            params[name] = {
                "norm1": norm(),
                "qkv": linear(a, width, 3 * width, dtype),
                "out": linear(b, width, width, dtype),
                "norm2": norm(),
                "up": linear(c, width, 4 * width, dtype),
                "down": linear(d, 4 * width, width, dtype),
            }
        params[HEAD] = linear(keys[-1], width, classes, dtype)
        return params

    def hidden(params: dict, x: Int[Array, "batch time"]) -> Float[Array, "batch time features"]:
        h = embed(params["embed"]["table"], x) + params["embed"]["place"]
        for name in names:
            p = params[name]
            h = h + apply(p["out"], attend(apply(p["qkv"], normed(h, p["norm1"])), heads))
            h = h + apply(p["down"], jax.nn.gelu(apply(p["up"], normed(h, p["norm2"]))))
        return normed(h)

    return as_tokens_model(
        "transformer", shape, classes, width, init, hidden, ("embed", *names, HEAD), places
    )


def build_tokens_model(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], **more: Any
) -> Model:
    """`lstm` or `transformer` for sequences of length `shape[0]`."""
    sizes = {k: v for k, v in options.items() if k != "embed"}
    for option, value in options.items():
        if not 1 <= value <= 2**16:
            raise UserError(
                f"model.{option}={value} of model '{name}' is not allowed; use a whole number from"
                f" 1 to {2**16}"
            )
    if name == "lstm":
        return build_lstm(shape, classes, embed_width=options["embed"], **sizes, **more)
    return build_transformer(shape, classes, **sizes, **more)
