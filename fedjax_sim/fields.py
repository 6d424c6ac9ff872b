"""Methods, optimisers and schedules as records: `Node`, `field` and `Real` of `agents.node`, with
the sentences of this package. Values may be text, as the command line gives them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, dataclass_transform

from agents.node import Limits, Real, allowed_range, field, is_real, limits_of
from agents.node import Node as Base
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.options import convert, like, real, shown

MOST_EPOCHS = 1e6


def epochs(default: float, help: str = "") -> Any:
    """A field that counts epochs: they size the tables of shuffles, so another value is another
    program."""
    return field(default, ge=0, le=MOST_EPOCHS, help=help)


@dataclass_transform(frozen_default=True)
class Node(Base):
    """A frozen dataclass that is a pytree; see `agents.node`. What is wrong with a value is said in
    one sentence."""

    def _read(self, one: dataclasses.Field, value: Any) -> Any:
        limits, what = limits_of(one), f"{self.name}.{one.name}"
        value = tuple(value) if isinstance(value, list) else value
        if isinstance(value, (str, int, float)):
            if limits.words and value not in limits.words:
                value = convert(
                    what,
                    repr(value) if isinstance(value, float) else str(value),
                    real,
                    word_or(limits),
                )
            elif not limits.words:
                value = like(what, value, one.default)
        if isinstance(value, (int, float)) and not limits.allow(value):
            raise self._outside(one.name, value, limits)
        if limits.choices and not isinstance(value, Base) and value not in limits.choices:
            raise unknown(f"{one.name} of {self.name}", shown(str(value)), limits.choices)
        return value

    def _outside(self, name: str, value: Any, limits: Limits) -> ValueError:
        number = f"{value:g}" if isinstance(value, float) else value
        return UserError(
            f"{self.name}.{name}={number} is not allowed; use"
            f" {allowed_range(limits)}{word_or(limits, ', ')}"
        )


def word_or(limits: Limits, before: str = "; allowed: a number, ") -> str:
    return f"{before}or {', '.join(limits.words)}" if limits.words else ""


__all__ = ["Node", "Real", "epochs", "field", "is_real", "limits_of"]
