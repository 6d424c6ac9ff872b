"""Reinforcement-learning controllers in pure JAX: arrays in, arrays out, nothing federated.

An agent is a record of three pure functions, `init`, `act` and `update` (see `agents.types.Agent`).

>>> import agents
>>> sorted(agents.DESCRIPTIONS)
['a2c', 'ddpg', 'dqn', 'fixed', 'ppo', 'q_bandit', 'random', 'sac', 'trpo']
>>> agents.make("sac", observation_size=4, num_actions=3, lr=1e-3).name
'sac'

Importing this package is cheap: JAX and the libraries on top of it are imported on the first use of a name
that needs them, so a command line can list the agents without paying for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agents.registry import CONTINUOUS, DESCRIPTIONS, DISCRETE, LEARNERS, NAMES, make, register

if TYPE_CHECKING:
    from agents.types import Agent, Info, Transition, join_action, split_action

_LAZY = ("Agent", "Info", "Transition", "join_action", "split_action")

__all__ = [
    "CONTINUOUS",
    "DESCRIPTIONS",
    "DISCRETE",
    "LEARNERS",
    "NAMES",
    "Agent",
    "Info",
    "Transition",
    "join_action",
    "make",
    "register",
    "split_action",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module("agents.types"), name)
    raise AttributeError(f"module 'agents' has no attribute {name!r}")
