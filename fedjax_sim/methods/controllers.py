"""From a name and command-line options to an agent of `agents/`, for methods that are steered by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agents import registry
from fedjax_sim.errors import UserError, unknown


def check_agent(owner: str, name: str, allowed: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse an unknown agent or option before anything is built; names in `allowed` may be aliases without options."""
    allowed = list(allowed)
    if name not in allowed:
        raise unknown(f"agent of {owner}", name, allowed)
    known = [k for k in registry.options(name) if k != "dtype"] if name in registry.NAMES else []
    for option in options:
        if option not in known:
            raise unknown(f"option of agent '{name}'", option, known or ["(none)"])


def agent_value(agent: str, option: str, text: Any, default: Any) -> Any:
    """A command-line string as what the agent's option takes; layers are written 64x64.

    >>> agent_value("sac", "hidden", "64x32", (64,)), agent_value("sac", "lr", "0.01", 0.05)
    ((64, 32), 0.01)
    """
    if not isinstance(text, str) or isinstance(default, str):
        return text
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if isinstance(default, tuple):
            return tuple(int(part) for part in text.split("x"))
        return int(text) if isinstance(default, int) else float(text)
    except (ValueError, KeyError):
        kind = "list of whole numbers such as 64x64" if isinstance(default, tuple) else type(default or 0.0).__name__
        raise UserError(f"agent.{option}={text} is not a {kind}; default of {agent}: {default}") from None


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
