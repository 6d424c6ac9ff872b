"""Policies that do not learn."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.types import Agent, Array, Info, Transition, check_sizes, usable_actions


class FixedState(NamedTuple):
    rounds: Array  # [] int32, calls of update


def _init(key: Array) -> FixedState:
    return FixedState(jnp.zeros((), jnp.int32))


def _update(state: FixedState, transitions: Transition, key: Array) -> tuple[FixedState, dict[str, Array]]:
    return FixedState(state.rounds + 1), {}


def fixed(action: Any, num_actions: int | None = None, *, dtype: Any = jnp.float32) -> Agent:
    """Always `action`: an index, or an array for continuous control.

    An index that `available` forbids is replaced by the lowest allowed one. With `num_actions`, or when `act`
    is given `available`, `info.policy` holds the probabilities, otherwise the action itself as a vector.

    >>> agent = fixed(2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(4), jax.random.key(1))
    >>> int(action), info.policy.tolist()
    (2, [0.0, 0.0, 1.0])
    """
    discrete = jnp.ndim(action) == 0 and jnp.issubdtype(jnp.asarray(action).dtype, jnp.integer)
    if discrete and (action < 0 or (num_actions is not None and action >= num_actions)):
        raise ValueError(f"action must be an index from 0 to {(num_actions or 2**31) - 1}, got {action!r}")
    chosen = jnp.asarray(action, jnp.int32 if discrete else dtype)

    def act(state: FixedState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        nothing = jnp.zeros((), dtype)
        if not discrete:
            return chosen, Info(nothing, nothing, jnp.ravel(chosen), jnp.ones(chosen.size, bool))
        if available is None and num_actions is None:
            return chosen, Info(nothing, nothing, chosen.astype(dtype)[None], jnp.ones(1, bool))
        count = num_actions if available is None else len(available)
        usable = usable_actions(available, count or 1)
        allowed = jnp.where(usable[chosen], chosen, jnp.argmax(usable)).astype(jnp.int32)
        return allowed, Info(nothing, nothing, jax.nn.one_hot(allowed, count or 1, dtype=dtype), usable)

    return Agent("fixed", _init, act, _update)


def constant(observation_size: int, num_actions: int, *, action: Any = 0, dtype: Any = jnp.float32) -> Agent:
    """`fixed` with the signature that the registry expects of every builder."""
    check_sizes(observation_size=observation_size, num_actions=num_actions)
    return fixed(action, num_actions, dtype=dtype)


def uniform(num_actions: int, *, dtype: Any = jnp.float32) -> Agent:
    """A uniformly random available action, drawn anew for every observation.

    >>> agent = uniform(4)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> info.policy.tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    check_sizes(num_actions=num_actions)

    def act(state: FixedState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        usable = usable_actions(available, num_actions)
        probabilities = usable.astype(dtype) / usable.sum().astype(dtype)
        action = jax.random.choice(key, num_actions, p=probabilities).astype(jnp.int32)
        return action, Info(jnp.log(probabilities[action]), jnp.zeros((), dtype), probabilities, usable)

    return Agent("random", _init, act, _update)


def random(observation_size: int, num_actions: int, *, dtype: Any = jnp.float32) -> Agent:
    """`uniform` with the signature that the registry expects of every builder."""
    check_sizes(observation_size=observation_size)
    return uniform(num_actions, dtype=dtype)
