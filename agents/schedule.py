"""What all agents share: how observations are prepared, which statistics are kept, and when there
is enough to learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from agents.nets import Categorical, Statistics, normalise, observe
from agents.types import Array, Info, Transition, clean_observation

Learner = TypeVar("Learner")
Losses = dict[str, Array]


def network_input(
    statistics: Statistics | None, observation: Array, size: int, dtype: Any
) -> Array:
    """ONE observation as the networks take it: finite, and normalised if the agent keeps
    statistics."""
    observation = clean_observation(observation, size, dtype)
    return observation if statistics is None else normalise(statistics, observation)


def update_statistics(statistics: Statistics | None, batch: Transition) -> Statistics | None:
    """The running statistics after this batch (None if the agent does not normalise)."""
    return None if statistics is None else observe(statistics, batch.observation, batch.mask)


def scaled(rows: Any, statistics: Statistics | None) -> Any:
    """Rows with normalised observations (as they are, if the agent keeps no statistics)."""
    if statistics is None:
        return rows
    following = rows.next_observation
    return rows._replace(
        observation=normalise(statistics, rows.observation),
        next_observation=None if following is None else normalise(statistics, following),
    )


def sample(policy: Categorical, value: Array, usable: Array, key: Array) -> tuple[Array, Info]:
    """A draw from the policy of ONE observation, and what `act` tells about it."""
    action, log_probability = policy.sample_and_log_prob(seed=key)
    return action, Info(log_probability, value, policy.probs, usable)


def when(
    ready: Array, learn: Callable[[Learner], tuple[Learner, Losses]], learner: Learner
) -> tuple[Learner, Losses]:
    """Learns if `ready`; otherwise returns the learner as it is and zero losses with the same
    keys."""
    losses = jax.eval_shape(learn, learner)[1]
    idle = {name: jnp.zeros(loss.shape, loss.dtype) for name, loss in losses.items()}
    return jax.lax.cond(ready, learn, lambda same: (same, idle), learner)


def many_steps(
    step: Callable[[Learner, Any], tuple[Learner, Losses]],
    learner: Learner,
    rows: Any,
    length: int | None = None,
) -> tuple[Learner, Losses]:
    """One `step` per leading slice of `rows` [G, batch, ...]; losses are means over the steps."""
    learner, losses = jax.lax.scan(step, learner, rows, length=length)
    return learner, {name: loss.mean(0) for name, loss in losses.items()}
