"""Losses as pure functions of ONE example (map them over a batch), and masked reductions of
batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from agents.nets import categorical
from agents.types import Array

stop = jax.lax.stop_gradient


# ------------------------------------------------------------ batches [B] with a mask [B]
def masked_mean(x: Array, mask: Array) -> Array:
    """The mean of the rows whose mask is True, or weighted by the mask; 0 if there are none.

    >>> print(masked_mean(jnp.array([1., 3., 100.]), jnp.array([True, True, False])))
    2.0
    """
    chex.assert_equal_shape([x, mask])
    weight = mask.astype(x.dtype)
    return (x * weight).sum() / jnp.maximum(weight.sum(), 1)


class Moments(NamedTuple):
    """Exponentially fading averages of the advantages of the rounds so far."""

    weight: Array  # []  how much of the averages is known, 1 − decayⁿ after n rounds
    mean: Array  # []
    square: Array  # []  of the advantages' distance from the mean of the rounds before


def no_moments(dtype: Any) -> Moments:
    return Moments(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), dtype))


def follow(moments: Moments, x: Array, mask: Array, decay: Array) -> Moments:
    """The moments after one more round with the unmasked rows of `x` [B]; as they were if there are
    none."""
    now = masked_mean(x, mask), masked_mean((x - middle(moments)) ** 2, mask)
    new = jax.tree.map(
        lambda old, new: decay * old + (1 - decay) * new,
        moments,
        Moments(jnp.ones_like(x.sum()), *now),
    )
    sound = mask.any() & jnp.isfinite(new.square)  # an overflow keeps the old numbers
    return jax.tree.map(lambda after, before: jnp.where(sound, after, before), new, moments)


def middle(moments: Moments) -> Array:
    """The mean over the rounds so far, 0 before the first one."""
    return moments.mean / jnp.maximum(moments.weight, 1e-8)


def standardise(x: Array, before: Moments, after: Moments) -> Array:
    """(x − mean of the rounds before) / running root mean square of that difference, this round
    included.

    Nothing of this round is in the mean, so what all rows of one round have in common stays.

    >>> before, x, every = no_moments(jnp.float32), jnp.array([3.0, 4.0]), jnp.ones(2, bool)
    >>> [
    ...     round(float(a), 3)
    ...     for a in standardise(x, before, follow(before, x, every, jnp.array(0.9)))
    ... ]
    [0.849, 1.131]
    """
    scale = jnp.sqrt(after.square / jnp.maximum(after.weight, 1e-8))
    return (x - middle(before)) / (scale + 1e-8)


# ------------------------------------------------------------ ONE example
def td_target(reward: Array, done: Array, next_value: Array, gamma: Any) -> Array:
    """r + γ (1 − done) V(S'), without a gradient.

    >>> print(td_target(jnp.array(1.0), jnp.array(0.0), jnp.array(2.0), 0.5))
    2.0
    """
    chex.assert_rank([reward, done, next_value], 0)
    return stop(reward + gamma * (1 - done) * next_value)


def double_q_target(
    reward: Array, done: Array, next_online: Array, next_target: Array, gamma: Any
) -> Array:
    """r + γ (1 − done) Q̄(S', argmax_a Q(S', a)): one network chooses, the other one judges."""
    chex.assert_rank([reward, done, next_online, next_target], [0, 0, 1, 1])
    chex.assert_equal_shape([next_online, next_target])
    return td_target(reward, done, next_target[jnp.argmax(next_online)], gamma)


def soft_value(logits: Array, q: Array, alpha: Array) -> Array:
    """Σ_a π(a) [Q(a) − α log π(a)], the entropy-regularised value: an exact sum, nothing is
    sampled."""
    chex.assert_rank([logits, q, alpha], [1, 1, 0])
    chex.assert_equal_shape([logits, q])
    policy = categorical(logits=logits)
    return (policy.probs * q).sum() + alpha * policy.entropy()


def soft_policy_loss(logits: Array, q: Array, alpha: Array) -> Array:
    """Σ_a π(a) [α log π(a) − Q(a)] with Q and α held fixed."""
    return -soft_value(logits, stop(q), stop(alpha))


def temperature_loss(log_alpha: Array, entropy: Array, target: Array) -> Array:
    """−log α (H̄ − H(π)) with the policy held fixed: α falls while the policy is more random than
    wanted.

    The gradient H − H̄ does not shrink with α, so a small temperature can grow again.
    """
    chex.assert_rank([log_alpha, entropy, target], 0)
    return -log_alpha * stop(target - entropy)


def policy_gradient_loss(log_probability: Array, advantage: Array) -> Array:
    """−log π(a|S) Â."""
    chex.assert_rank([log_probability, advantage], 0)
    return -log_probability * stop(advantage)


def surrogate(log_probability: Array, old_log_probability: Array, advantage: Array) -> Array:
    """ρ Â with ρ = π(a|S) / π_old(a|S); to be maximised."""
    chex.assert_rank([log_probability, old_log_probability, advantage], 0)
    return jnp.exp(log_probability - stop(old_log_probability)) * stop(advantage)


def clipped_surrogate_loss(
    log_probability: Array, old_log_probability: Array, advantage: Array, clip: Any
) -> Array:
    """−min(ρ Â, clip(ρ, 1 − c, 1 + c) Â)."""
    chex.assert_rank([log_probability, old_log_probability, advantage], 0)
    # the exponent is bounded, so that a sample the policy has left far behind cannot overflow
    ratio = jnp.exp(jnp.clip(log_probability - stop(old_log_probability), -20, 20))
    advantage = stop(advantage)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
