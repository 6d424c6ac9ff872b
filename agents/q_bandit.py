"""Neural contextual bandit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from agents import nets
from agents.node import Real, field
from agents.q_learning import Learner, QAgent
from agents.types import Array


class QBandit(QAgent):
    """ε-greedy regression of the immediate reward: no bootstrap, no discount.

        L = mean Huber_δ(Q(s,a) − r)         ε_t = max(epsilon_end, epsilon_start · epsilon_decay^t)

    A joint discrete action is one flat index, see `agents.join_action` and `agents.split_action`.

    grid: sizes of the parts of a joint action, the last one varying fastest: Q is a sum of a value
    per choice of each part, Σ sizes numbers instead of their product. known: the last A numbers of
    an observation are not seen by the network but added to its values: what of the return follows
    from the action, e.g. minus its costs; the reward then is the rest. explore: at random among all
    actions, or among the free ones, whose known part is 0. prior: added per part of the grid, from
    0 for its first choice to this for its last.

    >>> import jax, jax.numpy as jnp
    >>> agent = QBandit(observation_size=13, num_actions=6 * 6)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(13), jax.random.key(1))
    >>> info.policy.shape
    (36,)
    >>> costly = jnp.append(jnp.zeros(2), jnp.array([0.0, -5.0, 0.0, -5.0]))
    >>> agent = QBandit(6, 4, grid=(2, 2), known=True, explore="free", epsilon_start=0.5)
    >>> agent.act(agent.init(jax.random.key(0)), costly, jax.random.key(1))[1].policy[1::2].tolist()
    [0.0, 0.0]
    """

    name = "q_bandit"
    hidden: tuple[int, ...] = field((64, 64), kw_only=True)
    capacity: int = field(1_000, kw_only=True)
    batch: int = field(32, kw_only=True)
    normalise: bool = field(False, kw_only=True)
    epsilon_start: Real = field(1.0, ge=0, le=1, kw_only=True)
    epsilon_end: Real = field(0.05, ge=0, le=1, kw_only=True)
    epsilon_decay: float = field(0.97, ge=0, le=1, kw_only=True)
    grid: tuple[int, ...] = field((), kw_only=True)
    known: bool = field(False, kw_only=True)
    explore: str = field("all", choices=("all", "free"), kw_only=True)
    prior: Real = field(0.0, ge=0, le=1e6, kw_only=True)

    def check(self) -> None:
        super().check()
        if self.grid and self.num_actions and math.prod(self.grid) != self.num_actions:
            raise ValueError(
                f"grid {self.grid} has {math.prod(self.grid)} actions, not {self.num_actions}"
            )
        if self.known and 0 < self.observation_size <= self.num_actions:
            raise ValueError(
                f"known: the last {self.num_actions} of an observation's numbers are known values;"
                f" it has {self.observation_size}"
            )
        if self.explore == "free" and not self.known:
            raise ValueError("explore='free' says nothing without known=True")

    def epsilon(self, rounds: Array) -> Array:
        return optax.exponential_decay(
            self.epsilon_start, 1, self.epsilon_decay, end_value=self.epsilon_end
        )(rounds)

    # ---- what is learned -------------------------------------------------------------------------
    @property
    def network(self) -> tuple[Callable, Callable]:
        """(init, apply) of what is learned of Q."""
        init, apply = nets.mlp(self.hidden, sum(self.grid) or self.num_actions, self.dtype)
        if not self.known and not self.grid:
            return init, apply
        seen = lambda x: x[..., : -self.num_actions] if self.known else x
        return (
            lambda key, x: init(key, seen(x)),
            lambda params, x: self.summed(apply(params, seen(x))),
        )

    def summed(self, parts: Array) -> Array:
        """[..., A] out of [..., Σ sizes]. All parts but the first count from their mean, so that a
        constant that is added to all outputs is added once."""
        if not self.grid:
            return parts
        total: Array = jnp.zeros((*parts.shape[:-1], 1), parts.dtype)
        at = 0
        for place, size in enumerate(self.grid):
            values = parts[..., at : at + size]
            values = values - (values.mean(-1, keepdims=True) if place else 0)
            total = (total[..., :, None] + values[..., None, :]).reshape(*parts.shape[:-1], -1)
            at += size
        return total

    # ---- what is done ----------------------------------------------------------------------------
    def worth(self, learner: Learner, x: Array) -> Array:
        """[..., A] in the units of the rewards: what is learned, what is known, and the prior."""
        values = learner.units.centre + learner.units.scale * self.network[1](learner.online, x)
        steps = [jnp.linspace(0, 1, size) if size > 1 else jnp.zeros(1) for size in self.grid]
        rising = sum(
            (step.reshape(-1) for step in jnp.meshgrid(*steps, indexing="ij")), start=jnp.zeros(())
        )
        known = x[..., -self.num_actions :] if self.known else 0
        return values + known + (self.number(self.prior) * rising).astype(self.dtype)

    def policy(self, learner: Learner, x: Array, usable: Array, rounds: Array) -> Array:
        if not self.known and not self.grid:
            return super().policy(learner, x, usable, rounds)
        worth, epsilon = self.worth(learner, x), self.number(self.epsilon(rounds))
        best: Any = nets.epsilon_greedy(worth, usable, self.number(0))
        tried = usable
        if self.explore == "free":
            free = usable & (x[..., -self.num_actions :] >= 0)
            tried = jnp.where(free.any(-1, keepdims=True), free, best > 0)
        even = tried / tried.sum(-1, keepdims=True)
        return (epsilon * even + (1 - epsilon) * best).astype(self.dtype)
