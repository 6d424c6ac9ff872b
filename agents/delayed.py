"""Transitions that end when the same actor acts again, for any agent."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from agents.types import Agent, Array, Transition, blank, check_sizes, clean_transitions


class DelayedState(NamedTuple):
    agent: Any
    pending: Transition  # leaves [N, …]: what each actor did last; `mask` says whether it did anything yet


def delayed(
    agent: Agent,
    num_actors: int,
    observation_size: int,
    num_actions: int,
    continuous: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """The same agent, taught (S, a, r, S') with S' = what is observed of the actor when it acts the next time.

    `update` is given the transitions as they are known right after a round, with `actor` [B]: an actor's last action,
    its reward and its info wait until the actor is seen again; its new observation completes them and the new
    action takes their place. An actor appears at most once in a batch. A row whose mask is False (it acted, but nothing
    came of it) completes nothing. The last actions of a run are never completed: nothing is decided after them.

    >>> from agents.sac import sac
    >>> late = delayed(sac(2, 3), num_actors=5, observation_size=2, num_actions=3)
    >>> late.init(jax.random.key(0)).pending.reward.shape
    (5,)
    """
    check_sizes(num_actors=num_actors, observation_size=observation_size, num_actions=num_actions)

    def init(key: Array) -> DelayedState:
        row = blank(observation_size, num_actions, dtype, continuous)
        everybody = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_actors, *x.shape)), row)
        return DelayedState(agent.init(key), everybody)

    def act(state: DelayedState, observation: Array, key: Array, available: Array | None = None) -> Any:
        return agent.act(state.agent, observation, key, available)

    def update(state: DelayedState, transitions: Transition, key: Array) -> tuple[DelayedState, dict[str, Array]]:
        chex.assert_shape(transitions.actor, transitions.reward.shape)
        actor = jnp.asarray(transitions.actor, jnp.int32)
        fresh = clean_transitions(transitions, observation_size, num_actions, dtype, continuous=continuous)
        before = jax.tree.map(lambda x: x[actor], state.pending)
        complete = before._replace(
            next_observation=fresh.observation,
            next_available=fresh.info.available,
            done=jnp.zeros_like(fresh.done),
            mask=before.mask & fresh.mask,
        )
        inner, losses = agent.update(state.agent, complete, key)
        at = jnp.where(fresh.mask, actor, num_actors)  # the others are written nowhere
        pending = jax.tree.map(lambda x, new: x.at[at].set(new, mode="drop"), state.pending, fresh)
        return DelayedState(inner, pending), losses

    return Agent(agent.name, init, act, update)
