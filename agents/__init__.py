"""Reinforcement-learning controllers in pure JAX: arrays in, arrays out, nothing federated.

An agent is a frozen record of its hyper-parameters with three pure functions, `init`, `act` and
`update` (see `agents.types.Agent`). It is a pytree: real-valued hyper-parameters are leaves, so
they may be traced, mapped and swept.

>>> import agents
>>> sorted(agents.DESCRIPTIONS)
['a2c', 'ddpg', 'dqn', 'evolved', 'fixed', 'ppo', 'q_bandit', 'random', 'ridge_bandit',
 'sac', 'trpo']
>>> agents.make("a2c", observation_size=4, num_actions=3, lr=0.01) == agents.A2C(lr=0.01).sized(
...     4, 3
... )
True

Importing this package is cheap: JAX and the libraries on top of it are imported on the first use of
a name that needs them, so a command line can list the agents without paying for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agents.registry import (
    CONTINUOUS,
    DESCRIPTIONS,
    DISCRETE,
    ENTRIES,
    LEARNERS,
    NAMES,
    make,
    register,
)

if TYPE_CHECKING:
    from agents.a2c import A2C
    from agents.ddpg import DDPG
    from agents.dqn import DQN
    from agents.evolved import Evolved
    from agents.fixed import Fixed, Uniform
    from agents.ppo import PPO
    from agents.q_bandit import QBandit
    from agents.ridge_bandit import RidgeBandit
    from agents.sac import SAC
    from agents.trpo import TRPO
    from agents.types import Agent, Info, Transition, join_action, split_action

_LAZY = dict.fromkeys(("Agent", "Info", "Transition", "join_action", "split_action"), "types") | {
    entry.kind: entry.module for entry in ENTRIES.values()
}

__all__ = [
    "A2C",
    "CONTINUOUS",
    "DDPG",
    "DESCRIPTIONS",
    "DISCRETE",
    "DQN",
    "LEARNERS",
    "NAMES",
    "PPO",
    "SAC",
    "TRPO",
    "Agent",
    "Evolved",
    "Fixed",
    "Info",
    "QBandit",
    "RidgeBandit",
    "Transition",
    "Uniform",
    "join_action",
    "make",
    "register",
    "split_action",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"agents.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'agents' has no attribute {name!r}")
