"""From a name and command-line options to an agent of `agents/`, for methods that are steered by
one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from agents import registry
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.fields import Node
from fedjax_sim.hooks import Controlled
from fedjax_sim.options import convert, like, real, shown
from fedjax_sim.types import Env


class Named(NamedTuple):
    """An agent as the command line has it: a name, and options as text."""

    name: str
    options: Mapping[str, Any]


class Steered(Controlled):
    """A method whose field `agent` is an agent of `agents/`, its name, or the name of a policy
    without one.

    A name becomes an agent with the method's own defaults; None in one of its fields is filled in
    for the run at hand. An agent given as an object is taken as it is.
    """

    name: ClassVar[str]
    agent: ClassVar[Any]  # a field in methods where it can be chosen

    def agents_allowed(self) -> Iterable[str]:
        """Names of agents and of policies."""
        raise NotImplementedError

    def agent_defaults(self, name: str) -> dict[str, Any]:
        """Hyper-parameters that this method sets otherwise than the agent itself; None: known with
        the run."""
        return {}

    @classmethod
    def steered_by(cls, of_agent: Mapping[str, Any], **options: Any) -> Any:
        """The method with options of its agent; they may be text."""
        known: Any = {one.name: one.default for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{**options, "agent": Named(options.get("agent", known["agent"]), of_agent)})  # type: ignore[call-arg]

    def resolve_agent(self, fallback: str) -> None:
        """Make the field `agent` an agent, or the name of a policy without one; fallback: what
        'auto' is."""
        given = self.agent if isinstance(self.agent, Named) else Named(self.agent, {})
        allowed = list(self.agents_allowed())
        if not isinstance(given.name, str):
            if getattr(given.name, "name", None) not in allowed:
                raise unknown(
                    f"agent of {self.name}",
                    shown(getattr(given.name, "name", repr(given.name))),
                    allowed,
                )
            object.__setattr__(self, "agent", given.name)
            return
        name = fallback if given.name == "auto" else given.name
        if name not in allowed:
            raise unknown(f"agent of {self.name}", shown(name), allowed)
        object.__setattr__(
            self, "agent", make_agent(name, given.options, self.agent_defaults(name))
        )

    @property
    def agent_name(self) -> str:
        return self.agent if isinstance(self.agent, str) else self.agent.name

    def for_run(self, observation_size: int, num_actions: int, env: Env, **found: Any) -> Any:
        """The agent, sized; found: values for those of its fields that are None."""
        known = {
            k: v
            for k, v in found.items()
            if hasattr(self.agent, k) and getattr(self.agent, k) is None
        }
        try:
            agent = dataclasses.replace(self.agent, **known)
            return agent.sized(observation_size, num_actions, env.dtype)
        except ValueError as problem:
            raise UserError(f"agent '{self.agent_name}': {problem}") from None

    def agent_in(self) -> dict[str, Any]:
        """The options that name this method's agent."""
        kind: Any = type(self)
        if self.agent == kind().agent:
            return {}
        named = {"agent": self.agent_name}
        if isinstance(self.agent, str):
            return named
        usual = make_agent(self.agent_name, {}, self.agent_defaults(self.agent_name))
        differ = {
            k: v
            for k in registry.options(self.agent_name)
            if (v := getattr(self.agent, k)) != getattr(usual, k)
        }
        return named | {f"agent.{k}": v for k, v in differ.items()}


def make_agent(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Node | str:
    """The agent called `name`: its own defaults, then the method's `defaults` that it knows, then
    the user's `options`.

    A name that is no agent's is a policy without one: the name itself.

    >>> make_agent("a2c", {"lr": "0.01"}, {"horizon": 50}).lr      # A2C has no horizon
    0.01
    """
    known = registry.options(name) if name in registry.NAMES else {}
    for option in options:
        if option not in known:
            raise unknown(f"option of agent '{name}'", shown(option), known or ["(none)"])
    if name not in registry.NAMES:
        return name
    values = {k: v for k, v in defaults.items() if k in known}
    values |= {k: agent_value(name, k, v, known[k]) for k, v in options.items()}
    try:
        return registry.kind(name)(**values)  # type: ignore[return-value]
    except ValueError as problem:
        raise UserError(f"agent '{name}': {problem}") from None


def agent_value(agent: str, option: str, text: Any, default: Any) -> Any:
    """A command-line string as what the agent's option takes; layers are written 64x64.

    >>> agent_value("sac", "hidden", "64x32", (64,)), agent_value("sac", "lr", "0.01", 0.05)
    ((64, 32), 0.01)
    """
    if default is None and isinstance(
        text, str
    ):  # a number that the agent chooses by itself otherwise
        return convert(f"agent.{option}", text, real, f"; {agent} chooses it unless it is given")
    return like(f"agent.{option}", text, default)


def learns(name: str) -> bool:
    """Whether the agent called `name` learns; one of your own is taken to."""
    return name not in registry.ENTRIES or registry.ENTRIES[name].learns
