"""Policies that do not learn."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.node import field
from agents.types import Agent, Array, Info, Transition, usable_actions


class FixedState(NamedTuple):
    rounds: Array  # [] int32, calls of update


class Policy(Agent):
    """Learns nothing, and counts the rounds."""

    def init(self, key: Array) -> FixedState:
        return FixedState(jnp.zeros((), jnp.int32))

    def update(
        self, state: FixedState, transitions: Transition, key: Array
    ) -> tuple[FixedState, dict[str, Array]]:
        return FixedState(state.rounds + 1), {}


class Fixed(Policy):
    """Always `action`: an index, or a tuple of numbers for continuous control.

    An index that `available` forbids is replaced by the lowest allowed one. With `num_actions`, or
    when `act` is given `available`, `info.policy` holds the probabilities, otherwise the action
    itself as a vector.

    >>> agent = Fixed(action=2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(4), jax.random.key(1))
    >>> int(action), info.policy.tolist()
    (2, [0.0, 0.0, 1.0])
    """

    name = "fixed"
    action: Any = field(0, kw_only=True)

    def check(self) -> None:
        if isinstance(self.action, (np.ndarray, jax.Array)):
            object.__setattr__(self, "action", tuple(np.asarray(self.action).tolist()))
        if self.discrete and (
            self.action < 0 or (self.num_actions and self.action >= self.num_actions)
        ):
            raise ValueError(
                f"action must be an index from 0 to {(self.num_actions or 2**31) - 1}, got"
                f" {self.action!r}"
            )

    @property
    def discrete(self) -> bool:
        return isinstance(self.action, int)

    def act(
        self, state: FixedState, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        nothing, chosen = (
            jnp.zeros((), self.dtype),
            jnp.asarray(self.action, jnp.int32 if self.discrete else self.dtype),
        )
        if not self.discrete:
            return chosen, Info(nothing, nothing, jnp.ravel(chosen), jnp.ones(chosen.size, bool))
        if available is None and not self.num_actions:
            return chosen, Info(
                nothing, nothing, chosen.astype(self.dtype)[None], jnp.ones(1, bool)
            )
        count = self.num_actions if available is None else len(available)
        usable = usable_actions(available, count)
        allowed = jnp.where(usable[chosen], chosen, jnp.argmax(usable)).astype(jnp.int32)
        return allowed, Info(
            nothing, nothing, jax.nn.one_hot(allowed, count, dtype=self.dtype), usable
        )


class Uniform(Policy):
    """A uniformly random available action, drawn anew for every observation.

    >>> agent = Uniform(num_actions=4)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> info.policy.tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    name = "random"

    def act(
        self, state: FixedState, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        usable = usable_actions(available, self.num_actions)
        probabilities = usable.astype(self.dtype) / usable.sum().astype(self.dtype)
        action = jax.random.choice(key, self.num_actions, p=probabilities).astype(jnp.int32)
        return action, Info(
            jnp.log(probabilities[action]), jnp.zeros((), self.dtype), probabilities, usable
        )
