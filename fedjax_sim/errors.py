"""Mistakes of the user, said in one sentence; the command line prints them without a traceback."""

from __future__ import annotations

import difflib
import lzma
import os
import zipfile
import zlib
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
    return UserError(f"unknown {kind} '{name}'{hint}; allowed: {', '.join(names) or 'none'}")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`, or one clear sentence."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, UnicodeError)
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


def expected(problem: BaseException) -> str | None:
    """The sentence for a failure that no program can rule out; None for a mistake of this one.

    >>> expected(OSError(28, "No space left on device", "runs/a/rounds.csv"))
    "'runs/a/rounds.csv': No space left on device"
    >>> expected(MemoryError())
    'there is not enough memory; use fewer clients, a smaller model, batch or chunk, or --state-on
    host'
    >>> expected(KeyError("a")) is None
    True
    """
    if isinstance(problem, UserError):
        return str(problem)
    if isinstance(problem, MemoryError) or any(
        word in first_line(problem) for word in OUT_OF_MEMORY
    ):
        return (
            "there is not enough memory; use fewer clients, a smaller model, batch or chunk, or"
            " --state-on host"
        )
    if isinstance(problem, OSError):
        reason = problem.strerror or first_line(problem) or type(problem).__name__
        known = isinstance(problem.filename, (str, bytes))
        return f"'{os.fsdecode(problem.filename)[:200]}': {reason}" if known else reason
    if isinstance(problem, DAMAGED):
        return f"a file cannot be read: {first_line(problem) or type(problem).__name__}"
    if isinstance(problem, RecursionError):
        return "the input is nested too deeply"
    return None


def first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [""])[0]
