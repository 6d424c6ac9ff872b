"""What the on-policy agents (A2C, PPO, TRPO) share: two networks, how they act, and the frame of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import optax

from agents import losses, nets, schedule
from agents import replay as ring
from agents.types import Agent, Array, Info, Transition, blank, check_sizes, clean_transitions, finite, usable_actions


class Params(NamedTuple):
    policy: Any  # S → A logits
    value: Any  # S → 1


class Learner(NamedTuple):
    params: Params
    optimiser: Any


class OnPolicyState(NamedTuple):
    learner: Learner
    memory: ring.Replay | None  # (row, its round) of the earlier rounds; None if only the newest round is used
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


class Networks(NamedTuple):
    """Pure functions of parameters and observations; the observations may have leading axes."""

    init: Callable[[Array], Params]
    policy: Callable[[Any, Array, Array], distrax.Categorical]  # (params, [..., S], available [..., A])
    value: Callable[[Any, Array], Array]  # (params, [..., S]) -> [...]


Learn = Callable[[Learner, Transition, Array, Array], tuple[Learner, schedule.Losses]]


def networks(observation_size: int, num_actions: int, hidden: tuple[int, ...], dtype: Any) -> Networks:
    check_sizes(hidden=hidden)
    init_policy, apply_policy = nets.mlp(hidden, num_actions, dtype)
    init_value, apply_value = nets.mlp(hidden, 1, dtype)

    def init(key: Array) -> Params:
        policy_key, value_key = jax.random.split(key)
        example = jnp.zeros(observation_size, dtype)
        return Params(init_policy(policy_key, example), init_value(value_key, example))

    def policy(params: Any, x: Array, available: Array) -> distrax.Categorical:
        return distrax.Categorical(logits=nets.mask_logits(apply_policy(params, x), available))

    return Networks(init, policy, lambda params, x: apply_value(params, x)[..., 0])


def targets_and_advantages(nets_: Networks, value_params: Any, batch: Transition, gamma: Array) -> tuple[Array, Array]:
    """y = r + γ (1 − done) V(S') and  = y − V(S), standardised over the batch: both [B], without gradients.

    Each transition is a one-step sample: consecutive transitions of one actor may be many rounds apart.
    """
    next_value = nets_.value(value_params, batch.next_observation)
    target = jax.vmap(losses.td_target, (0, 0, 0, None))(batch.reward, batch.done, next_value, gamma)
    advantage = losses.standardise(target - nets_.value(value_params, batch.observation), batch.mask)
    return target, losses.stop(advantage)


def value_loss(nets_: Networks, value_params: Any, batch: Transition, target: Array) -> Array:
    """mean (V(S) − y)² over the unmasked rows."""
    return losses.masked_mean((nets_.value(value_params, batch.observation) - target) ** 2, batch.mask)


def gradient_learner(
    nets_: Networks,
    optimiser: optax.GradientTransformation,
    policy_loss: Callable[[Array, Array, Array], Array],
    *,
    epochs: int,
    value_weight: Array,
    entropy_weight: Array,
) -> Learn:
    """`epochs` steps on policy loss + value_weight · value loss − entropy_weight · H (A2C, PPO).

    policy_loss(log π(a|S), log π_old(a|S), Â), all of ONE row.
    """

    def learn(learner: Learner, batch: Transition, target: Array, advantage: Array) -> tuple[Learner, schedule.Losses]:
        def loss(params: Params) -> tuple[Array, schedule.Losses]:
            policy = nets_.policy(params.policy, batch.observation, batch.info.available)
            each = jax.vmap(policy_loss)(policy.log_prob(batch.action), batch.info.log_probability, advantage)
            values = {
                "policy": losses.masked_mean(each, batch.mask),
                "value": value_loss(nets_, params.value, batch, target),
                "entropy": losses.masked_mean(policy.entropy(), batch.mask),
            }
            total = values["policy"] + value_weight * values["value"] - entropy_weight * values["entropy"]
            return total, values

        def epoch(learner: Learner, _: None) -> tuple[Learner, schedule.Losses]:
            (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(learner.params)
            return Learner(*nets.descend(optimiser, learner.params, gradient, learner.optimiser)), values

        return schedule.many_steps(epoch, learner, None, epochs)

    return learn


def on_policy_agent(
    name: str,
    observation_size: int,
    num_actions: int,
    *,
    nets_: Networks,
    init_optimiser: Callable[[Params], Any],
    learn: Learn,
    gamma: Array,
    normalise: bool,
    dtype: Any,
    rounds: int = 1,
    cohort: int = 1,
) -> Agent:
    """An agent that learns, once per round, from the transitions of the last `rounds` rounds.

    learn(learner, batch, targets [B], advantages [B]) -> (learner, losses). `cohort` is the largest batch of
    one round: it sizes the memory of earlier rounds.
    """
    check_sizes(observation_size=observation_size, num_actions=num_actions, rounds=rounds, cohort=cohort)
    capacity = cohort * (rounds - 1)

    def init(key: Array) -> OnPolicyState:
        params = nets_.init(key)
        row = (blank(observation_size, num_actions, dtype), jnp.zeros((), jnp.int32))
        return OnPolicyState(
            Learner(params, init_optimiser(params)),
            ring.empty(row, capacity) if capacity else None,
            nets.no_statistics(observation_size, dtype) if normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(state: OnPolicyState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        usable = usable_actions(available, num_actions)
        x = schedule.see(state.statistics, observation, observation_size, dtype)
        params = state.learner.params
        return schedule.sample(nets_.policy(params.policy, x, usable), nets_.value(params.value, x), usable, key)

    def update(state: OnPolicyState, transitions: Transition, key: Array) -> tuple[OnPolicyState, schedule.Losses]:
        fresh = clean_transitions(transitions, observation_size, num_actions, dtype)
        statistics = schedule.watch(state.statistics, fresh)
        batch, memory = fresh, state.memory
        if memory is not None:  # the fresh rows [B], then the remembered ones, of which only the recent are unmasked
            old, since = memory.rows
            recent = (jnp.arange(capacity) < memory.size) & (state.rounds - since < rounds)
            batch = jax.tree.map(lambda new, kept: jnp.concatenate([new, kept]), fresh, old._replace(mask=recent))
            memory = ring.add(memory, (fresh, jnp.full(fresh.mask.shape, state.rounds)), fresh.mask)
        batch = schedule.scaled(batch, statistics)

        def learned(learner: Learner) -> tuple[Learner, schedule.Losses]:
            target, advantage = targets_and_advantages(nets_, learner.params.value, batch, gamma)
            return learn(learner, batch, target, advantage)

        learner, values = schedule.when(fresh.mask.any(), learned, state.learner)
        return OnPolicyState(learner, memory, statistics, state.rounds + 1), finite(values)

    return Agent(name, init, act, update)
