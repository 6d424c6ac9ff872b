"""What the on-policy agents (A2C, PPO, TRPO) share: two networks, how they act, and the frame of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents import replay as ring
from agents.types import (
    Agent,
    Array,
    Info,
    Transition,
    blank,
    check_sizes,
    clean_transitions,
    finite,
    numbers,
    usable_actions,
)


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
    advantages: losses.Moments  # what they are standardised by
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


def targets_and_errors(nets_: Networks, value_params: Any, batch: Transition, gamma: Array) -> tuple[Array, Array]:
    """y = r + γ (1 − done) V(S') and y − V(S), the advantages before they are standardised: [B], no gradients.

    Each transition is a one-step sample: consecutive transitions of one actor may be many rounds apart.
    """
    next_value = nets_.value(value_params, batch.next_observation)
    target = jax.vmap(losses.td_target, (0, 0, 0, None))(batch.reward, batch.done, next_value, gamma)
    return target, losses.stop(target - nets_.value(value_params, batch.observation))


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
            }
            entropy = losses.masked_mean(policy.entropy(), batch.mask)
            return values["policy"] + value_weight * values["value"] - entropy_weight * entropy, values

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
    gamma: Any,
    advantage_decay: Any,
    normalise: bool,
    dtype: Any,
    rounds: int = 1,
    cohort: int = 1,
) -> Agent:
    """An agent that learns, once per round, from the transitions of the last `rounds` rounds.

    learn(learner, batch, targets [B], advantages [B]) -> (learner, losses). `cohort` is the largest batch of
    one round: it sizes the memory of earlier rounds. Advantages are standardised with statistics over rounds:
    those of one round would remove what its rewards have in common.
    """
    gamma, advantage_decay = numbers(dtype, 0, 1, gamma=gamma, advantage_decay=advantage_decay)
    check_sizes(observation_size=observation_size, num_actions=num_actions, rounds=rounds, cohort=cohort)
    capacity = cohort * (rounds - 1)

    def init(key: Array) -> OnPolicyState:
        params = nets_.init(key)
        row = (blank(observation_size, num_actions, dtype), jnp.zeros((), jnp.int32))
        return OnPolicyState(
            Learner(params, init_optimiser(params)),
            ring.empty(row, capacity) if capacity else None,
            nets.no_statistics(observation_size, dtype) if normalise else None,
            losses.no_moments(dtype),
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
        target, error = targets_and_errors(nets_, state.learner.params.value, batch, gamma)
        advantages = losses.follow(state.advantages, error[: len(fresh.mask)], fresh.mask, advantage_decay)
        advantage = losses.standardise(error, state.advantages, advantages)
        learner, values = schedule.when(fresh.mask.any(), lambda old: learn(old, batch, target, advantage), state.learner)
        values |= {"value_error": losses.masked_mean(jnp.abs(error), batch.mask)} | report(learner.params, batch)
        return OnPolicyState(learner, memory, statistics, advantages, state.rounds + 1), finite(values)

    def report(params: Params, batch: Transition) -> schedule.Losses:
        x, usable, mask = batch.observation, batch.info.available, batch.mask
        chosen, free = (nets_.policy(params.policy, x, a).probs for a in (usable, jnp.ones_like(usable)))
        return {
            "live_policy": diagnostics.live_units(params.policy, x, mask),
            "live_critic": diagnostics.live_units(params.value, x, mask),
            "entropy": diagnostics.entropy(chosen, usable, mask),
            "sensitivity": diagnostics.sensitivity(free, mask),
        }

    return Agent(name, init, act, update)
