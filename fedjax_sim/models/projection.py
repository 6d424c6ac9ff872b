"""Another width of the features that enter the head: one more layer, Linear and ReLU, and a head to
match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Float, Num, Shaped

from fedjax_sim.errors import UserError
from fedjax_sim.models.layers import Linear
from fedjax_sim.models.narrow import full, kept
from fedjax_sim.models.record import Model
from fedjax_sim.types import Array, Key

PROJECT = "project"
WIDEST = 2**15  # so that a square matrix of this width is no larger than the largest layer


def check_width(width: Any) -> None:
    """The error for a bad width.

    >>> check_width(2.5)
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: m=2.5 is not a width of features; allowed: 0 (the model's own), or
    a whole number to 32768
    """
    number = isinstance(width, int | float) and not isinstance(width, bool)
    if not number or not 0 <= width <= WIDEST or width != int(width):  # a nan is not within either
        raise UserError(
            f"m={width} is not a width of features; allowed: 0 (the model's own), or a whole number"
            f" to {WIDEST}"
        )


def with_projection(model: Model, width: int) -> Model:
    """`model` with features z = ReLU(V f(x) + v) of `width` and a new linear head on them; 0, or
    its own width: as it is.

    The layer is the group `project`, before the head. The other groups start exactly as without it.

    >>> from fedjax_sim.models import build, parameter_counts
    >>> parameter_counts(with_projection(build("mlp", (2, 2, 1), 3, hidden=(4,)), 6))
    {'fc1': 20, 'project': 30, 'fc': 21}
    """
    check_width(width)
    if width in (0, model.width):
        return model
    if PROJECT in model.groups:
        raise UserError(
            f"model '{model.name}' has a group '{PROJECT}' already; its width cannot be changed"
            " again"
        )
    width, place = int(width), model.groups.index(model.head_group)

    def init(key: Key) -> dict:
        net = model.init(key)
        head = net["params"][model.head_group]
        dtype = head["kernel"].dtype
        first, second = jax.random.split(jax.random.fold_in(key, width))
        fresh = lambda key, ins, outs: Linear(outs, dtype).lazy_init(
            key, jax.ShapeDtypeStruct((1, ins), dtype)
        )["params"]
        new_head = fresh(second, width, model.classes)
        layers = {
            PROJECT: fresh(first, model.width, width),
            model.head_group: {k: new_head[k] for k in head},
        }
        params = {**net["params"], **layers}
        return {**net, "params": {g: params[g] for g in groups}}

    def features(
        net: dict,
        x: Num[Array, " batch *shape"],
        *,
        train: bool = False,
        mask: Shaped[Array, " batch"] | None = None,
        tap: Callable | None = None,
    ) -> tuple[Float[Array, "batch *time features"], dict]:
        z, stats = model.features(net, x, train=train, mask=mask, tap=tap)
        projected: Any = Linear(width, z.dtype, model.activations).apply(
            {"params": net["params"][PROJECT]}, z
        )
        return full(kept(nn.relu(projected), model.activations)), stats

    groups = (*model.groups[:place], PROJECT, *model.groups[place:])
    dense = tuple(
        name for g in model.dense for name in ((PROJECT, g) if g == model.head_group else (g,))
    )
    return model._replace(init=init, features=features, groups=groups, dense=dense, width=width)
