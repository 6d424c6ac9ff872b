"""Local optimisation as in PyTorch, and the learning rate over rounds.

One step of PyTorch's SGD:  g ← g + wd·w;  v ← momentum·v + g;  w ← w − lr·v.  The learning rate is
an argument of a step, because it may change from round to round, and within one, without
recompiling. Rules of optax are in `local.optimizers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.fields import Node, Real, field
from fedjax_sim.options import real, shown
from fedjax_sim.types import Array, Count, Scalar, Tree

T = TypeVar("T", bound="Optimizer")


class Within(Node):
    """The learning rate within a round: a factor of the round's, as a function of a client's own
    steps."""

    kind: str = field("constant", choices=("constant", "linear", "cosine", "warmup"))
    end: Real = field(0.0, ge=0, off=True)  # the factor after the last step
    steps: Real = field(0.0, ge=0, off=True)  # over which a warm-up rises

    def __call__(self, k: Count | int, steps: Count, dtype: Any) -> Scalar | float:
        done = lambda: jnp.asarray(k, dtype) / jnp.asarray(jnp.maximum(steps, 1), dtype)
        if self.kind == "linear":
            return 1 - (1 - self.end) * done()
        if self.kind == "cosine":
            return self.end + (1 - self.end) * 0.5 * (1 + jnp.cos(jnp.pi * done()))
        if self.kind == "warmup":
            return jnp.minimum((jnp.asarray(k, dtype) + 1) / jnp.maximum(self.steps, 1), 1)
        return 1.0


class Optimizer(Node):
    """A local optimiser as a record; its numbers are arguments of the program. See `Sgd` and
    `local.optimizers`."""

    # of the gradient of all moving groups; 0: as it is
    clip_norm: Real = field(0.0, ge=0, off=True, kw_only=True)
    within: Within = field(Within(), kw_only=True)
    if TYPE_CHECKING:
        groups: tuple[str, ...] | None = (
            None  # of every optimiser: parameter groups that decay; None: all
        )
    stands_still: ClassVar[bool] = (
        False  # a rate of 0 leaves the parameters as they are, whatever the state is
    )

    def _replace(self: T, **changes: Any) -> T:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @property
    def plain(self) -> bool:
        """Whether a step is w − lr·v of PyTorch's SGD, with one rate for the whole round."""
        return False

    def rate(self, lr: Scalar, k: Count | int, steps: Count, dtype: Any) -> Scalar:
        """The learning rate of step k of `steps`."""
        return (
            lr
            if self.within.kind == "constant"
            else (lr * self.within(k, steps, dtype)).astype(dtype)
        )

    def clipping(self) -> list[optax.GradientTransformation]:
        return [optax.clip_by_global_norm(self.clip_norm)] if self.has("clip_norm") else []

    def init(self, params: Tree) -> Tree:
        """Its state before the first step."""
        raise NotImplementedError

    def step(
        self, grads: Tree, state: Tree, params: Tree, rate: Scalar, **more: Any
    ) -> tuple[Tree, Tree]:
        """(parameters, state) after one step; more: what optax calls extra arguments."""
        raise NotImplementedError


class Sgd(Optimizer):
    """PyTorch's SGD: a method changes it by `env.optimizer._replace(momentum=0.0)`."""

    momentum: Real = field(0.0, off=True)
    weight_decay: Real = field(0.0, off=True)
    groups: tuple[str, ...] | None = None  # parameter groups that decay; None: all
    stands_still = True

    @property
    def plain(self) -> bool:
        return not self.has("clip_norm") and self.within.kind == "constant"

    def transform(self) -> optax.GradientTransformation:
        """The direction v of a step, as optax does it."""
        parts = self.clipping()
        if self.has("weight_decay"):
            names = self.groups
            mask = None if names is None else (lambda params: {g: g in names for g in params})
            parts.append(optax.add_decayed_weights(self.weight_decay, mask=mask))
        if self.has("momentum"):
            parts.append(optax.trace(decay=self.momentum))
        return optax.chain(*parts) if parts else optax.identity()

    def init(self, params: Tree) -> Tree:
        return self.transform().init(params)

    def step(
        self, grads: Tree, state: Tree, params: Tree, rate: Scalar, **more: Any
    ) -> tuple[Tree, Tree]:
        direction, state = self.transform().update(grads, state, params)
        return jax.tree.map(lambda p, d: p - rate * d, params, direction), state


