"""Kinds of settings: from a given value (text of a command line or a file, or a Python value) to
the value itself. Nothing heavy is imported here.

A reader raises ValueError with the end of an error message about text ("not a whole number"), and
TypeError with the expected kind ("a number").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_sim import options

Pair = tuple[float, float]


class Kind(NamedTuple):
    """read: a given value -> the value; text: back to text, where JSON has no such value."""

    read: Callable[[Any], Any]
    text: Callable[[Any], Any] = lambda value: value


def _number(value: Any, what: str = "a number") -> str:
    """A number or text as text."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(what)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**63 else repr(float(value))
    return str(value)


def number_text(value: float) -> str:
    """A number as short text.

    >>> number_text(0.1), number_text(10), number_text(1.0)
    ('0.1', '10', '1')
    """
    return f"{value:.12g}"


WHOLE = Kind(lambda value: options.whole(_number(value)))
REAL = Kind(lambda value: options.real(_number(value)))


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError("text")
    return str(value)


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError("a path")
    return os.fspath(value)


def _switch(value: Any) -> bool:
    return value if isinstance(value, bool) else options.boolean(_number(value, "true or false"))


def _on_off(value: Any) -> bool:
    if isinstance(value, str) and value in ("on", "off"):
        return value == "on"
    if not isinstance(value, bool):
        raise ValueError("not one of on, off")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("a dict of options")
    return dict(value)


TEXT, PATH, SWITCH, OPTIONS = Kind(_text), Kind(_path), Kind(_switch), Kind(_dict)
ON_OFF = Kind(_on_off, lambda value: "on" if value else "off")


def items(what: str, *, several: bool = True, least: int = 0) -> Kind:
    """A tuple of names; text is a comma list of at least `least`, or one name if several is
    False."""

    def read(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = options.names(value) if several else (value,)
            if len(value) < least:
                raise TypeError(what)
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise TypeError(what)
        return tuple(value)

    return Kind(read, list)


def word_or(word: str, kind: Kind) -> Kind:
    """A value of a kind, or one fixed word.

    >>> word_or("full", WHOLE).read("2"), word_or("full", WHOLE).read("full")
    (2, 'full')
    """
    return Kind(lambda v: v if isinstance(v, str) and v == word else kind.read(v))


def _count_or_auto(value: Any) -> int | str:
    try:
        text = _number(value)
        return text if text == "auto" else options.at_least(1, options.whole)(text)
    except (ValueError, TypeError):
        raise ValueError("not allowed; use auto or a whole number of 1 or more") from None


COUNT_OR_AUTO = Kind(_count_or_auto)


def _ends(value: Any) -> list[str]:
    """The ends of a range: a number, text such as 5:20, or a pair."""
    several = value if isinstance(value, (list, tuple)) else str(_number(value)).split(":")
    return [_number(part) for part in several]


def _participation(value: Any) -> float | Pair | str:
    """A number of clients, a fraction, a pair of either, or text 'n/N'.

    >>> _participation("0.1"), _participation("10"), _participation("5:20"), _participation("3/6")
    (0.1, 10, (5, 20), '3/6')
    """
    if isinstance(value, str) and "/" in value:
        return value
    more = "; allowed: a fraction such as 0.1, a range such as 0.5:1, or n/N such as 10/50"
    try:
        numbers = [options.real(part) for part in _ends(value)]
    except ValueError as reason:
        raise ValueError(f"{reason}{more}") from None
    plain = [int(n) if n.is_integer() else n for n in numbers]
    if len(plain) > 2:
        raise ValueError(f"not a number or a range of two{more}")
    return plain[0] if len(plain) == 1 else (plain[0], plain[1])


def range_text(value: float | Pair | str) -> Any:
    """A range or a number as text.

    >>> range_text((5, 20)), range_text(0.5), range_text("3/6")
    ('5:20', '0.5', '3/6')
    """
    if isinstance(value, str):
        return value
    return ":".join(map(number_text, value if isinstance(value, (tuple, list)) else (value,)))


LEAST_SHARE = 0.1  # least share of a straggler's work, by default


def _stragglers(value: Any) -> Pair:
    """(probability, least share of the work).

    >>> _stragglers("0.3"), _stragglers((0.3, 0.2))
    ((0.3, 0.1), (0.3, 0.2))
    """
    try:
        chance, least, *more = *map(options.real, _ends(value)), LEAST_SHARE
        if more[1:] or not (0 <= chance <= 1 and 0 < least <= 1):
            raise ValueError
    except ValueError:
        raise ValueError(
            "not allowed; use p or p:least, e.g. 0.3:0.2 (30 % of the clients do between 20 % and"
            " all of their work)"
        ) from None
    return chance, least


PARTICIPATION = Kind(_participation, range_text)
STRAGGLERS = Kind(_stragglers, lambda pair: range_text(pair if pair[1] != LEAST_SHARE else pair[0]))


def _cohorts(value: Any) -> Any:
    """Ids of the participants, round by round; checked later against the data."""
    value = () if value is None else value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and all(isinstance(ids, (list, tuple)) for ids in value):
        return tuple(map(tuple, value))
    return value


COHORTS = Kind(_cohorts)
