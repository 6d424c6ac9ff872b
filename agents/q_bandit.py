"""Neural contextual bandit."""

from __future__ import annotations

import optax

from agents.node import Real, field
from agents.q_learning import QAgent
from agents.types import Array


class QBandit(QAgent):
    """ε-greedy regression of the immediate reward: no bootstrap, no discount.

        L = mean Huber_δ(Q(s,a) − r)         ε_t = max(epsilon_end, epsilon_start · epsilon_decay^t)

    A joint discrete action is one flat index, see `agents.join_action` and `agents.split_action`.

    >>> import jax, jax.numpy as jnp
    >>> agent = QBandit(observation_size=13, num_actions=6 * 6)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(13), jax.random.key(1))
    >>> info.policy.shape
    (36,)
    """

    name = "q_bandit"
    hidden: tuple[int, ...] = field((64, 64), kw_only=True)
    capacity: int = field(1_000, kw_only=True)
    batch: int = field(32, kw_only=True)
    normalise: bool = field(False, kw_only=True)
    epsilon_start: Real = field(1.0, ge=0, le=1, kw_only=True)
    epsilon_end: Real = field(0.05, ge=0, le=1, kw_only=True)
    epsilon_decay: float = field(0.97, ge=0, le=1, kw_only=True)

    def epsilon(self, rounds: Array) -> Array:
        return optax.exponential_decay(
            self.epsilon_start, 1, self.epsilon_decay, end_value=self.epsilon_end
        )(rounds)
