"""Candidates in an order of their own, for any agent that weighs them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agents.node import field
from agents.types import Agent, Array, Info, Transition, usable_actions


def ranking(blocks: Array, available: Array) -> Array:
    """[A] positions of blocks [A, W] and their availability [A], the last of them oneself: the most
    similar candidates first (cosines), those that are not available behind them, oneself last.

    >>> blocks = jnp.array([[0.0, 2.0], [9.0, 9.0], [3.0, 1.0], [1.0, 0.0]])
    >>> ranking(blocks, jnp.array([True, False, True, True])).tolist()
    [2, 0, 1, 3]
    """
    others, mine = blocks[:-1], blocks[-1]
    size = jnp.sqrt(jnp.square(others).sum(-1) * jnp.square(mine).sum())
    alike = jnp.where(size > 0, others @ mine / jnp.where(size > 0, size, 1), 0)
    # the first key only parts what is equally similar
    order = jnp.lexsort((others.sum(-1), -alike, ~available[:-1]))
    return jnp.append(order, len(blocks) - 1)


class Ranked(Agent):
    """The agent `inner`: it observes (x_1, …, x_m, x), numbers of m candidates and of oneself, and
    its action weighs them.

    It is shown the candidates by their similarity to x and its weights are given back in the order
    that was asked in. So neither what it does nor what it learns depends on that order, and its
    first weight is always that of this round's nearest candidate.

    >>> from agents.ddpg import DDPG
    >>> agent = Ranked(inner=DDPG(6, 3, noise=0.0))
    >>> state, seen = agent.init(jax.random.key(0)), jnp.array([1.0, 0.0, 0.5, 3.0, 0.0, 1.0])
    >>> other = jnp.array([0.5, 3.0, 1.0, 0.0, 0.0, 1.0])
    >>> here, there = (agent.act(state, x, jax.random.key(1))[0] for x in (seen, other))
    >>> bool(jnp.allclose(here, there[jnp.array([1, 0, 2])]))
    True
    """

    inner: Agent = field(Agent(), kw_only=True)

    def order(self, observation: Array, available: Array) -> Array:
        blocks = jnp.where(jnp.isfinite(observation), observation, 0).reshape(
            self.inner.num_actions, -1
        )
        return ranking(blocks, available)

    def shown(self, observation: Array, order: Array) -> Array:
        return observation.reshape(self.inner.num_actions, -1)[order].reshape(-1)

    def init(self, key: Array) -> Any:
        return self.inner.init(key)

    def act(
        self, state: Any, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        usable = usable_actions(available, self.inner.num_actions)
        order = self.order(observation, usable)
        action, info = self.inner.act(state, self.shown(observation, order), key, usable[order])
        back = lambda ranked: jnp.zeros_like(ranked).at[order].set(ranked)
        return back(action), info._replace(policy=back(info.policy), available=usable)

    def update(
        self, state: Any, transitions: Transition, key: Array
    ) -> tuple[Any, dict[str, Array]]:
        everything = jnp.ones((len(transitions.reward), self.inner.num_actions), bool)
        usable = jax.vmap(lambda a: usable_actions(a, self.inner.num_actions))
        may = everything if transitions.info is None else usable(transitions.info.available)
        then = (
            everything if transitions.next_available is None else usable(transitions.next_available)
        )
        before, after = (
            jax.vmap(self.order)(transitions.observation, may),
            jax.vmap(self.order)(transitions.next_observation, then),
        )
        pick = jax.vmap(lambda row, order: row[order])
        info = transitions.info
        if info is not None:
            info = info._replace(policy=pick(info.policy, before), available=pick(may, before))
        ranked = transitions._replace(
            observation=jax.vmap(self.shown)(transitions.observation, before),
            action=pick(transitions.action, before),
            next_observation=jax.vmap(self.shown)(transitions.next_observation, after),
            info=info,
            next_available=pick(then, after),
        )
        return self.inner.update(state, ranked, key)
