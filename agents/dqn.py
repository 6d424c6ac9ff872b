"""Double deep Q-learning."""

from __future__ import annotations

import optax

from agents.node import Real, field
from agents.q_learning import QAgent
from agents.types import Array


class DQN(QAgent):
    """ε-greedy value learning with the double-DQN target.

        y = r + γ (1 − done) Q̄(S', argmax_a Q(S',a))         L = mean Huber_δ(Q(S,a) − y)
        ε falls linearly from `epsilon_start` to `epsilon_end` over `horizon` calls of `update`

    Q̄ is copied from Q every `target_every` gradient steps; the replay schedule is that of SAC.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> agent = DQN(observation_size=2, num_actions=3, horizon=50)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> print(np.asarray(info.policy).round(2))       # round 0: ε = 1, every action equally likely
    [0.33 0.33 0.33]
    """

    name = "dqn"
    target_every: int = field(50, kw_only=True)  # type: ignore[misc]
    gamma: Real = field(0.9, ge=0, le=1, kw_only=True)  # type: ignore[misc]
    epsilon_start: Real = field(1.0, ge=0, le=1, kw_only=True)
    epsilon_end: Real = field(0.1, ge=0, le=1, kw_only=True)
    horizon: int = field(105, ge=1, le=1e9, kw_only=True)

    def epsilon(self, rounds: Array) -> Array:
        return optax.linear_schedule(self.epsilon_start, self.epsilon_end, self.horizon)(rounds)
