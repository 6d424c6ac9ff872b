"""What agents with a replay share: clean, remember, recall, and many gradient steps once enough is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import diagnostics, nets, schedule
from agents import replay as ring
from agents.types import Agent, Array, Info, Transition, blank, check_sizes, clean_transitions, finite, usable_actions


class Experience(NamedTuple):
    """One stored row; the last three are None if the agent never bootstraps."""

    observation: Array  # [S]
    action: Array  # [] int32 or [A] float
    reward: Array  # []
    available: Array  # [A] bool
    next_observation: Any  # [S]
    done: Any  # []
    next_available: Any  # [A] bool


class ReplayState(NamedTuple):
    learner: Any  # networks and optimisers: a record of the agent's own
    replay: ring.Replay
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


def experience(clean: Transition, bootstrap: bool) -> Experience:
    """What is stored of a cleaned batch; without the next observations a row takes half the memory."""
    following = (clean.next_observation, clean.done, clean.next_available) if bootstrap else (None, None, None)
    return Experience(clean.observation, clean.action, clean.reward, clean.info.available, *following)


def replay_agent(
    name: str,
    observation_size: int,
    num_actions: int,
    *,
    init: Callable[[Array], Any],
    choose: Callable[[Any, Array, Array, Array, Array], tuple[Array, Info]],
    step: Callable[[Any, Experience], tuple[Any, schedule.Losses]],
    policy: Callable[[Any, Array, Array, Array], Array],
    report: Callable[[Any, Experience, Array, Array], schedule.Losses],
    capacity: int,
    batch: int,
    gradient_steps: int,
    normalise: bool,
    dtype: Any,
    continuous: bool = False,
    bootstrap: bool = True,
    due: Callable[[Array], Any] = lambda rounds: True,
) -> Agent:
    """An agent out of five pure functions of its `learner`.

    init(key) -> learner; choose(learner, x [S], usable [A], rounds, key) -> (action, Info);
    step(learner, rows [batch, ...]) -> (learner, losses), one gradient step;
    policy(learner, x [B, S], usable [B, A], rounds) -> [B, A], the probabilities (or the noise-free action);
    report(learner, rows, mask, rounds) -> more numbers for the log, such as the live units on a minibatch.
    `due(rounds)` says in which rounds it learns.
    Observations arrive normalised if `normalise` is on.
    """
    sizes = dict(observation_size=observation_size, num_actions=num_actions)
    check_sizes(**sizes, capacity=capacity, batch=batch, gradient_steps=gradient_steps)
    if batch > capacity:
        raise ValueError(f"batch {batch} can never be reached by a replay of capacity {capacity}")

    def start(key: Array) -> ReplayState:
        row = experience(blank(observation_size, num_actions, dtype, continuous), bootstrap)
        return ReplayState(
            init(key),
            ring.empty(row, capacity),
            nets.no_statistics(observation_size, dtype) if normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(state: ReplayState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        usable = usable_actions(available, num_actions)
        x = schedule.see(state.statistics, observation, observation_size, dtype)
        return choose(state.learner, x, usable, state.rounds, key)

    def update(state: ReplayState, transitions: Transition, key: Array) -> tuple[ReplayState, schedule.Losses]:
        clean = clean_transitions(transitions, observation_size, num_actions, dtype, continuous=continuous)
        statistics = schedule.watch(state.statistics, clean)
        replay = ring.add(state.replay, experience(clean, bootstrap), clean.mask)
        rows = schedule.scaled(ring.sample(replay, key, (gradient_steps, batch)), statistics)
        ready = clean.mask.any() & (replay.size >= batch) & due(state.rounds + 1)
        learner, values = schedule.when(ready, lambda old: schedule.many_steps(step, old, rows), state.learner)
        minibatch, stored = jax.tree.map(lambda x: x[0], rows), jnp.broadcast_to(replay.size > 0, (batch,))
        values |= report(learner, minibatch, stored, state.rounds)
        x, usable = schedule.scaled(clean, statistics).observation, clean.info.available
        chosen, free = (policy(learner, x, a, state.rounds) for a in (usable, jnp.ones_like(usable)))
        values |= {"sensitivity": diagnostics.sensitivity(free, clean.mask)}
        if not continuous:
            values |= {"entropy": diagnostics.entropy(chosen, usable, clean.mask)}
        return ReplayState(learner, replay, statistics, state.rounds + 1), finite(values)

    return Agent(name, start, act, update)
