"""Local optimisation as in PyTorch, and the learning rate over rounds.

One step of PyTorch's SGD:  g ← g + wd·w;  v ← momentum·v + g;  w ← w − lr·v.  `Sgd` gives v; the learning
rate is applied by `local.descend`, because it may change from round to round without recompiling.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.fields import Node, Real, field
from fedjax_sim.options import real
from fedjax_sim.types import Array


class Sgd(Node):
    """The local optimiser as a record: a method changes it by `env.optimizer._replace(momentum=0.0)`."""

    momentum: Real = field(0.0, off=True)
    weight_decay: Real = field(0.0, off=True)
    groups: tuple[str, ...] | None = None  # parameter groups that decay; None: all

    def _replace(self, **changes: Any) -> Sgd:
        return dataclasses.replace(self, **changes)

    def transform(self) -> optax.GradientTransformation:
        """The direction v of a step, as optax does it."""
        parts = []
        if self.has("weight_decay"):
            names = self.groups
            mask = None if names is None else (lambda params: {g: g in names for g in params})
            parts.append(optax.add_decayed_weights(self.weight_decay, mask=mask))
        if self.has("momentum"):
            parts.append(optax.trace(decay=self.momentum))
        return optax.chain(*parts) if parts else optax.identity()


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

    def __call__(self, t: Array) -> Array:
        if self.kind == "step":
            return self.lr * jnp.power(self.gamma, jnp.floor(t / self.every))
        if self.kind == "cosine":
            part = jnp.minimum(t / max(self.rounds, 1), 1.0)
            return self.end + (self.lr - self.end) * 0.5 * (1 + jnp.cos(jnp.pi * part))
        return jnp.full((), self.lr)


OPTIONS: dict[str, tuple[str, ...]] = {"constant": (), "step": ("every", "gamma"), "cosine": ("end",)}


def schedule(text: str, lr: float, rounds: int) -> Schedule:
    """'constant' | 'step:every=30,gamma=0.1' | 'cosine[:end=0]' -> learning rate as a function of the round (from 0)."""
    name, _, rest = text.partition(":")
    try:
        options = {k: real(v) for k, v in (item.split("=") for item in rest.split(",") if item)}
    except ValueError:
        raise UserError(f"schedule '{text}' cannot be read; example: step:every=30,gamma=0.1") from None
    if name not in OPTIONS:
        raise unknown("schedule", name, SCHEDULES)
    if set(options) - set(OPTIONS[name]):
        raise UserError(
            f"schedule '{name}' has no option '{min(set(options) - set(OPTIONS[name]))}'; "
            f"allowed: {', '.join(OPTIONS[name]) or 'none'}"
        )
    made = Schedule(name, lr, rounds, **options)
    if made.every < 1:
        raise UserError(f"schedule step has every={made.every:g}; allowed: 1 round or more")
    return made
