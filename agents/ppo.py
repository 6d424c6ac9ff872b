"""Proximal policy optimisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import actor_critic, losses, nets, schedule
from agents import replay as ring
from agents.types import Agent, Array, Info, Transition, as_numbers, check_range, check_sizes, clean_transitions, finite


class Learner(NamedTuple):
    params: actor_critic.Params
    optimiser: Any


class Dated(NamedTuple):
    """A remembered row and the round in which it was learned from first."""

    row: actor_critic.OnPolicyBatch
    round: Array  # [] int32


class PPOState(NamedTuple):
    learner: Learner
    memory: ring.Replay | None  # rows of the earlier rounds; None if only the newest round is used
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


def ppo(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    rounds: int = 2,
    cohort: int = 64,
    epochs: int = 4,
    lr: Any = 0.05,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.99,
    clip: Any = 0.2,
    value_weight: Any = 0.5,
    entropy_weight: Any = 0.01,
    normalise: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """A2C with a clipped ratio, so that the last `rounds` rounds can be used `epochs` times (full batches).

        ρ = π(a|S) / π_old(a|S)           L = −mean min(ρ Â, clip(ρ, 1 ± 0.2) Â) + ½ value − 0.01 H

    π_old is the policy that chose the action; its log-probability comes from the transition's `info`, which
    is therefore required. Targets and advantages are those of A2C, computed once per round for all rows.
    `cohort` is the largest batch one `update` may bring: it sizes the memory of earlier rounds.
    Static: hidden, rounds, cohort, epochs, normalise, dtype. All other options may be traced.

    >>> agent = ppo(observation_size=2, num_actions=3, cohort=10)
    >>> agent.init(jax.random.key(0)).memory.rows.row.observation.shape     # one earlier round of 10
    (10, 2)
    """
    check_sizes(
        observation_size=observation_size,
        num_actions=num_actions,
        hidden=hidden,
        rounds=rounds,
        cohort=cohort,
        epochs=epochs,
    )
    check_range(0, 1, gamma=gamma)
    check_range(0, 1e6, value_weight=value_weight, entropy_weight=entropy_weight)
    check_range(1e-12, 1e6, clip=clip, lr=lr, max_grad_norm=max_grad_norm)
    gamma, clip, value_weight, entropy_weight = as_numbers(dtype, gamma, clip, value_weight, entropy_weight)
    networks = actor_critic.networks(observation_size, num_actions, hidden, dtype)
    optimiser = nets.adam(lr, max_grad_norm, dtype)

    def init(key: Array) -> PPOState:
        params = networks.init(key)
        memory = None
        if rounds > 1:
            scalar, seen = jnp.zeros((), dtype), jnp.zeros(observation_size, dtype)
            row = actor_critic.OnPolicyBatch(
                seen,
                jnp.zeros((), jnp.int32),
                scalar,
                seen,
                scalar,
                jnp.zeros(num_actions, bool),
                scalar,
                jnp.zeros((), bool),
            )
            memory = ring.empty(Dated(row, jnp.zeros((), jnp.int32)), cohort * (rounds - 1))
        return PPOState(
            Learner(params, optimiser.init(params)),
            memory,
            nets.no_statistics(observation_size, dtype) if normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(state: PPOState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
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

    def with_memory(fresh: actor_critic.OnPolicyBatch, memory: ring.Replay, now: Array) -> actor_critic.OnPolicyBatch:
        """The fresh rows [B] followed by the remembered ones, of which only the recent ones are unmasked."""
        old: Dated = memory.rows
        slots = jnp.arange(cohort * (rounds - 1))
        recent = (slots < memory.size) & (now - old.round < rounds)
        return jax.tree.map(lambda new, kept: jnp.concatenate([new, kept]), fresh, old.row._replace(mask=recent))

    def learn(learner: Learner, batch: actor_critic.OnPolicyBatch) -> tuple[Learner, dict[str, Array]]:
        target, advantage = actor_critic.targets_and_advantages(networks, learner.params.value, batch, gamma)

        def loss(params: actor_critic.Params) -> tuple[Array, dict[str, Array]]:
            log_probability, entropy, _ = actor_critic.evaluate(networks, params.policy, batch)
            each = jax.vmap(losses.clipped_surrogate_loss, (0, 0, 0, None))(
                log_probability, batch.log_probability, advantage, clip
            )
            values = {
                "policy": losses.masked_mean(each, batch.mask),
                "value": actor_critic.value_loss(networks, params.value, batch, target),
                "entropy": losses.masked_mean(entropy, batch.mask),
            }
            total = values["policy"] + value_weight * values["value"] - entropy_weight * values["entropy"]
            return total, values

        def epoch(learner: Learner, _: None) -> tuple[Learner, dict[str, Array]]:
            (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(learner.params)
            return Learner(*nets.descend(optimiser, learner.params, gradient, learner.optimiser)), values

        learner, values = jax.lax.scan(epoch, learner, None, length=epochs)
        return learner, {name: value.mean(0) for name, value in values.items()}

    def update(state: PPOState, transitions: Transition, key: Array) -> tuple[PPOState, dict[str, Array]]:
        if transitions.info is None:
            raise ValueError("ppo needs the info that act returned: the log-probabilities of the actions")
        clean = clean_transitions(transitions, observation_size, num_actions, dtype)
        brought = clean.mask.shape[0]
        if brought > cohort and rounds > 1:
            raise ValueError(
                f"ppo remembers at most cohort={cohort} transitions per round and was given "
                f"{brought}; build it with cohort={brought}"
            )
        statistics = schedule.watch(state.statistics, clean)
        fresh = actor_critic.flatten(clean)
        batch, memory = fresh, None
        if state.memory is not None:
            batch = with_memory(fresh, state.memory, state.rounds)
            dated = Dated(fresh, jnp.full(brought, state.rounds, jnp.int32))
            memory = ring.add(state.memory, dated, clean.mask)
        batch = actor_critic.scaled(batch, statistics)
        learner, values = schedule.when(clean.mask.any(), lambda old: learn(old, batch), state.learner)
        return PPOState(learner, memory, statistics, state.rounds + 1), finite(values)

    return Agent("ppo", init, act, update)
