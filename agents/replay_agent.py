"""What agents with a replay buffer share: they clean and store transitions, and take many gradient
steps on samples once enough are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, nets, schedule
from agents import replay as ring
from agents.node import Real, field
from agents.types import Agent, Array, Info, Transition, blank, finite, usable_actions


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
    """What is stored of a cleaned batch; without the next observations a row takes half the
    memory."""
    following = (
        (clean.next_observation, clean.done, clean.next_available)
        if bootstrap
        else (None, None, None)
    )
    return Experience(
        clean.observation, clean.action, clean.reward, clean.info.available, *following
    )


class ReplayAgent(Agent):
    """An agent out of a few pure functions of its `learner`. Observations arrive normalised if
    `normalise` is on.

    A subclass has fields hidden, capacity, batch, gradient_steps and normalise, and says `start`,
    `choose`, `step`, `policy` and `report`.
    """

    hidden: tuple[int, ...] = field((64,), kw_only=True)
    capacity: int = field(10_000, kw_only=True)
    batch: int = field(64, kw_only=True)
    gradient_steps: int = field(10, kw_only=True)
    optimizer: str = field("adam", choices=tuple(nets.RULES), kw_only=True)
    lr: Real = field(1e-3, ge=1e-12, le=1e6, kw_only=True)
    max_grad_norm: Real = field(1.0, ge=1e-12, le=1e6, kw_only=True)
    normalise: bool = field(True, kw_only=True)
    continuous = False

    def check(self) -> None:
        super().check()
        if self.capacity is not None and self.batch > self.capacity:
            raise ValueError(
                f"batch {self.batch} can never be reached by a replay of capacity {self.capacity}"
            )

    @property
    def bootstraps(self) -> bool:
        return True

    def rule(self, lr: Any = None) -> optax.GradientTransformation:
        return nets.optimiser(
            self.optimizer, self.lr if lr is None else lr, self.max_grad_norm, self.dtype
        )

    # ---- what a subclass says --------------------------------------------------------------------
    def start(self, key: Array) -> Any:
        """The learner before anything is learned."""
        raise NotImplementedError

    def choose(
        self, learner: Any, x: Array, usable: Array, rounds: Array, key: Array
    ) -> tuple[Array, Info]:
        """An action for ONE observation x [S]; usable [A]."""
        raise NotImplementedError

    def measured(self, learner: Any, rows: Experience) -> Any:
        """The learner before the steps on rows [G, batch, ...]."""
        return learner

    def step(self, learner: Any, rows: Experience) -> tuple[Any, schedule.Losses]:
        """One gradient step on rows [batch, ...]."""
        raise NotImplementedError

    def policy(self, learner: Any, x: Array, usable: Array, rounds: Array) -> Array:
        """[B, A] of x [B, S]: the probabilities, or the noise-free action."""
        raise NotImplementedError

    def report(self, learner: Any, rows: Experience, mask: Array, rounds: Array) -> schedule.Losses:
        """More numbers for the log, such as the live units on a minibatch."""
        raise NotImplementedError

    def due(self, rounds: Array) -> Any:
        """Whether it learns in this round."""
        return True

    # ---- an agent --------------------------------------------------------------------------------
    def init(self, key: Array) -> ReplayState:
        row = experience(
            blank(self.observation_size, self.num_actions, self.dtype, self.continuous),
            self.bootstraps,
        )
        return ReplayState(
            self.start(key),
            ring.empty(row, self.capacity),
            nets.no_statistics(self.observation_size, self.dtype) if self.normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(
        self, state: ReplayState, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        usable = usable_actions(available, self.num_actions)
        x = schedule.network_input(state.statistics, observation, self.observation_size, self.dtype)
        return self.choose(state.learner, x, usable, state.rounds, key)

    def update(
        self, state: ReplayState, transitions: Transition, key: Array
    ) -> tuple[ReplayState, schedule.Losses]:
        clean = self.learnable(transitions)
        statistics = schedule.update_statistics(state.statistics, clean)
        replay = ring.add(state.replay, experience(clean, self.bootstraps), clean.mask)
        rows = schedule.scaled(
            ring.sample(replay, key, (self.gradient_steps, self.batch)), statistics
        )
        ready = clean.mask.any() & (replay.size >= self.batch) & self.due(state.rounds + 1)
        go = lambda old: schedule.many_steps(self.step, self.measured(old, rows), rows)
        learner, values = schedule.when(ready, go, state.learner)
        minibatch, stored = (
            jax.tree.map(lambda x: x[0], rows),
            jnp.broadcast_to(replay.size > 0, (self.batch,)),
        )
        values |= self.report(learner, minibatch, stored, state.rounds)
        x, usable = schedule.scaled(clean, statistics).observation, clean.info.available
        chosen, free = (
            self.policy(learner, x, a, state.rounds) for a in (usable, jnp.ones_like(usable))
        )
        values |= {"sensitivity": diagnostics.sensitivity(free, clean.mask)}
        if not self.continuous:
            values |= {"entropy": diagnostics.entropy(chosen, usable, clean.mask)}
        return ReplayState(learner, replay, statistics, state.rounds + 1), finite(values)
