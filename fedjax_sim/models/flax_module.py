"""A plain flax module as a Model: its groups, its head and what feeds the head are found by
watching one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Float, Num, Shaped

from fedjax_sim.errors import UserError
from fedjax_sim.models.randomness import dropout_key
from fedjax_sim.models.record import Model, batch_of, check_last
from fedjax_sim.options import shown
from fedjax_sim.types import Array, Key

FLAGS: dict[str, Callable[[bool], bool]] = {
    **dict.fromkeys(("train", "training", "is_training"), lambda train: train),
    "deterministic": lambda train: not train,
}


def as_model(
    given: Any,
    shape: tuple[int, ...],
    classes: int,
    dtype: Any,
    what: str = "",
    places: bool = False,
) -> Model:
    """A Model as it is; a flax module, linen or NNX, or a pair (init, apply) as a Model for these
    data; else a sentence.

    places: logits for every place of a sequence are wanted.
    """
    if isinstance(given, Model):
        return given
    from fedjax_sim.models.pairs import is_nnx, is_pair, nnx_model, pair_model

    if is_nnx(given) or is_pair(given):
        model = (nnx_model if is_nnx(given) else pair_model)(given, shape, dtype, places)
        if model.classes < classes:
            raise UserError(
                f"model '{model.name}' has {model.classes} outputs, but the data have {classes}"
            )
        return model
    if not isinstance(given, nn.Module):
        raise UserError(
            f"{what or f'model= is {shown(repr(given))}, not a name and'} not a Model; a Model"
            " comes from fedjax_sim.build or fedjax_sim.from_module, and a flax module (linen or"
            " nnx) or a pair of functions (init, apply) becomes one"
        )
    model = plain_module(type(given).__name__, given, shape, None, dtype)
    if model.classes < classes:
        raise UserError(
            f"module '{model.name}' has {model.classes} outputs, but the data have {classes}"
            " classes"
        )
    return model


class Watch:
    """What one call of a module shows: which submodules it uses, in order, and what goes into
    them."""

    def __init__(self, mask: Shaped[Array, " batch"] | None = None):
        self.mask = mask
        self.first: dict[str, nn.Module] = {}  # top-level submodules
        self.inputs: dict[str, Any] = {}

    def __call__(self, next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        module, path = context.module, context.module.path
        if path and context.method_name != "setup":
            self.first.setdefault(path[0], module)
            if len(path) == 1 and args:
                self.inputs[path[0]] = args[0]
        if (
            isinstance(module, nn.BatchNorm)
            and self.mask is not None
            and args[0].shape[0] == self.mask.shape[0]
        ):
            real = self.mask.reshape(-1, *[1] * (args[0].ndim - 1))
            kwargs = {"mask": real, **kwargs}  # padding is not part of the statistics
        return next_fun(*args, **kwargs)


def calls_of(
    name: str, module: nn.Module, shape: tuple[int, ...], dtype: Any
) -> tuple[Callable, Callable]:
    """(init, call) of a module: its variables from a key, and one call that is watched."""
    flags = flags_of(name, module)

    def call(
        net: dict,
        x: Num[Array, " batch *shape"],
        train: bool,
        mask: Shaped[Array, " batch"] | None = None,
    ) -> tuple[Any, Watch, dict]:
        watch, statistics = Watch(mask if train else None), net.get("batch_stats", {})
        how: dict[str, Any] = {flag: FLAGS[flag](train) for flag in flags}
        if train:
            how |= dict(rngs={"dropout": dropout_key()}, mutable=["batch_stats"])
        with nn.intercept_methods(watch):
            out: Any = module.apply({"params": net["params"], "batch_stats": statistics}, x, **how)
        return (out[0], watch, out[1].get("batch_stats", {})) if train else (out, watch, statistics)

    def init(key: Key) -> dict:
        how: dict[str, Any] = {flag: FLAGS[flag](False) for flag in flags}
        start = dict(module.lazy_init(key, batch_of(shape, 2, dtype), **how))
        return {kind: dict(start.get(kind, {})) for kind in ("params", "batch_stats")} | {
            k: v for k, v in start.items() if v
        }

    return init, call


def plain_module(
    name: str, module: nn.Module, shape: tuple[int, ...], classes: int | None, dtype: Any
) -> Model:
    """The Model of a module with nothing but `__call__(x)`; see `record.from_module`."""
    init, call = calls_of(name, module, shape, dtype)
    groups, head_group, kinds = outline(name, init, call, batch_of(shape, 2, dtype))

    def ordered(key: Key) -> dict:
        net = init(key)
        return {
            kind: {g: net[kind][g] for g in groups if g in net[kind]}
            for kind in ("params", "batch_stats")
        }

    def features(
        net: dict,
        x: Num[Array, " batch *shape"],
        *,
        train: bool = False,
        mask: Shaped[Array, " batch"] | None = None,
        tap: Callable | None = None,
    ) -> tuple[Float[Array, "batch *time features"], dict]:
        _, watch, statistics = call(net, x, train, mask)
        return watch.inputs[head_group], statistics

    def head(
        net: dict, features: Float[Array, "batch *time features"]
    ) -> Float[Array, "batch *time classes"]:
        layer = net["params"][head_group]
        return features @ layer["kernel"] + layer.get("bias", 0)

    sizes = jax.eval_shape(ordered, jax.random.key(0))["params"][head_group]["kernel"].shape
    if classes is not None and sizes[1] != classes:
        raise UserError(f"module '{name}' has {sizes[1]} outputs, not {classes}")
    dense = tuple(g for g in groups if kinds[g])
    rest = int(sizes[0]), int(sizes[1]), shape, ()
    model = Model(name, ordered, features, head, groups, head_group, dense, *rest)
    problem = (
        f"module '{name}' computes something after its last layer '{head_group}'; its output must"
        " be that layer's logits (no softmax, no scaling)"
    )
    check_last(model, lambda net, x: call(net, x, False)[0], dtype, problem)
    return model


def flags_of(name: str, module: nn.Module) -> list[str]:
    """Arguments of `__call__` that say whether it trains."""
    _, *more = inspect.signature(type(module).__call__).parameters.values()  # without self
    flags = [p.name for p in more if p.name in FLAGS]
    missing = [
        p.name
        for p in more[1:]
        if p.name not in FLAGS
        and p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing or not more:
        raise UserError(
            f"module '{name}' must be callable with images alone, or with one of {', '.join(FLAGS)}"
            f" as well; its __call__ needs {', '.join(missing) or 'no images'}"
        )
    return flags


def outline(
    name: str, init: Callable, call: Callable, example: jax.ShapeDtypeStruct
) -> tuple[tuple[str, ...], str, dict[str, bool]]:
    """(groups in the order of their calls, the head's, group -> whether it is a Dense layer);
    nothing is computed."""
    seen: list[Watch] = []

    def look(key: Key, x: Num[Array, " batch *shape"]) -> dict:
        net = init(key)
        for train in (False, True):
            seen.append(call(net, x, train)[1])
        return net

    try:
        net = jax.eval_shape(look, jax.random.key(0), example)
    except Exception as problem:
        # a mistake in the module, or images that do not fit it: flax and JAX say which
        first = next(
            (line for line in str(problem).splitlines() if line.strip()), type(problem).__name__
        )
        raise UserError(
            f"module '{name}' cannot be applied to images {example.shape[1:]}: {shown(first, 300)}"
        ) from problem
    for kind in net:
        if kind not in ("params", "batch_stats"):
            raise UserError(
                f"module '{name}' keeps variables '{kind}'; allowed: params, batch_stats"
            )
    for group, leaves in net["params"].items():
        if not isinstance(leaves, Mapping):
            raise UserError(
                f"parameter '{group}' is not in a submodule of module '{name}'; put it into one,"
                " which becomes a group"
            )
    used = seen[0].first
    groups = tuple(g for g in used if g in net["params"])
    rest = [g for g in net["params"] if g not in groups]
    if not groups or rest:
        raise UserError(
            f"module '{name}' has"
            f" {f'parameters that a call does not use: {rest[0]}' if rest else 'no parameters'}"
        )
    head = groups[-1]
    if not isinstance(used[head], nn.Dense) or len(seen[0].inputs[head].shape) not in (
        2,
        3 if len(example.shape) == 2 else 2,
    ):
        raise UserError(
            f"the last layer '{head}' of module '{name}' is {type(used[head]).__name__}, not a"
            " Dense layer on features [B, d]; let it be one, or give the module methods"
            " features(x, train, mask, tap) and head(features)"
        )
    return groups, head, {g: isinstance(used[g], nn.Dense) for g in groups}


__all__ = ["as_model", "plain_module"]
