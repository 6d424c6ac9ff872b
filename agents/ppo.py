"""Proximal policy optimisation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from agents import actor_critic, losses, nets, schedule
from agents.types import Agent, Array, Transition, check_sizes, numbers


def ppo(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    rounds: int = 2,
    cohort: int = 64,
    epochs: int = 4,
    optimizer: str = "adam",
    lr: Any = 1e-3,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.9,
    advantage_decay: Any = 0.95,
    clip: Any = 0.2,
    value_weight: Any = 0.5,
    entropy_weight: Any = 0.01,
    normalise: bool = True,
    dtype: Any = jnp.float32,
) -> Agent:
    """A2C with a clipped ratio, so that the last `rounds` rounds can be used `epochs` times (full batches).

        ρ = π(a|S) / π_old(a|S)           L = −mean min(ρ Â, clip(ρ, 1 ± 0.2) Â) + ½ value − 0.01 H

    π_old is the policy that chose the action; its log-probability comes from the transition's `info`, which
    is therefore required. Targets and advantages are those of A2C, computed once per round for all rows.
    `cohort` is the largest batch one `update` may bring: it sizes the memory of earlier rounds.
    Static: hidden, rounds, cohort, epochs, normalise, dtype. All other options may be traced.

    >>> import jax
    >>> agent = ppo(observation_size=2, num_actions=3, cohort=10)
    >>> agent.init(jax.random.key(0)).memory.rows[0].observation.shape     # one earlier round of 10
    (10, 2)
    """
    check_sizes(epochs=epochs)
    value_weight, entropy_weight = numbers(dtype, 0, 1e6, value_weight=value_weight, entropy_weight=entropy_weight)
    (clip,) = numbers(dtype, 1e-12, 1e6, clip=clip)
    networks = actor_critic.networks(observation_size, num_actions, hidden, dtype)
    optimiser = nets.optimiser(optimizer, lr, max_grad_norm, dtype)
    learn = actor_critic.gradient_learner(
        networks,
        optimiser,
        lambda new, old, advantage: losses.clipped_surrogate_loss(new, old, advantage, clip),
        epochs=epochs,
        value_weight=value_weight,
        entropy_weight=entropy_weight,
    )
    agent = actor_critic.on_policy_agent(
        "ppo",
        observation_size,
        num_actions,
        nets_=networks,
        init_optimiser=optimiser.init,
        learn=learn,
        gamma=gamma,
        advantage_decay=advantage_decay,
        normalise=normalise,
        dtype=dtype,
        rounds=rounds,
        cohort=cohort,
    )

    def update(state: Any, transitions: Transition, key: Array) -> tuple[Any, schedule.Losses]:
        if transitions.info is None:
            raise ValueError("ppo needs the info that act returned: the log-probabilities of the actions")
        brought = len(transitions.mask)
        if brought > cohort and rounds > 1:
            raise ValueError(
                f"ppo remembers at most cohort={cohort} transitions per round and was given "
                f"{brought}; build it with cohort={brought}"
            )
        return agent.update(state, transitions, key)

    return agent._replace(update=update)
