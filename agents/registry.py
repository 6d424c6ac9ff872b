"""Agents by name. Nothing heavy is imported until an agent is made."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.types import Agent

# name -> (module, builder, one-line description)
_BUILDERS: dict[str, tuple[str, str, str]] = {
    "sac": ("agents.sac", "sac", "discrete soft actor-critic: twin critics, exact sums, tuned temperature"),
    "dqn": ("agents.dqn", "dqn", "double deep Q-learning: Huber loss, target copies, linear epsilon"),
    "a2c": ("agents.a2c", "a2c", "advantage actor-critic: one policy-gradient step per round"),
    "ppo": ("agents.ppo", "ppo", "proximal policy optimisation: clipped ratio, re-uses the last rounds"),
    "trpo": ("agents.trpo", "trpo", "trust region: natural gradient step inside a KL ball, with line search"),
    "ddpg": ("agents.ddpg", "ddpg", "deterministic actor-critic for continuous actions (simplex or box)"),
    "q_bandit": ("agents.q_bandit", "q_bandit", "epsilon-greedy neural contextual bandit, no bootstrap"),
    "random": ("agents.fixed", "random", "uniformly random action, learns nothing"),
    "fixed": ("agents.fixed", "constant", "always the same action (option `action`), learns nothing"),
}

NAMES: tuple[str, ...] = tuple(_BUILDERS)
DESCRIPTIONS: dict[str, str] = {name: text for name, (_, _, text) in _BUILDERS.items()}


def _unknown(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """One sentence that names the value, the nearest match and all allowed values."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (allowed: {', '.join(allowed)})")


def builder(name: str) -> Callable[..., Agent]:
    """The function that builds the agent called `name`."""
    if name not in _BUILDERS:
        raise _unknown("agent", name, NAMES)
    module, function, _ = _BUILDERS[name]
    return getattr(importlib.import_module(module), function)


def options(name: str) -> dict[str, Any]:
    """The hyper-parameters of the agent called `name` with their defaults.

    >>> options("a2c")["gamma"]
    0.99
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
