"""Spec strings: `name`, `name:value`, `name:key=value,key=value` for partitions and datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedjax_sim.errors import UserError, unknown

Converter = Callable[[str], Any]


def split_spec(text: str) -> tuple[str, str]:
    """The name and what follows its first colon.

    >>> split_spec("dirichlet:alpha=0.1")
    ('dirichlet', 'alpha=0.1')
    """
    name, _, rest = str(text).partition(":")
    return name.strip(), rest.strip()


def parse_options(text: str, body: str, allowed: Mapping[str, Converter], positional: str | None) -> dict[str, Any]:
    """The options in `body`, converted; a first item without `=` is the option named `positional`.

    >>> parse_options("shards:2", "2", {"s": int}, "s")
    {'s': 2}
    """
    options: dict[str, Any] = {}
    for position, item in enumerate(part.strip() for part in body.split(",") if part.strip()):
        key, equals, value = item.partition("=")
        if not equals:
            if position > 0 or positional is None:
                raise UserError(f"'{item}' in '{text}' is not key=value; allowed keys: {', '.join(allowed) or 'none'}")
            key, value = positional, item
        key = key.strip()
        if key not in allowed:
            raise unknown(f"option in '{text}'", key, allowed)
        options[key] = convert(text, key, value.strip(), allowed[key])
    return options


def convert(text: str, key: str, value: str, converter: Converter) -> Any:
    try:
        return converter(value)
    except (ValueError, TypeError) as error:
        raise UserError(f"'{value}' is not a valid {key} in '{text}': {error}") from None


def positive_int(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError("it must be at least 1")
    return number


def positive_float(value: str) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError("it must be a finite number above 0")
    return number


def fraction(value: str) -> float:
    number = float(value)
    if not 0 <= number < 1:
        raise ValueError("it must be at least 0 and below 1")
    return number


def boolean(value: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if value.lower() not in words:
        raise ValueError("write true or false")
    return words[value.lower()]


def mix(value: str) -> tuple[int, ...]:
    parts = tuple(int(part) for part in value.split("/"))
    if not parts or min(parts) < 0 or sum(parts) == 0:
        raise ValueError("write shares like 40/40/20")
    return parts


def image_shape(value: str) -> tuple[int, int, int]:
    parts = tuple(int(part) for part in value.lower().split("x"))
    if len(parts) == 2:
        parts = (*parts, 1)
    if len(parts) != 3 or min(parts) < 1:
        raise ValueError("write a shape like 32x32x3")
    return parts[0], parts[1], parts[2]
