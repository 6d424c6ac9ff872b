"""From a name and command-line options to an agent of `agents/`, for methods that are steered by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agents import registry
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.options import convert, like, real, shown


def check_agent(owner: str, name: str, allowed: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse an unknown agent or option before anything is built; names in `allowed` may be aliases without options."""
    allowed = list(allowed)
    if name not in allowed:
        raise unknown(f"agent of {owner}", shown(str(name)), allowed)
    known = [k for k in registry.options(name) if k != "dtype"] if name in registry.NAMES else []
    for option in options:
        if option not in known:
            raise unknown(f"option of agent '{name}'", shown(option), known or ["(none)"])


def learns(name: str) -> bool:
    """Whether the agent called `name` learns; one of your own is taken to."""
    return name not in registry.ENTRIES or registry.ENTRIES[name].learns


def agent_value(agent: str, option: str, text: Any, default: Any) -> Any:
    """A command-line string as what the agent's option takes; layers are written 64x64.

    >>> agent_value("sac", "hidden", "64x32", (64,)), agent_value("sac", "lr", "0.01", 0.05)
    ((64, 32), 0.01)
    """
    if default is None and isinstance(text, str):  # a number that the agent chooses by itself otherwise
        return convert(f"agent.{option}", text, real, f"; {agent} chooses it unless it is given")
    return like(f"agent.{option}", text, default)


def make_agent(
    name: str, observation_size: int, num_actions: int, options: Mapping[str, Any], defaults: Mapping[str, Any], dtype: Any
) -> Any:
    """The agent called `name`: its own defaults, then the method's `defaults` that it knows, then the user's `options`.

    >>> import jax.numpy as jnp
    >>> make_agent("sac", 4, 3, {"lr": "0.01"}, {"horizon": 50}, jnp.float32).name      # SAC has no horizon
    'sac'
    """
    known = registry.options(name)
    values = {k: v for k, v in defaults.items() if k in known}
    values |= {k: agent_value(name, k, v, known[k]) for k, v in options.items()}
    try:
        return registry.make(name, observation_size, num_actions, **values, dtype=dtype)
    except ValueError as problem:
        raise UserError(f"agent '{name}': {problem}") from None
