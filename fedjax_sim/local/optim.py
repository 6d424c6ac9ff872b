"""Local optimisation as in PyTorch, and the learning rate over rounds.

One step of PyTorch's SGD:  g ← g + wd·w;  v ← momentum·v + g;  w ← w − lr·v.  `Sgd` gives v; the learning
rate is applied by `local.descend`, because it may change from round to round without recompiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.options import real
from fedjax_sim.types import Array


class Sgd(NamedTuple):
    """The local optimiser as a record: a method changes it by `env.optimizer._replace(momentum=0.0)`."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    groups: tuple[str, ...] | None = None  # parameter groups that decay; None: all

    def transform(self) -> optax.GradientTransformation:
        """The direction v of a step, as optax does it."""
        parts = []
        if self.weight_decay:
            names = self.groups
            mask = None if names is None else (lambda params: {g: g in names for g in params})
            parts.append(optax.add_decayed_weights(self.weight_decay, mask=mask))
        if self.momentum:
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


def schedule(text: str, lr: float, rounds: int) -> Callable[[Array], Array]:
    """'constant' | 'step:every=30,gamma=0.1' | 'cosine[:end=0]' -> learning rate as a function of the round (from 0)."""
    name, _, rest = text.partition(":")
    try:
        options = {k: real(v) for k, v in (item.split("=") for item in rest.split(",") if item)}
    except ValueError:
        raise UserError(f"schedule '{text}' cannot be read; example: step:every=30,gamma=0.1") from None
    allowed = {"constant": set(), "step": {"every", "gamma"}, "cosine": {"end"}}
    if name not in allowed:
        raise unknown("schedule", name, SCHEDULES)
    if set(options) - allowed[name]:
        raise UserError(
            f"schedule '{name}' has no option '{min(set(options) - allowed[name])}'; "
            f"allowed: {', '.join(sorted(allowed[name])) or 'none'}"
        )
    if name == "step":
        every, gamma = options.get("every", 30), options.get("gamma", 0.1)
        if every < 1:
            raise UserError(f"schedule step has every={every:g}; allowed: 1 round or more")
        return lambda t: lr * jnp.power(gamma, jnp.floor(t / every))
    if name == "cosine":
        end = options.get("end", 0.0)
        return lambda t: end + (lr - end) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(t / max(rounds, 1), 1.0)))
    return lambda t: jnp.full((), lr)
