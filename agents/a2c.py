"""Advantage actor-critic."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from agents import actor_critic, losses, nets
from agents.types import Agent, numbers


def a2c(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    optimizer: str = "adam",
    lr: Any = 1e-3,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.9,
    advantage_decay: Any = 0.95,
    value_weight: Any = 0.5,
    entropy_weight: Any = 0.01,
    normalise: bool = True,
    dtype: Any = jnp.float32,
) -> Agent:
    """On-policy policy gradient with a learned baseline: one step per round on the round's transitions.

        Â = r + γ (1 − done) V(S') − V(S)                           (no gradient, standardised over the rounds)
        L = −mean log π(a|S) Â + ½ mean (V(S) − [r + γ (1 − done) V(S')])² − 0.01 mean H(π(·|S))

    Static: hidden, normalise, dtype. All other options may be traced.

    >>> import jax
    >>> agent = a2c(observation_size=2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> bool(info.log_probability < 0)
    True
    """
    value_weight, entropy_weight = numbers(dtype, 0, 1e6, value_weight=value_weight, entropy_weight=entropy_weight)
    networks = actor_critic.networks(observation_size, num_actions, hidden, dtype)
    optimiser = nets.optimiser(optimizer, lr, max_grad_norm, dtype)
    learn = actor_critic.gradient_learner(
        networks,
        optimiser,
        lambda log_probability, _, advantage: losses.policy_gradient_loss(log_probability, advantage),
        epochs=1,
        value_weight=value_weight,
        entropy_weight=entropy_weight,
    )
    return actor_critic.on_policy_agent(
        "a2c",
        observation_size,
        num_actions,
        nets_=networks,
        init_optimiser=optimiser.init,
        learn=learn,
        gamma=gamma,
        advantage_decay=advantage_decay,
        normalise=normalise,
        dtype=dtype,
    )
