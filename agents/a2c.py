"""Advantage actor-critic."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import actor_critic, losses, nets, schedule
from agents.types import Agent, Array, Info, Transition, as_numbers, check_range, check_sizes, clean_transitions, finite


class Learner(NamedTuple):
    params: actor_critic.Params
    optimiser: Any


class A2CState(NamedTuple):
    learner: Learner
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


def a2c(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    lr: Any = 0.05,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.99,
    value_weight: Any = 0.5,
    entropy_weight: Any = 0.01,
    normalise: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """On-policy policy gradient with a learned baseline: one step per round on the round's transitions.

        Â = r + γ (1 − done) V(S') − V(S)                           (no gradient, standardised over the batch)
        L = −mean log π(a|S) Â + ½ mean (V(S) − [r + γ (1 − done) V(S')])² − 0.01 mean H(π(·|S))

    Static: hidden, normalise, dtype. All other options may be traced.

    >>> agent = a2c(observation_size=2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> bool(info.log_probability < 0)
    True
    """
    check_sizes(observation_size=observation_size, num_actions=num_actions, hidden=hidden)
    check_range(0, 1, gamma=gamma)
    check_range(0, 1e6, value_weight=value_weight, entropy_weight=entropy_weight)
    check_range(1e-12, 1e6, lr=lr, max_grad_norm=max_grad_norm)
    gamma, value_weight, entropy_weight = as_numbers(dtype, gamma, value_weight, entropy_weight)
    networks = actor_critic.networks(observation_size, num_actions, hidden, dtype)
    optimiser = nets.adam(lr, max_grad_norm, dtype)

    def init(key: Array) -> A2CState:
        params = networks.init(key)
        return A2CState(
            Learner(params, optimiser.init(params)),
            nets.no_statistics(observation_size, dtype) if normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(state: A2CState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        return actor_critic.act(
            networks,
            state.learner.params,
            state.statistics,
            observation,
            key,
            available,
            observation_size,
            num_actions,
            dtype,
        )

    def learn(learner: Learner, batch: actor_critic.OnPolicyBatch) -> tuple[Learner, dict[str, Array]]:
        target, advantage = actor_critic.targets_and_advantages(networks, learner.params.value, batch, gamma)

        def loss(params: actor_critic.Params) -> tuple[Array, dict[str, Array]]:
            log_probability, entropy, _ = actor_critic.evaluate(networks, params.policy, batch)
            each = jax.vmap(losses.policy_gradient_loss)(log_probability, advantage)
            values = {
                "policy": losses.masked_mean(each, batch.mask),
                "value": actor_critic.value_loss(networks, params.value, batch, target),
                "entropy": losses.masked_mean(entropy, batch.mask),
            }
            total = values["policy"] + value_weight * values["value"] - entropy_weight * values["entropy"]
            return total, values

        (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(learner.params)
        return Learner(*nets.descend(optimiser, learner.params, gradient, learner.optimiser)), values

    def update(state: A2CState, transitions: Transition, key: Array) -> tuple[A2CState, dict[str, Array]]:
        clean = clean_transitions(transitions, observation_size, num_actions, dtype)
        statistics = schedule.watch(state.statistics, clean)
        batch = actor_critic.scaled(actor_critic.flatten(clean), statistics)
        learner, values = schedule.when(clean.mask.any(), lambda old: learn(old, batch), state.learner)
        return A2CState(learner, statistics, state.rounds + 1), finite(values)

    return Agent("a2c", init, act, update)
