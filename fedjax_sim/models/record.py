"""`Model`: what the simulator knows of a network, and how a flax module becomes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax


class Model(NamedTuple):
    """A network as pure functions for ONE client, and its ordered, named parameter groups."""

    name: str
    init: Callable  # (key) -> net {"params": {group: {…}}, "batch_stats": {group: {…}} or {}}
    features: Callable  # (net, x [B,H,W,C], *, train, mask [B], tap) -> (features [B,d], batch_stats)
    head: Callable  # (net, features [B,d]) -> logits [B,classes]
    groups: tuple[str, ...]  # in order; the last is the head, the others are the backbone
    dense: tuple[str, ...]  # the fully connected groups, the last ones
    width: int  # d
    classes: int
    shape: tuple[int, int, int]  # H, W, C
    stages: tuple[tuple[str, int], ...]  # (name, channels) of the maps given to `tap(name, x [B,h,w,c]) -> x`


def from_module(
    name: str,
    module: nn.Module,
    *,
    shape: tuple[int, int, int],
    groups: tuple[str, ...],
    dense: tuple[str, ...],
    width: int,
    classes: int,
    stages: tuple[tuple[str, int], ...],
    dtype: Any,
) -> Model:
    """The record of a flax module with methods `features(x, train, mask, tap)` and `head(features)`.

    This is also the way to a model of one's own: the names of its top-level submodules are the groups.
    """

    def init(key: jax.Array) -> dict:
        # from shapes only: no forward pass is run
        variables = module.lazy_init(key, jax.ShapeDtypeStruct((2, *shape), dtype))
        return {
            kind: {g: variables[kind][g] for g in groups if g in variables.get(kind, {})}
            for kind in ("params", "batch_stats")
        }

    def features(
        net: dict, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None, tap: Callable | None = None
    ) -> tuple[jax.Array, dict]:
        statistics = net.get("batch_stats", {})
        variables = {"params": net["params"], "batch_stats": statistics}
        if not (train and statistics):
            out: Any = module.apply(variables, x, train=False, mask=mask, tap=tap, method="features")
            return out, statistics
        out, new = module.apply(variables, x, train=True, mask=mask, tap=tap, method="features", mutable=["batch_stats"])
        return out, new["batch_stats"]

    def head(net: dict, features: jax.Array) -> jax.Array:
        logits: Any = module.apply({"params": net["params"]}, features, method="head")
        return logits

    return Model(name, init, features, head, groups, dense, width, classes, shape, stages)


def parameter_counts(model: Model) -> dict[str, int]:
    """Parameters per group, from shapes alone.

    >>> from fedjax_sim.models import build
    >>> parameter_counts(build("mlp", (28, 28, 1), 10))
    {'fc1': 50240, 'fc': 650}
    """
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    return {g: sum(a.size for a in jax.tree.leaves(params[g])) for g in model.groups}
