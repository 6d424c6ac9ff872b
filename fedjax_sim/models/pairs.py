"""Models of other kinds: a flax NNX module, and a pair of functions (init, apply).

Both become a `Model` whose groups are the top-level parts of their parameters, in order; the last
is the head, a linear layer {kernel [d, C], bias [C]} or {w, b}, and what feeds it is found by
taking it out: with an identity in place of the kernel the model says its features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Num

from fedjax_sim.errors import UserError
from fedjax_sim.models.record import Model, batch_of, check_last
from fedjax_sim.options import shown
from fedjax_sim.types import Array, Key

KERNELS, BIASES = ("kernel", "w"), ("bias", "b")


def is_nnx(given: Any) -> bool:
    """An NNX module, or a class or function (rngs) -> one."""
    return isinstance(given, nnx.Module) or (
        isinstance(given, type) and issubclass(given, nnx.Module)
    )


def is_pair(given: Any) -> bool:
    """(init, apply) of functions; linen modules have methods of these names, and are no pair."""
    if isinstance(given, (nn.Module, Model)):
        return False
    return isinstance(given, tuple) and len(given) == 2 and all(callable(one) for one in given)


def pair_model(given: Any, shape: tuple[int, ...], dtype: Any, places: bool) -> Model:
    """init(key) -> {group: {…}}, apply(params, x [B, …]) -> outputs [B, C] (or [B, T, C]), nothing
    behind the last layer."""
    init, function = given
    name = getattr(function, "__name__", "pair")
    return from_functions(name, init, function, shape, dtype, places)


def nnx_model(given: Any, shape: tuple[int, ...], dtype: Any, places: bool) -> Model:
    """Of an NNX module (whose weights are drawn anew from the run's seed) or a class that takes
    `rngs` alone."""
    module = given(rngs=nnx.Rngs(0)) if isinstance(given, type) else given
    name = type(module).__name__
    split: Any = nnx.split(module, nnx.Param, ...)
    graph, params, rest = split
    if jax.tree.leaves(rest):
        kept = ", ".join(
            sorted(
                {
                    type(v).__name__
                    for v in jax.tree.leaves(rest, is_leaf=lambda a: isinstance(a, nnx.Variable))
                }
            )
        )
        raise UserError(
            f"NNX module '{name}' keeps more than parameters ({shown(kept)}), such as Dropout or"
            " BatchNorm; use linen"
        )
    start = nnx.to_pure_dict(params)
    order = [key for key in vars(module) if key in start]

    def init(key: Key) -> dict:
        if isinstance(given, type):
            params = nnx.to_pure_dict(nnx.split(given(rngs=nnx.Rngs(key)), nnx.Param, ...)[1])
        else:
            params = jax.tree.map(jnp.asarray, start)
        return {str(g): params[g] for g in order}

    def function(weights: dict, x: Num[Array, " batch *shape"]) -> Array:
        state = nnx.State(jax.tree.map(lambda a: a, params))
        nnx.replace_by_pure_dict(state, {g: weights[str(g)] for g in order})
        return nnx.merge(graph, state, rest)(x)

    return from_functions(name, init, function, shape, dtype, places)


def shapes_of(
    name: str,
    init: Callable,
    function: Callable,
    shape: tuple[int, ...],
    example: jax.ShapeDtypeStruct,
) -> tuple[Mapping[str, Any], jax.ShapeDtypeStruct]:
    """Shapes of (the parameters, the outputs for a batch); nothing is computed."""
    try:
        params = jax.eval_shape(init, jax.random.key(0))
        out = jax.eval_shape(function, params, example)
    except Exception as problem:  # in the user's code
        first = next(
            (line for line in str(problem).splitlines() if line.strip()), type(problem).__name__
        )
        raise UserError(
            f"model '{name}' cannot be applied to examples {shape}: {shown(first, 300)}"
        ) from problem
    if not isinstance(params, Mapping) or not all(isinstance(v, Mapping) for v in params.values()):
        raise UserError(
            f"the parameters of model '{name}' must be a dict of groups, each a dict of arrays"
        )
    return params, out


def from_functions(
    name: str, init: Callable, function: Callable, shape: tuple[int, ...], dtype: Any, places: bool
) -> Model:
    """A Model of (key) -> params and (params, x) -> outputs."""
    example = batch_of(shape, 2, dtype)
    params, out = shapes_of(name, init, function, shape, example)
    groups = tuple(map(str, params))
    head_group = groups[-1]
    kernel, bias = head_names(name, head_group, params[head_group])
    width, classes = params[head_group][kernel].shape
    if out.ndim != 2 + places or out.shape[-1] != classes:
        raise UserError(
            f"model '{name}' returns shape {out.shape} for 2 examples; expected:"
            f" {(2, *shape[:1] * places, classes)}"
        )

    def start(key: Key) -> dict:
        params = init(key)
        return {
            "params": {g: jax.tree.map(lambda a: a.astype(dtype), dict(params[g])) for g in groups},
            "batch_stats": {},
        }

    def features(
        net: dict,
        x: Num[Array, " batch *shape"],
        *,
        train: bool = False,
        mask: Any = None,
        tap: Any = None,
    ) -> tuple[Float[Array, "batch *time features"], dict]:
        through: dict[str, Any] = {**net["params"][head_group], kernel: jnp.eye(width, dtype=dtype)}
        if bias:
            through[bias] = jnp.zeros(width, dtype)
        return function({**net["params"], head_group: through}, x), net.get("batch_stats", {})

    def head(
        net: dict, features: Float[Array, "batch *time features"]
    ) -> Float[Array, "batch *time classes"]:
        layer = net["params"][head_group]
        return features @ layer[kernel] + (layer[bias] if bias else 0)

    rest = int(width), int(classes), shape, ()
    model = Model(name, start, features, head, groups, head_group, (head_group,), *rest)
    problem = (
        f"model '{name}' computes something after its last layer '{head_group}'; its output must"
    )
    check_last(model, lambda net, x: function(net["params"], x), dtype, f"{problem} be its own")
    return model


def head_names(name: str, group: str, layer: Mapping[str, Any]) -> tuple[str, str]:
    """(name of the kernel, of the bias or "") of the last group."""
    kernel = [k for k in KERNELS if k in layer and layer[k].ndim == 2]
    bias = [k for k in BIASES if k in layer]
    if not kernel or len(layer) != 1 + len(bias):
        raise UserError(
            f"the last group '{group}' of model '{name}' must be a linear layer, kernel [d, C] with"
            f" or without bias, as flax names them (or w, b); it has {', '.join(layer)}"
        )
    return kernel[0], bias[0] if bias else ""
