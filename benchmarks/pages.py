"""Parts that several result pages share: 95 % intervals, and tables between the marks of a page."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.runner.figures import half_width


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """(mean, half of the 95 % interval by Student's t) of paired differences; one difference alone
    has an infinite interval.

    >>> tuple(round(value, 2) for value in interval([1.0, 0.5, 1.5]))
    (1.0, 1.24)
    """
    half = half_width(differences) if len(differences) > 1 else float("inf")
    return float(np.mean(differences)), half


def marks(name: str) -> tuple[str, str]:
    """The lines between which `write_tables` writes."""
    return f"<!-- tables of {name}: begin -->", f"<!-- tables of {name}: end -->"


def write_tables(path: pathlib.Path, name: str, title: str, lines: Iterable[str]) -> None:
    """Replace the lines between the marks of a page and keep the hand-written text around them. A
    page that does not exist yet gets the title and the marks."""
    begin, end = marks(name)
    old = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n\n{begin}\n{end}\n"
    if begin not in old or end not in old:
        raise UserError(f"{path} has no lines '{begin}' and '{end}': the tables go between them")
    before, _, rest = old.partition(begin)
    after = rest.partition(end)[2]
    tables = "\n".join(lines).rstrip()
    text = f"{before.rstrip()}\n\n{begin}\n{tables}\n\n{end}{after}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
