"""`Model`: what the simulator knows of a network, and how a flax module becomes one."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num, Shaped

from fedjax_sim.errors import UserError
from fedjax_sim.platform import run_once
from fedjax_sim.types import Array, Key


class Model(NamedTuple):
    """A network as pure functions for ONE client, and its ordered, named parameter groups.

    `groups` are all of `net["params"]`, in the order in which the data meet them. `head_group` is
    the one that `head` reads, a linear layer `[d,classes]`; groups that `with_group` added come
    after it, and neither `features` nor `head` reads them. Ask for the head by name: it need not be
    the last.
    """

    name: str
    init: Callable  # (key) -> net {"params": {group: {…}}, "batch_stats": {group: {…}} or {}}
    # (net, x [B,H,W,C] or [B,T], *, train, mask [B], tap) -> (features [B,d] or [B,T,d],
    # batch_stats)
    features: Callable
    head: Callable  # (net, features [B,d] or [B,T,d]) -> logits [B,classes] or [B,T,classes]
    groups: tuple[str, ...]  # in order
    head_group: str  # the linear head's
    dense: tuple[str, ...]  # the network's fully connected groups, in order, the head with them
    width: int  # d
    classes: int
    shape: tuple[int, ...]  # H, W, C of images and tables, or (T,) of tokens
    # (name, channels) of the maps given to `tap(name, x [B,h,w,c]) -> x`
    stages: tuple[tuple[str, int], ...]
    # their type where it is not that of the weights; features and logits have that of the weights
    activations: Any = None


def batch_of(shape: tuple[int, ...], size: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """What a model of examples of this shape is called with: tokens (T,) are whole numbers."""
    return jax.ShapeDtypeStruct((size, *shape), jnp.int32 if len(shape) == 1 else dtype)


def from_module(
    name: str,
    module: nn.Module,
    *,
    shape: tuple[int, ...],
    groups: tuple[str, ...] | None = None,
    dense: tuple[str, ...] | None = None,
    width: int | None = None,
    classes: int | None = None,
    stages: tuple[tuple[str, int], ...] = (),
    dtype: Any = jnp.float32,
    head_group: str | None = None,
    activations: Any = None,
) -> Model:
    """A flax module as a Model, for images `shape` = (H, W, C).

    A plain module needs nothing more: its top-level submodules are the groups, in the order in
    which they are called, the last is the head and must be a Dense layer. An argument
    `train`, `training` or `deterministic` of `__call__` is set for it; Dropout gets its random
    numbers; BatchNorm leaves padding out. A module with methods `features(x, train, mask,
    tap)` and `head(features)` says itself where the head begins: then give groups, dense, width and
    classes (and stages, the maps that it shows to `tap`); `head_group` is the one that `head` uses
    (default: the last), `activations` the type that travels between its layers, if it is another
    than dtype.

    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(3, name="head")(
    ...             nn.relu(nn.Dense(4, name="body")(x.reshape(len(x), -1)))
    ...         )
    >>> model = from_module("mine", Net(), shape=(2, 2, 1))
    >>> model.groups, model.head_group, model.width, model.classes
    (('body', 'head'), 'head', 4, 3)
    """
    if not (hasattr(module, "features") and hasattr(module, "head")):
        from fedjax_sim.models.flax_module import plain_module

        return plain_module(name, module, shape, classes, dtype)
    if groups is None or dense is None or width is None or classes is None:
        raise UserError(
            f"model '{name}' has methods features and head: give groups, dense, width and"
            " classes too"
        )
    head_group = groups[-1] if head_group is None else head_group
    if head_group not in groups:
        raise UserError(
            f"the head '{head_group}' of model '{name}' is not among its groups {', '.join(groups)}"
        )
    init, features, head = functions_of(module, shape, groups, dtype)
    sizes: dict[str, Any] = dict(width=width, classes=classes, shape=shape, stages=stages)
    parts: dict[str, Any] = dict(groups=groups, head_group=head_group, dense=dense)
    return Model(name, init, features, head, **parts, **sizes, activations=activations)


def functions_of(
    module: nn.Module, shape: tuple[int, ...], groups: tuple[str, ...], dtype: Any
) -> tuple[Callable, Callable, Callable]:
    """(init, features, head) of a module with methods `features` and `head`, as a Model has
    them."""

    def init(key: Key) -> dict:
        # from shapes only: no forward pass is run
        variables = module.lazy_init(key, batch_of(shape, 2, dtype))
        return {
            kind: {g: variables[kind][g] for g in groups if g in variables.get(kind, {})}
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
        statistics = net.get("batch_stats", {})
        variables = {"params": net["params"], "batch_stats": statistics}
        if not (train and statistics):
            out: Any = module.apply(
                variables, x, train=False, mask=mask, tap=tap, method="features"
            )
            return out, statistics
        out, new = module.apply(
            variables, x, train=True, mask=mask, tap=tap, method="features", mutable=["batch_stats"]
        )
        return out, new["batch_stats"]

    def head(
        net: dict, features: Float[Array, "batch *time features"]
    ) -> Float[Array, "batch *time classes"]:
        logits: Any = module.apply({"params": net["params"]}, features, method="head")
        return logits

    return init, features, head


def check_last(model: Model, call: Callable, dtype: Any, problem: str) -> None:
    """Raise `problem` for a model that computes something after its last layer: call(net, x) must
    be its head's output."""

    def both(key: Key) -> tuple[Array, Array]:
        like = batch_of(model.shape, 2, dtype)
        tokens = jnp.arange(math.prod(like.shape)).reshape(like.shape) % 2
        net = model.init(key)
        x = jax.random.normal(key, like.shape, dtype) if like.dtype == dtype else tokens
        return call(net, x), model.head(net, model.features(net, x)[0])

    out, rebuilt = (np.asarray(a) for a in run_once(both, jax.random.key(1)))
    if out.shape != rebuilt.shape or not np.allclose(out, rebuilt, rtol=1e-3, atol=1e-4):
        raise UserError(problem)


