"""Neural contextual bandit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from agents.q_learning import q_agent
from agents.types import Agent, numbers


def q_bandit(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64, 64),
    capacity: int = 1_000,
    batch: int = 32,
    gradient_steps: int = 10,
    optimizer: str = "adam",
    lr: Any = 1e-3,
    max_grad_norm: Any = 1.0,
    epsilon_start: float = 1.0,
    epsilon_end: float = 0.05,
    epsilon_decay: float = 0.97,
    delta: Any = 1.0,
    normalise: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """ε-greedy regression of the immediate reward: no bootstrap, no discount.

        L = mean Huber_δ(Q(s,a) − r)           ε_t = max(epsilon_end, epsilon_start · epsilon_decay^t)

    A joint discrete action is one flat index, see `agents.join_action` and `agents.split_action`.
    Static: hidden, capacity, batch, gradient_steps, normalise, dtype. All other options may be traced.

    >>> import jax
    >>> agent = q_bandit(observation_size=13, num_actions=6 * 6)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(13), jax.random.key(1))
    >>> info.policy.shape
    (36,)
    """
    numbers(dtype, 0, 1, epsilon_start=epsilon_start, epsilon_end=epsilon_end, epsilon_decay=epsilon_decay)
    return q_agent(
        "q_bandit",
        observation_size,
        num_actions,
        gamma=None,
        target_every=None,
        epsilon=optax.exponential_decay(epsilon_start, 1, epsilon_decay, end_value=epsilon_end),
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
