"""Classes by name, each imported when it is first asked for: the command line lists names without
waiting for JAX."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedjax_sim.errors import lookup

T = TypeVar("T", bound=Callable[..., Any])


def first_sentence(thing: object) -> str:
    """The first line of a docstring: what stands beside a name that a user registers."""
    return (thing.__doc__ or "").strip().split("\n")[0]


class Named:
    """A table name -> ("module.Class" or "Class" of the module NAME, one line) of a package, and
    what `register` adds to it."""

    def __init__(self, what: str, package: str, table: Mapping[str, tuple[str, str]]):
        self.what, self.package = what, package
        self.lines = {name: line for name, (_, line) in table.items()}
        split = {name: place.rpartition(".") for name, (place, _) in table.items()}
        self.places = {name: (module or name, kind) for name, (module, _, kind) in split.items()}
        self.modules = {kind: module for module, kind in self.places.values()}  # class -> module
        self.given: dict[str, type] = {}  # what `register` saw

    def register(self, name: str, description: str) -> Callable[[T], T]:
        """A decorator: this class has this name."""

        def known(kind: T) -> T:
            kind.name = name  # type: ignore[attr-defined]
            self.given[name] = kind  # type: ignore[assignment]
            self.lines.setdefault(name, description or first_sentence(kind))
            return kind

        return known

    def kind(self, name: str) -> Any:
        """The class called `name`; one of the table before one that was registered."""
        if name not in self.places:
            return lookup(self.what, name, {**self.given, **dict.fromkeys(self.places)})
        module, kind = self.places[name]
        return getattr(importlib.import_module(f"{self.package}.{module}"), kind)
