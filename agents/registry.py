"""Agents by name. Nothing heavy is imported until an agent is made."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from agents.types import Agent


class Entry(NamedTuple):
    """Where an agent is built, and what kind it is; there is no other list of agents."""

    module: str
    kind: str  # the class
    description: str
    discrete: bool = True  # its actions are indices; otherwise vectors
    learns: bool = True
    given: type[Agent] | None = None  # given by `register`, instead of module and kind


ENTRIES: dict[str, Entry] = {
    "sac": Entry(
        "sac", "SAC", "discrete soft actor-critic: twin critics, exact sums, tuned temperature"
    ),
    "dqn": Entry("dqn", "DQN", "double deep Q-learning: Huber loss, target copies, linear epsilon"),
    "a2c": Entry("a2c", "A2C", "advantage actor-critic: one policy-gradient step per round"),
    "ppo": Entry(
        "ppo", "PPO", "proximal policy optimisation: clipped ratio, re-uses the last rounds"
    ),
    "trpo": Entry(
        "trpo", "TRPO", "trust region: natural gradient step inside a KL ball, with line search"
    ),
    "ddpg": Entry(
        "ddpg",
        "DDPG",
        "deterministic actor-critic for continuous actions (simplex or box)",
        discrete=False,
    ),
    "q_bandit": Entry(
        "q_bandit", "QBandit", "epsilon-greedy neural contextual bandit, no bootstrap"
    ),
    "evolved": Entry(
        "evolved",
        "Evolved",
        "linear policy or small network that an evolution strategy found; acts, never learns",
        learns=False,
    ),
    "ridge_bandit": Entry(
        "ridge_bandit", "RidgeBandit", "linear bandit over a grid, closed form, sure of its gains"
    ),
    "random": Entry("fixed", "Uniform", "uniformly random action, learns nothing", learns=False),
    "fixed": Entry(
        "fixed", "Fixed", "always the same action (option `action`), learns nothing", learns=False
    ),
}


class Names(Sequence[str]):
    """The names of the agents of one kind, as of now: also those that were registered since."""

    def __init__(self, fits: Callable[[Entry], bool] = lambda entry: True):
        self._fits = fits

    def _now(self) -> tuple[str, ...]:
        return tuple(name for name, entry in ENTRIES.items() if self._fits(entry))

    def __getitem__(self, at: Any) -> Any:
        return self._now()[at]

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(self._now())


NAMES = Names()
DISCRETE = Names(lambda entry: entry.discrete)
CONTINUOUS = Names(lambda entry: not entry.discrete)
LEARNERS = Names(lambda entry: entry.learns)
DESCRIPTIONS: dict[str, str] = {name: entry.description for name, entry in ENTRIES.items()}


def register(
    name: str,
    kind: type[Agent],
    description: str = "",
    *,
    discrete: bool = True,
    learns: bool = True,
) -> None:
    """Make an agent of your own, a subclass of `Agent`, known by name.

    >>> from agents.fixed import Fixed
    >>> register("calm", Fixed, "never moves", learns=False)
    >>> make("calm", 4, 3).act, "calm" in DISCRETE, "calm" in LEARNERS         # doctest: +ELLIPSIS
    (<bound method Fixed.act of Fixed(action=0)>, True, False)
    >>> del ENTRIES["calm"], DESCRIPTIONS["calm"]
    """
    if kind.name == kind.__name__:  # the class has no name of its own
        kind.name = name
    text = description or (kind.__doc__ or "").strip().split("\n")[0]
    ENTRIES[name] = Entry("", "", text, discrete, learns, kind)
    DESCRIPTIONS[name] = text


def _unknown(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """One sentence that names the value, the nearest match and all allowed values."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (allowed: {', '.join(allowed)})")


def kind(name: str) -> type[Agent]:
    """The class of the agent called `name`."""
    if name not in ENTRIES:
        raise _unknown("agent", name, NAMES)
    entry = ENTRIES[name]
    return entry.given or getattr(importlib.import_module(f"agents.{entry.module}"), entry.kind)


def options(name: str) -> dict[str, Any]:
    """The hyper-parameters of the agent called `name` with their defaults.

    >>> options("a2c")["gamma"]
    0.9
    """
    sizes = ("observation_size", "num_actions", "dtype")
    return {
        one.name: one.default for one in dataclasses.fields(kind(name)) if one.name not in sizes
    }


def make(
    name: str, observation_size: int = 0, num_actions: int = 0, *, dtype: Any = None, **hyper: Any
) -> Agent:
    """The agent called `name`, sized if sizes are given; `num_actions` is the width of the action
    vector for `ddpg`.

    >>> make("q_bandit", 13, 36, hidden=(64, 64)).name
    'q_bandit'
    >>> make("sca", 13, 36)
    Traceback (most recent call last):
    ValueError: unknown agent 'sca'; did you mean 'sac'? (allowed: a2c, ddpg, dqn, evolved, ...)
    """
    agent, allowed = kind(name), options(name)
    for option in hyper:
        if option not in allowed:
            raise _unknown(f"option of agent {name!r}:", option, allowed)
    return agent(**hyper).sized(
        observation_size, num_actions, **({} if dtype is None else {"dtype": dtype})
    )