def with_group(model: Model, name: str, init: Callable[[Key], dict]) -> Model:
    """`model` with one more parameter group: a second head, an adjustment matrix, a policy network.

    init: (key) -> dict of arrays, the group's start. The other groups start exactly as without it,
    and the new one from the key folded with its name, whatever else is added. `features` and `head`
    pass it by.

    >>> import jax.numpy as jnp
    >>> from fedjax_sim.models import build
    >>> plain = build("mlp", (2, 2, 1), 3, hidden=(4,))
    >>> model = with_group(plain, "adjust", lambda key: {"matrix": jnp.eye(4)})
    >>> model.groups, model.head_group, model.init(jax.random.key(0))["params"]["adjust"][
    ...     "matrix"
    ... ].shape
    (('fc1', 'fc', 'adjust'), 'fc', (4, 4))
    """
    if not (isinstance(name, str) and name) or name in model.groups:
        raise UserError(
            f"a new group of model '{model.name}' needs a name of its own, not {name!r}; it has"
            f" {model.groups}"
        )
    start = jax.eval_shape(lambda: init(jax.random.key(0)))
    if not (isinstance(start, dict) and jax.tree.leaves(start)):
        raise UserError(
            f"the initial parameters of group '{name}' must be a dict of arrays, not {start!r}"
        )

    def extended(key: Key) -> dict:
        net = model.init(key)
        own = init(jax.random.fold_in(key, zlib.crc32(name.encode())))
        return {**net, "params": {**net["params"], name: own}}

    return model._replace(init=extended, groups=(*model.groups, name))


def initial_weights(model: Model, key: Key) -> dict:
    """`jax.jit(model.init)(key)` to the last bit, compiled for one use (LeNet-5: 0.8 instead of 4.2
    s of a processor).

    >>> from fedjax_sim.models import build
    >>> net = initial_weights(build("mlp", (2, 2, 1), 3, hidden=(4,)), jax.random.key(0))
    >>> net["params"]["fc"]["kernel"].shape
    (4, 3)
    """
    return run_once(model.init, key)


def parameter_counts(model: Model) -> dict[str, int]:
    """Parameters per group, from shapes alone.

    >>> from fedjax_sim.models import build
    >>> parameter_counts(build("mlp", (28, 28, 1), 10))
    {'fc1': 50240, 'fc': 650}
    """
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    return {g: sum(a.size for a in jax.tree.leaves(params[g])) for g in model.groups}
