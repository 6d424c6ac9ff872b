"""Mistakes of the user, said in one sentence; the command line prints them without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """Bad input. The message names the offending value and the allowed ones, in one sentence."""


def unknown(kind: str, name: object, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not registered, with the nearest match.

    >>> print(unknown("loss", "fokal", ["ce", "focal"]))
    unknown loss 'fokal' (did you mean 'focal'?); allowed: ce, focal
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return UserError(f"unknown {kind} '{name}'{hint}; allowed: {', '.join(names)}")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`, or one clear sentence."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]