def decay_groups(text: str, groups: tuple[str, ...]) -> tuple[str, ...] | None:
    """'all', or names of parameter groups joined by '+'.

    >>> decay_groups("all", ("conv", "fc")), decay_groups("conv+fc", ("conv", "fc"))
    (None, ('conv', 'fc'))
    """
    if text == "all":
        return None
    names = tuple(text.split("+"))
    for name in names:
        if name not in groups:
            raise UserError(
                f"decay-groups names '{name}', which is not a parameter group of this model; "
                f"allowed: all, {', '.join(groups)}"
            )
    return names


SCHEDULES = {
    "constant": "the same learning rate in every round",
    "step": "multiplied by gamma every `every` rounds, e.g. step:every=30,gamma=0.1",
    "cosine": "half a cosine from lr to zero (or `end`) over the planned rounds, e.g. cosine:end=0",
}


class Schedule(Node):
    """The learning rate as a function of the round, from 0."""

    kind: str
    lr: Real
    rounds: int  # over which a cosine is laid
    every: Real = 30.0
    gamma: Real = 0.1
    end: Real = 0.0

    def __call__(self, t: Array | float) -> Array:
        if self.kind == "step":
            return self.lr * jnp.power(self.gamma, jnp.floor(t / self.every))
        if self.kind == "cosine":
            part = jnp.minimum(t / max(self.rounds, 1), 1.0)
            return self.end + (self.lr - self.end) * 0.5 * (1 + jnp.cos(jnp.pi * part))
        return jnp.full((), self.lr)


OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "step": ("every", "gamma"),
    "cosine": ("end",),
}
LOCAL_SCHEDULES = {
    "constant": "the same learning rate in every step of a round",
    "linear": (
        "a line from the round's learning rate to `end` times it over a client's own steps, e.g."
        " linear:end=0.1"
    ),
    "cosine": "half a cosine to zero (or `end` times the rate) over a client's own steps",
    "warmup": "rises over the first `steps` steps of every round, e.g. warmup:steps=10",
}
LOCAL_OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("end",),
    "cosine": ("end",),
    "warmup": ("steps",),
}


def _read(
    what: str, text: str, known: Mapping[str, tuple[str, ...]], example: str
) -> tuple[str, dict[str, float]]:
    """NAME or NAME:OPTION=VALUE,… -> (name, options), each of them known."""
    name, _, rest = text.partition(":")
    try:
        options = {k: real(v) for k, v in (item.split("=") for item in rest.split(",") if item)}
    except ValueError:
        raise UserError(f"{what} '{shown(text)}' cannot be read; example: {example}") from None
    if name not in known:
        raise unknown(what, shown(name), known)
    for option in options:
        if option not in known[name]:
            raise UserError(
                f"{what} '{name}' has no option '{shown(option)}'; allowed:"
                f" {', '.join(known[name]) or 'none'}"
            )
    return name, options


def local_schedule(text: str) -> Within:
    """'constant' | 'linear[:end=0]' | 'cosine[:end=0]' | 'warmup:steps=10' -> the rate's factor
    within a round."""
    name, options = _read("local-schedule", text, LOCAL_OPTIONS, "warmup:steps=10")
    return Within(name, **options)


def schedule(text: str, lr: float, rounds: int) -> Schedule:
    """'constant' | 'step:every=30,gamma=0.1' | 'cosine[:end=0]' -> learning rate as a function of
    the round (from 0)."""
    name, options = _read("schedule", text, OPTIONS, "step:every=30,gamma=0.1")
    schedule = Schedule(name, lr, rounds, **options)
    if schedule.every < 1:
        raise UserError(f"schedule step has every={schedule.every:g}; allowed: 1 round or more")
    return schedule
