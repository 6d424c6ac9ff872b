"""Double deep Q-learning."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from agents.q_learning import q_agent
from agents.types import Agent, check_sizes, numbers


def dqn(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    capacity: int = 10_000,
    batch: int = 64,
    gradient_steps: int = 10,
    target_every: int = 50,
    optimizer: str = "adam",
    lr: Any = 1e-3,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.9,
    epsilon_start: float = 1.0,
    epsilon_end: float = 0.1,
    horizon: int = 105,
    delta: Any = 1.0,
    normalise: bool = True,
    dtype: Any = jnp.float32,
) -> Agent:
    """ε-greedy value learning with the double-DQN target.

        y = r + γ (1 − done) Q̄(S', argmax_a Q(S',a))         L = mean Huber_δ(Q(S,a) − y)
        ε falls linearly from `epsilon_start` to `epsilon_end` over `horizon` rounds (calls of `update`)

    Q̄ is copied from Q every `target_every` gradient steps; the replay schedule is that of SAC.
    Static: hidden, capacity, batch, gradient_steps, target_every, normalise, dtype. All others may be traced.

    >>> import jax
    >>> import numpy as np
    >>> agent = dqn(observation_size=2, num_actions=3, horizon=50)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> print(np.asarray(info.policy).round(2))       # round 0: ε = 1, every action equally likely
    [0.33 0.33 0.33]
    """
    check_sizes(target_every=target_every)
    numbers(dtype, 0, 1, epsilon_start=epsilon_start, epsilon_end=epsilon_end)
    numbers(dtype, 1, 1e9, horizon=horizon)
    return q_agent(
        "dqn",
        observation_size,
        num_actions,
        gamma=gamma,
        target_every=target_every,
        epsilon=optax.linear_schedule(epsilon_start, epsilon_end, horizon),
        hidden=hidden,
        capacity=capacity,
        batch=batch,
        gradient_steps=gradient_steps,
        optimizer=optimizer,
        lr=lr,
        max_grad_norm=max_grad_norm,
        delta=delta,
        normalise=normalise,
        dtype=dtype,
    )
