"""Spec strings: `name`, `name:value`, `name:key=value,key=value` for partitions and datasets.

Numbers are plain ASCII decimals, finite and of sane size: what Python's own `int` and `float` also
take ('²', '1_000', 'nan', 'inf', '1e400', a thousand digits) is refused, because no option means
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.options import LARGEST, REAL, WHOLE, WORDS

Converter = Callable[[str], Any]


def split_spec(text: str) -> tuple[str, str]:
    """The name and what follows its first colon.

    >>> split_spec("dirichlet:alpha=0.1")
    ('dirichlet', 'alpha=0.1')
    """
    name, _, rest = str(text).partition(":")
    return name.strip(), rest.strip()


def shown(text: object, most: int = 80) -> str:
    """Text for an error message: one line, not too long; the end of a path says which file
    it is.

    >>> shown("two\\nlines"), shown("data/" + "x" * 300 + "/a.png", most=16)
    ('two\\\\nlines', 'data/xx.../a.png')
    """
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    if len(line) <= most:
        return line
    head = (most - 3) // 2 + (most - 3) % 2
    return f"{line[:head]}...{line[len(line) - (most - 3 - head) :]}"


def parse_options(
    text: str, body: str, allowed: Mapping[str, Converter], positional: str | None
) -> dict[str, Any]:
    """The options in `body`, converted; a first item without `=` is the option named `positional`.

    >>> parse_options("shards:2", "2", {"s": whole}, "s")
    {'s': 2}
    """
    options: dict[str, Any] = {}
    for position, item in enumerate(part.strip() for part in body.split(",") if part.strip()):
        key, equals, value = item.partition("=")
        if not equals:
            if position > 0 or positional is None:
                raise UserError(
                    f"'{shown(item)}' in '{shown(text)}' is not key=value; allowed keys:"
                    f" {', '.join(allowed) or 'none'}"
                )
            key, value = positional, item
        key = key.strip()
        if key not in allowed:
            raise unknown(f"option in '{shown(text)}'", shown(key), allowed)
        if key in options:
            raise UserError(f"'{shown(text)}' gives {key} twice")
        options[key] = convert(text, key, value.strip(), allowed[key])
    return options


def convert(text: str, key: str, value: str, converter: Converter) -> Any:
    try:
        return converter(value)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"'{shown(value)}' is not a valid {key} in '{shown(text)}': {error}"
        ) from None


def whole(value: str) -> int:
    """A whole number of at most 63 bits, in plain digits.

    >>> whole("-12")
    -12
    >>> whole("²")
    Traceback (most recent call last):
    ValueError: write a whole number in plain digits
    """
    if not WHOLE.fullmatch(value):
        raise ValueError("write a whole number in plain digits")
    if abs(int(value)) > LARGEST:
        raise ValueError("it must be at most 2^63 - 1")
    return int(value)


def real(value: str) -> float:
    """A finite decimal number.

    >>> real("1e-3"), real(".5")
    (0.001, 0.5)
    """
    if not REAL.fullmatch(value) or not math.isfinite(float(value)):
        raise ValueError("write a finite number in plain digits")
    return float(value)


def natural(value: str) -> int:
    number = whole(value)
    if number < 0:
        raise ValueError("it must be at least 0")
    return number


def positive_int(value: str) -> int:
    number = whole(value)
    if number < 1:
        raise ValueError("it must be at least 1")
    return number


def positive_float(value: str) -> float:
    if not REAL.fullmatch(value) or not 0 < float(value) < math.inf:
        raise ValueError("it must be a finite number above 0")
    return float(value)


def fraction(value: str) -> float:
    number = real(value)
    if not 0 <= number < 1:
        raise ValueError("it must be at least 0 and below 1")
    return number


def boolean(value: str) -> bool:
    if value.lower() not in WORDS:
        raise ValueError("write true or false")
    return WORDS[value.lower()]


def mix(value: str) -> tuple[int, ...]:
    parts = tuple(whole(part.strip()) for part in value.split("/"))
    if min(parts) < 0 or sum(parts) == 0 or max(parts) > 1_000_000:
        raise ValueError("write shares like 40/40/20")
    return parts


def image_shape(value: str) -> tuple[int, int, int]:
    parts = tuple(whole(part.strip()) for part in value.lower().split("x"))
    if len(parts) == 2:
        parts = (*parts, 1)
    if len(parts) != 3 or min(parts) < 1:
        raise ValueError("write a shape like 32x32x3")
    return parts[0], parts[1], parts[2]


def text(value: str) -> str:
    """Any text that is not empty."""
    if not value:
        raise ValueError("write a name")
    return value


def check_whole(what: str, value: object, least: int = 0) -> int:
    """A whole number given from Python, or one sentence.

    >>> check_whole("clients", 3, 1)
    3
    """
    try:
        number = value.__index__() if not isinstance(value, bool) else None  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        number = None
    if number is None or not least <= number <= LARGEST:
        raise UserError(
            f"{what} must be a whole number, at least {least} and below 2^63, got"
            f" {shown(repr(value))}"
        )
    return number
