"""Transitions that end when the same actor acts again, for any agent."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from agents.node import field
from agents.types import Agent, Array, Transition, blank, clean_transitions


class DelayedState(NamedTuple):
    agent: Any
    # leaves [N, …]: what each actor did last; `mask` says whether it did anything yet
    pending: Transition


class Delayed(Agent):
    """The agent `inner`, taught (S, a, r, S') with S' = what is observed of the actor when it acts
    the next time.

    `update` is given the transitions as they are known right after a round, with `actor` [B]: an
    actor's last action, its reward and its info wait until the actor is seen again; its new
    observation completes them and the new action takes their place. An actor appears at most once
    in a batch. A row whose mask is False (it acted, but nothing came of it) completes nothing. The
    last actions of a run are never completed: nothing is decided after them.

    >>> from agents.sac import SAC
    >>> agent = Delayed(inner=SAC(2, 3), num_actors=5)
    >>> agent.init(jax.random.key(0)).pending.reward.shape
    (5,)
    """

    inner: Agent = field(Agent(), kw_only=True)
    num_actors: int = field(1, ge=1, kw_only=True)

    def init(self, key: Array) -> DelayedState:
        inner = self.inner
        row = blank(
            inner.observation_size,
            inner.num_actions,
            inner.dtype,
            getattr(inner, "continuous", False),
        )
        everybody = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_actors, *x.shape)), row)
        return DelayedState(inner.init(key), everybody)

    def act(
        self, state: DelayedState, observation: Array, key: Array, available: Array | None = None
    ) -> Any:
        return self.inner.act(state.agent, observation, key, available)

    def update(
        self, state: DelayedState, transitions: Transition, key: Array
    ) -> tuple[DelayedState, dict[str, Array]]:
        inner = self.inner
        chex.assert_shape(transitions.actor, transitions.reward.shape)
        actor = jnp.asarray(transitions.actor, jnp.int32)
        sizes = inner.observation_size, inner.num_actions, inner.dtype
        fresh = clean_transitions(
            transitions, *sizes, continuous=getattr(inner, "continuous", False)
        )
        before = jax.tree.map(lambda x: x[actor], state.pending)
        complete = before._replace(
            next_observation=fresh.observation,
            next_available=fresh.info.available,
            done=jnp.zeros_like(fresh.done),
            mask=before.mask & fresh.mask,
        )
        learned, losses = inner.update(state.agent, complete, key)
        at = jnp.where(fresh.mask, actor, self.num_actors)  # the others are written nowhere
        pending = jax.tree.map(lambda x, new: x.at[at].set(new, mode="drop"), state.pending, fresh)
        return DelayedState(learned, pending), losses
