"""Small networks, their optimiser, and the running normalisation of observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from distrax import Categorical

from agents.types import Array

OUTPUT_SCALE = 0.01  # the last layer starts small: a near-uniform policy, values near 0
UNAVAILABLE = -1e9  # a logit whose probability is exactly 0, while its gradients stay finite
RULES = {"adam": optax.scale_by_adam, "sgd": optax.identity}
CLIP_OBSERVATION = 10.0  # normalised observations are cut at this many standard deviations


def categorical(logits: Array | None = None, probs: Array | None = None) -> Categorical:
    """A distribution over actions [..., A]: sampling, log-probabilities, entropy. The one place
    that makes one."""
    return Categorical(logits=logits, probs=probs)


class MLP(nn.Module):
    """ReLU layers, then a linear output layer whose LeCun initialisation is scaled by
    `OUTPUT_SCALE`."""

    hidden: Sequence[int]
    outputs: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, dtype=self.dtype, param_dtype=self.dtype)(x))
        small = nn.initializers.variance_scaling(OUTPUT_SCALE**2, "fan_in", "truncated_normal")
        return nn.Dense(self.outputs, dtype=self.dtype, param_dtype=self.dtype, kernel_init=small)(
            x
        )


def mlp(
    hidden: tuple[int, ...], outputs: int, dtype: Any
) -> tuple[Callable[..., Any], Callable[..., Array]]:
    """`(init, apply)` of an MLP: init(key, x) -> params, apply(params, x [..., S]) -> [...,
    outputs].

    >>> init, apply = mlp((64,), 3, jnp.float32)
    >>> apply(init(jax.random.key(0), jnp.zeros(5)), jnp.zeros((10, 5))).shape
    (10, 3)
    """
    network = MLP(hidden, outputs, dtype)
    return network.init, network.apply  # type: ignore[return-value]


def mask_logits(logits: Array, available: Array) -> Array:
    """Forbids unavailable actions; a network output that is not finite falls back to the uniform
    policy."""
    logits = jnp.where(jnp.isfinite(logits).all(-1, keepdims=True), logits, 0)
    return jnp.where(available, logits, jnp.asarray(UNAVAILABLE, logits.dtype))


def greedy(values: Array, available: Array) -> Array:
    """The available action of highest value, as an index; the lowest index on a tie."""
    return jnp.argmax(mask_logits(values, available), -1).astype(jnp.int32)


def epsilon_greedy(values: Array, available: Array, epsilon: Array) -> Array:
    """Probabilities [A]: ε spread evenly over the available actions, the rest on the greedy one.

    >>> print(epsilon_greedy(jnp.array([1., 3., 2.]), jnp.array([True, True, False]), 0.5))
    [0.25 0.75 0.  ]
    """
    even = available / available.sum(-1, keepdims=True)
    best = jax.nn.one_hot(greedy(values, available), values.shape[-1])
    return (epsilon * even + (1 - epsilon) * best).astype(values.dtype)


def optimiser(name: str, lr: Any, max_grad_norm: Any, dtype: Any) -> optax.GradientTransformation:
    """Adam or plain gradient descent behind a clip of the global gradient norm; both numbers may be
    traced."""
    lr, max_grad_norm = jnp.asarray(lr, dtype), jnp.asarray(max_grad_norm, dtype)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), RULES[name](), optax.scale(-lr))


def descend(
    optimiser: optax.GradientTransformation, params: Any, gradient: Any, state: Any
) -> tuple[Any, Any]:
    """One optimiser step. A gradient with an entry that is not finite counts as zero: it spoils
    nothing."""
    sound = jnp.isfinite(optax.global_norm(gradient))
    gradient = jax.tree.map(lambda g: jnp.where(sound, g, jnp.zeros_like(g)), gradient)
    updates, state = optimiser.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


class Statistics(NamedTuple):
    """Running mean and summed squared deviation of the observations seen so far."""

    seen: Array  # []   how many
    mean: Array  # [S]
    spread: Array  # [S]  Σ (x − mean)²


def no_statistics(size: int, dtype: Any) -> Statistics:
    return Statistics(jnp.zeros((), dtype), jnp.zeros(size, dtype), jnp.zeros(size, dtype))


def observe(statistics: Statistics, observation: Array, mask: Array) -> Statistics:
    """Merges the unmasked rows of `observation` [B, S] (the parallel form of Welford's update)."""
    weight = mask.astype(statistics.mean.dtype)[:, None]
    count = weight.sum()
    mean = (weight * observation).sum(0) / jnp.maximum(count, 1)
    spread = (weight * (observation - mean) ** 2).sum(0)
    total = jnp.maximum(statistics.seen + count, 1)
    gap = mean - statistics.mean
    merged = Statistics(
        statistics.seen + count,
        statistics.mean + gap * count / total,
        statistics.spread + spread + gap**2 * statistics.seen * count / total,
    )
    # an overflow (observations around 1e30) keeps the old numbers
    sound = jnp.isfinite(merged.spread).all()
    return jax.tree.map(lambda new, old: jnp.where(sound, new, old), merged, statistics)


def normalise(statistics: Statistics, observation: Array) -> Array:
    """(x − mean) / standard deviation, cut at ±10; the identity before anything has been seen."""
    variance = statistics.spread / jnp.maximum(statistics.seen, 1)
    scaled = (observation - statistics.mean) / jnp.sqrt(variance + 1e-8)
    scaled = jnp.clip(scaled, -CLIP_OBSERVATION, CLIP_OBSERVATION)
    return jnp.where(statistics.seen > 0, scaled, observation)
