"""What an agent has learned, without what it does to learn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agents.node import field
from agents.types import Agent, Array, Info, Transition


class Greedy(Agent):
    """The agent `inner` as it is: always its most probable action (of continuous actions, the one
    without noise); it learns nothing. Its state is inner's.

    >>> from agents.sac import SAC
    >>> agent = Greedy(inner=SAC(2, 3))
    >>> state, keys = agent.init(jax.random.key(0)), jax.random.split(jax.random.key(1), 50)
    >>> len(set(jax.vmap(lambda key: agent.act(state, jnp.ones(2), key)[0])(keys).tolist()))
    1
    """

    inner: Agent = field(Agent(), kw_only=True)

    def init(self, key: Array) -> Any:
        return self.inner.init(key)

    def act(
        self, state: Any, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        action, info = self.inner.act(state, observation, key, available)
        if action.ndim:
            return info.policy, info
        best = jnp.argmax(info.policy).astype(action.dtype)
        sure = jax.nn.one_hot(best, len(info.policy), dtype=info.policy.dtype)
        return best, info._replace(
            policy=sure, log_probability=jnp.zeros_like(info.log_probability)
        )

    def update(
        self, state: Any, transitions: Transition, key: Array
    ) -> tuple[Any, dict[str, Array]]:
        return state, {}
