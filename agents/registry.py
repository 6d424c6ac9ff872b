"""Agents by name. Nothing heavy is imported until an agent is made."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from agents.types import Agent


class Entry(NamedTuple):
    """Where an agent is built, and what kind it is: nobody else needs to keep lists of agents."""

    module: str
    builder: str
    description: str
    discrete: bool = True  # its actions are indices; otherwise vectors
    learns: bool = True


ENTRIES: dict[str, Entry] = {
    "sac": Entry("sac", "sac", "discrete soft actor-critic: twin critics, exact sums, tuned temperature"),
    "dqn": Entry("dqn", "dqn", "double deep Q-learning: Huber loss, target copies, linear epsilon"),
    "a2c": Entry("a2c", "a2c", "advantage actor-critic: one policy-gradient step per round"),
    "ppo": Entry("ppo", "ppo", "proximal policy optimisation: clipped ratio, re-uses the last rounds"),
    "trpo": Entry("trpo", "trpo", "trust region: natural gradient step inside a KL ball, with line search"),
    "ddpg": Entry("ddpg", "ddpg", "deterministic actor-critic for continuous actions (simplex or box)", discrete=False),
    "q_bandit": Entry("q_bandit", "q_bandit", "epsilon-greedy neural contextual bandit, no bootstrap"),
    "random": Entry("fixed", "random", "uniformly random action, learns nothing", learns=False),
    "fixed": Entry("fixed", "constant", "always the same action (option `action`), learns nothing", learns=False),
}

NAMES: tuple[str, ...] = tuple(ENTRIES)
DISCRETE: tuple[str, ...] = tuple(name for name, entry in ENTRIES.items() if entry.discrete)
CONTINUOUS: tuple[str, ...] = tuple(name for name, entry in ENTRIES.items() if not entry.discrete)
LEARNERS: tuple[str, ...] = tuple(name for name, entry in ENTRIES.items() if entry.learns)
DESCRIPTIONS: dict[str, str] = {name: entry.description for name, entry in ENTRIES.items()}


def _unknown(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """One sentence that names the value, the nearest match and all allowed values."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (allowed: {', '.join(allowed)})")


def builder(name: str) -> Callable[..., Agent]:
    """The function that builds the agent called `name`."""
    if name not in ENTRIES:
        raise _unknown("agent", name, NAMES)
    return getattr(importlib.import_module(f"agents.{ENTRIES[name].module}"), ENTRIES[name].builder)


def options(name: str) -> dict[str, Any]:
    """The hyper-parameters of the agent called `name` with their defaults.

    >>> options("a2c")["gamma"]
    0.9
    """
    parameters = inspect.signature(builder(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def make(name: str, observation_size: int, num_actions: int, **hyper: Any) -> Agent:
    """The agent called `name`; `num_actions` is the width of the action vector for `ddpg`.

    >>> make("q_bandit", 13, 36, hidden=(64, 64)).name
    'q_bandit'
    >>> make("sca", 13, 36)
    Traceback (most recent call last):
    ValueError: unknown agent 'sca'; did you mean 'sac'? (allowed: a2c, ddpg, dqn, fixed, ppo, q_bandit, ...)
    """
    build, allowed = builder(name), options(name)
    for option in hyper:
        if option not in allowed:
            raise _unknown(f"option of agent {name!r}:", option, allowed)
    return build(observation_size, num_actions, **hyper)
