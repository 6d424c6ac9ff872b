"""Losses as pure functions of ONE example (map them over a batch), and masked reductions of batches."""

from __future__ import annotations

from typing import Any

import chex
import distrax
import jax
import jax.numpy as jnp

from agents.types import Array

stop = jax.lax.stop_gradient


# ------------------------------------------------------------ batches [B] with a mask [B]
def masked_mean(x: Array, mask: Array) -> Array:
    """The mean of the rows whose mask is True; 0 if there are none.

    >>> print(masked_mean(jnp.array([1., 3., 100.]), jnp.array([True, True, False])))
    2.0
    """
    chex.assert_equal_shape([x, mask])
    weight = mask.astype(x.dtype)
    return (x * weight).sum() / jnp.maximum(weight.sum(), 1)


def standardise(x: Array, mask: Array) -> Array:
    """Subtracts the mean and divides by the standard deviation of the unmasked rows."""
    centred = x - masked_mean(x, mask)
    deviation = jnp.sqrt(masked_mean(centred**2, mask))
    return jnp.where(mask.astype(bool), centred / (deviation + 1e-8), 0)


# ------------------------------------------------------------ ONE example
def td_target(reward: Array, done: Array, next_value: Array, gamma: Any) -> Array:
    """r + γ (1 − done) V(S'), without a gradient.

    >>> print(td_target(jnp.array(1.0), jnp.array(0.0), jnp.array(2.0), 0.5))
    2.0
    """
    chex.assert_rank([reward, done, next_value], 0)
    return stop(reward + gamma * (1 - done) * next_value)


def double_q_target(reward: Array, done: Array, next_online: Array, next_target: Array, gamma: Any) -> Array:
    """r + γ (1 − done) Q̄(S', argmax_a Q(S', a)): one network chooses, the other one judges."""
    chex.assert_rank([reward, done, next_online, next_target], [0, 0, 1, 1])
    chex.assert_equal_shape([next_online, next_target])
    return td_target(reward, done, next_target[jnp.argmax(next_online)], gamma)


def soft_value(logits: Array, q: Array, alpha: Array) -> Array:
    """Σ_a π(a) [Q(a) − α log π(a)], the entropy-regularised value: an exact sum, nothing is sampled."""
    chex.assert_rank([logits, q, alpha], [1, 1, 0])
    chex.assert_equal_shape([logits, q])
    policy = distrax.Categorical(logits=logits)
    return (policy.probs * q).sum() + alpha * policy.entropy()


def soft_policy_loss(logits: Array, q: Array, alpha: Array) -> Array:
    """Σ_a π(a) [α log π(a) − Q(a)] with Q and α held fixed."""
    return -soft_value(logits, stop(q), stop(alpha))


def temperature_loss(log_alpha: Array, entropy: Array, target: Array) -> Array:
    """α (H(π) − H̄) with the policy held fixed: α falls while the policy is more random than wanted."""
    chex.assert_rank([log_alpha, entropy, target], 0)
    return jnp.exp(log_alpha) * stop(entropy - target)


def policy_gradient_loss(log_probability: Array, advantage: Array) -> Array:
    """−log π(a|S) Â."""
    chex.assert_rank([log_probability, advantage], 0)
    return -log_probability * stop(advantage)


def surrogate(log_probability: Array, old_log_probability: Array, advantage: Array) -> Array:
    """ρ Â with ρ = π(a|S) / π_old(a|S); to be maximised."""
    chex.assert_rank([log_probability, old_log_probability, advantage], 0)
    return jnp.exp(log_probability - stop(old_log_probability)) * stop(advantage)


def clipped_surrogate_loss(log_probability: Array, old_log_probability: Array, advantage: Array, clip: Any) -> Array:
    """−min(ρ Â, clip(ρ, 1 − c, 1 + c) Â)."""
    chex.assert_rank([log_probability, old_log_probability, advantage], 0)
    # the exponent is bounded, so that a sample the policy has left far behind cannot overflow
    ratio = jnp.exp(jnp.clip(log_probability - stop(old_log_probability), -20, 20))
    advantage = stop(advantage)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
