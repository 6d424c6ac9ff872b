"""What the on-policy agents (A2C, PPO, TRPO) share: a policy network, a value network, and how they act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp

from agents import losses, nets, schedule
from agents.types import Array, Info, Transition, usable_actions


class Params(NamedTuple):
    policy: Any  # S → A logits
    value: Any  # S → 1


class Networks(NamedTuple):
    """Pure functions of parameters and observations; the observations may have leading axes."""

    init: Callable[[Array], Params]
    logits: Callable[[Any, Array, Array], Array]  # (params, [..., S], available [..., A]) -> [..., A]
    value: Callable[[Any, Array], Array]  # (params, [..., S]) -> [...]


class OnPolicyBatch(NamedTuple):
    """A cleaned batch in the form the losses need; leaves [B, ...]."""

    observation: Array
    action: Array
    reward: Array
    next_observation: Array
    done: Array
    available: Array
    log_probability: Array  # of the action when it was taken
    mask: Array


def networks(observation_size: int, num_actions: int, hidden: tuple[int, ...], dtype: Any) -> Networks:
    init_policy, apply_policy = nets.mlp(hidden, num_actions, dtype)
    init_value, apply_value = nets.mlp(hidden, 1, dtype)

    def init(key: Array) -> Params:
        policy_key, value_key = jax.random.split(key)
        example = jnp.zeros(observation_size, dtype)
        return Params(init_policy(policy_key, example), init_value(value_key, example))

    return Networks(
        init,
        lambda params, x, available: nets.mask_logits(apply_policy(params, x), available),
        lambda params, x: apply_value(params, x)[..., 0],
    )


def act(
    nets_: Networks,
    params: Params,
    statistics: nets.Statistics | None,
    observation: Array,
    key: Array,
    available: Array | None,
    observation_size: int,
    num_actions: int,
    dtype: Any,
) -> tuple[Array, Info]:
    """Samples the policy for ONE observation."""
    usable = usable_actions(available, num_actions)
    observation = schedule.see(statistics, observation, observation_size, dtype)
    policy = distrax.Categorical(logits=nets_.logits(params.policy, observation, usable))
    action, log_probability = policy.sample_and_log_prob(seed=key)
    return action, Info(log_probability, nets_.value(params.value, observation), policy.probs, usable)


def flatten(clean: Transition) -> OnPolicyBatch:
    return OnPolicyBatch(
        clean.observation,
        clean.action,
        clean.reward,
        clean.next_observation,
        clean.done,
        clean.info.available,
        clean.info.log_probability,
        clean.mask,
    )


def scaled(batch: OnPolicyBatch, statistics: nets.Statistics | None) -> OnPolicyBatch:
    """The batch with normalised observations (as it is, if the agent keeps no statistics)."""
    if statistics is None:
        return batch
    return batch._replace(
        observation=nets.normalise(statistics, batch.observation),
        next_observation=nets.normalise(statistics, batch.next_observation),
    )


def targets_and_advantages(nets_: Networks, value_params: Any, batch: OnPolicyBatch, gamma: Array) -> tuple[Array, Array]:
    """y = r + γ (1 − done) V(S') and  = y − V(S), standardised over the batch: both [B], without gradients.

    Each transition is a one-step sample: consecutive transitions of one actor may be many rounds apart.
    """
    next_value = nets_.value(value_params, batch.next_observation)
    target = jax.vmap(losses.td_target, (0, 0, 0, None))(batch.reward, batch.done, next_value, gamma)
    advantage = losses.standardise(target - nets_.value(value_params, batch.observation), batch.mask)
    return target, losses.stop(advantage)


def evaluate(nets_: Networks, policy_params: Any, batch: OnPolicyBatch) -> tuple[Array, Array, distrax.Categorical]:
    """log π(a|S) [B], H(π(·|S)) [B] and the distributions themselves."""
    policy = distrax.Categorical(logits=nets_.logits(policy_params, batch.observation, batch.available))
    return policy.log_prob(batch.action), policy.entropy(), policy


def value_loss(nets_: Networks, value_params: Any, batch: OnPolicyBatch, target: Array) -> Array:
    """mean (V(S) − y)² over the unmasked rows."""
    return losses.masked_mean((nets_.value(value_params, batch.observation) - target) ** 2, batch.mask)
