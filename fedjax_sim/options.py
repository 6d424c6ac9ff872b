"""Text to value, once, for every option of the command line and of Python. Imports nothing heavy.

A converter takes text and returns a value, or raises ValueError with the end of a sentence ("not a
whole number"). `convert` makes the sentence. Numbers are plain ASCII decimals of sane size: what
Python's own `int` and `float` also take ('²', '1_000', 'nan', 'inf', '1e400', a thousand digits) is
refused, because no option means it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fedjax_sim.errors import UserError, unknown

T = TypeVar("T")
N = TypeVar("N", int, float)
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
LARGEST = 2**63 - 1  # of a whole number: what arrays and random generators take
LARGEST_REAL = 3e38  # of a number: what float32 holds
WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
REAL = re.compile(r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?")


def boolean(text: str) -> bool:
    """true, yes, 1 or false, no, 0.

    >>> boolean("Yes"), boolean("false")
    (True, False)
    """
    if text.strip().lower() not in WORDS:
        raise ValueError("not one of true, false")
    return WORDS[text.strip().lower()]


def whole(text: str) -> int:
    """A whole number of at most 63 bits, in plain digits.

    >>> whole("-12")
    -12
    >>> whole("²")
    Traceback (most recent call last):
    ValueError: not a whole number
    """
    if not WHOLE.fullmatch(text.strip()):
        raise ValueError("not a whole number")
    if abs(int(text)) > LARGEST:
        raise ValueError("too large; allowed: at most 2^63 - 1 in size")
    return int(text)


def real(text: str) -> float:
    """A finite decimal number that float32 can hold.

    >>> real("1e-3"), real(".5")
    (0.001, 0.5)
    >>> real("1e400")
    Traceback (most recent call last):
    ValueError: not a finite number
    """
    if not REAL.fullmatch(text.strip()) or not math.isfinite(float(text)):
        raise ValueError("not a finite number" if is_number_word(text) else "not a number")
    if abs(float(text)) > LARGEST_REAL:
        raise ValueError(f"too large; allowed: at most {LARGEST_REAL:g} in size")
    return float(text)


def is_number_word(text: str) -> bool:
    """Whether Python's `float` would take it: such text is meant as a number, even where it is
    refused."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def widths(text: str) -> tuple[int, ...]:
    """Whole numbers joined by x, such as the layers of a network.

    >>> widths("200x100")
    (200, 100)
    """
    try:
        return tuple(whole(part) for part in text.split("x"))
    except ValueError:
        raise ValueError("not a list of whole numbers joined by x, such as 64 or 200x100") from None


def names(text: str) -> tuple[str, ...]:
    """A comma list; empty items do not count.

    >>> names("global, personal,")
    ('global', 'personal')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def choice(kind: str, text: str, allowed: Iterable[str]) -> str:
    """`text` if it is one of `allowed`, else a sentence with the nearest match.

    >>> choice("norm", "pfllib", ("dataset", "pfllib", "none"))
    'pfllib'
    """
    allowed = list(allowed)
    if text not in allowed:
        raise unknown(kind, text, allowed)
    return text


def at_least(least: float, converter: Callable[[str], N]) -> Callable[[str], N]:
    """The same converter for numbers from `least` up.

    >>> at_least(1, whole)("0")
    Traceback (most recent call last):
    ValueError: too small; allowed: 1 or more
    """
    return within(converter, lambda v: v >= least, f"too small; allowed: {least:g} or more")


def at_most(most: float, converter: Callable[[str], N]) -> Callable[[str], N]:
    """The same converter for numbers up to `most`.

    >>> at_most(5, whole)("6")
    Traceback (most recent call last):
    ValueError: too large; allowed: 5 or less
    """
    return within(converter, lambda v: v <= most, f"too large; allowed: {most:.10g} or less")


def within(
    converter: Callable[[str], N], allows: Callable[[N], bool], problem: str
) -> Callable[[str], N]:
    def checked(text: str) -> N:
        value = converter(text)
        if not allows(value):
            raise ValueError(problem)
        return value

    return checked


def convert(what: str, text: str, converter: Callable[[str], T], more: str = "") -> T:
    """The value of `text`, or one sentence that names it. more: what the sentence adds, e.g. the
    default.

    >>> convert("epochs", "two", real)
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: epochs 'two' is not a number
    """
    try:
        return converter(text)
    except UserError:
        raise
    except ValueError as reason:
        raise UserError(f"{what} '{shown(text)}' is {reason}{more}") from None


def shown(text: str, most: int = 60) -> str:
    """Text for an error message: one line, not too long, nothing that a terminal would act
    on.

    >>> shown("9" * 100, 5), shown("two\\nlines")
    ('99999…', 'two\\\\nlines')
    """
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return line if len(line) <= most else line[:most] + "…"


def plain(text: str) -> Any:
    """A value of unknown type: true and false, a number, else the text itself.

    >>> plain("true"), plain("0.5"), plain("cifar")
    (True, 0.5, 'cifar')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return real(text) if is_number_word(text) else text


def like(what: str, value: Any, default: Any) -> Any:
    """`value`, text or not, as what `default` is: bool, int, float, or a tuple of ints (64x64).

    Where the default is text or None, or nothing is known about it, the value stays as it is.
    Numbers that are not text are checked as well, so that Python callers meet the same sentences,
    and 1 for a default of 0.5 becomes 1.0.

    >>> like("fedprox.mu", "0.1", 1.0), like("sac.hidden", "64x32", (64,)), like(
    ...     "fedprox.mu", 1, 0.5
    ... )
    (0.1, (64, 32), 1.0)
    >>> like("fedprox.mu", "big", 1.0)
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: fedprox.mu 'big' is not a number; default: 1.0
    """
    more = f"; default: {'x'.join(map(str, default)) if isinstance(default, tuple) else default}"
    if isinstance(default, bool):
        return convert(what, str(value), boolean, more)
    if isinstance(default, (int, float)) and isinstance(value, (str, int, float)):
        text = repr(float(value)) if isinstance(value, float) else str(value)
        if isinstance(default, float):
            return convert(what, text, real, more)
        if isinstance(value, float) and value.is_integer():
            text = str(int(value))
        return convert(what, text, whole, more)
    if (
        isinstance(default, tuple)
        and all(isinstance(n, int) for n in default)
        and isinstance(value, (str, int))
    ):
        return convert(what, str(value), widths, more)
    return value
