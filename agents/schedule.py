"""What the agents that learn from replay share: what they store, and the gradient steps of one round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from agents import replay as ring
from agents.nets import Statistics, normalise, observe
from agents.types import Array, Transition, clean_observation

Learner = TypeVar("Learner")


class Experience(NamedTuple):
    """One stored row; `next_observation` and `done` are None if the agent never bootstraps."""

    observation: Array  # [S]
    action: Array  # [] int32 or [A] float
    reward: Array  # []
    available: Array  # [A] bool
    next_observation: Any  # [S]
    done: Any  # []


def empty_experience(
    observation_size: int, num_actions: int, capacity: int, dtype: Any, *, continuous: bool = False, bootstrap: bool = True
) -> ring.Replay:
    """An empty ring; without the next observation it takes half the memory (agents that do not bootstrap)."""
    observation, scalar = jnp.zeros(observation_size, dtype), jnp.zeros((), dtype)
    action = jnp.zeros(num_actions, dtype) if continuous else jnp.zeros((), jnp.int32)
    example = Experience(
        observation,
        action,
        scalar,
        jnp.zeros(num_actions, bool),
        observation if bootstrap else None,
        scalar if bootstrap else None,
    )
    return ring.empty(example, capacity)


def remember(replay: ring.Replay, batch: Transition) -> ring.Replay:
    """Stores the valid rows of a cleaned batch."""
    bootstrap = replay.rows.done is not None
    rows = Experience(
        batch.observation,
        batch.action,
        batch.reward,
        batch.info.available,
        batch.next_observation if bootstrap else None,
        batch.done if bootstrap else None,
    )
    return ring.add(replay, rows, batch.mask)


def recall(replay: ring.Replay, statistics: Statistics | None, key: Array, shape: tuple[int, ...]) -> Experience:
    """Uniformly drawn rows, with normalised observations if the agent keeps statistics."""
    rows = ring.sample(replay, key, shape)
    if statistics is None:
        return rows
    following = rows.next_observation
    return rows._replace(
        observation=normalise(statistics, rows.observation),
        next_observation=None if following is None else normalise(statistics, following),
    )


def see(statistics: Statistics | None, observation: Array, size: int, dtype: Any) -> Array:
    """ONE observation as the networks take it: finite, and normalised if the agent keeps statistics."""
    observation = clean_observation(observation, size, dtype)
    return observation if statistics is None else normalise(statistics, observation)


def watch(statistics: Statistics | None, batch: Transition) -> Statistics | None:
    """The running statistics after this batch (None if the agent does not normalise)."""
    return None if statistics is None else observe(statistics, batch.observation, batch.mask)


def when(
    ready: Array, learn: Callable[[Learner], tuple[Learner, dict[str, Array]]], learner: Learner
) -> tuple[Learner, dict[str, Array]]:
    """Learns if `ready`; otherwise returns the learner as it is and zero losses with the same keys."""
    losses = jax.eval_shape(learn, learner)[1]
    idle = {name: jnp.zeros(loss.shape, loss.dtype) for name, loss in losses.items()}
    return jax.lax.cond(ready, learn, lambda same: (same, idle), learner)


def many_steps_when(
    ready: Array, step: Callable[[Learner, Experience], tuple[Learner, dict[str, Array]]], learner: Learner, rows: Experience
) -> tuple[Learner, dict[str, Array]]:
    """If `ready`, one `step` per leading slice of `rows` [G, batch, ...]; losses are means over the steps."""

    def run(learner: Learner) -> tuple[Learner, dict[str, Array]]:
        learner, losses = jax.lax.scan(step, learner, rows)
        return learner, {name: loss.mean(0) for name, loss in losses.items()}

    return when(ready, run, learner)
