"""Results in a notebook: rows as a table, curves as a picture."""

from __future__ import annotations

import contextlib
import html
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.report import curves
from fedjax_sim.report.groups import grouped
from fedjax_sim.report.runs import Run, Table
from fedjax_sim.report.style import load_matplotlib
from fedjax_sim.report.text import columns

if TYPE_CHECKING:
    from fedjax_sim.runner.result import Result

MOST = 40  # rows shown


def cell(value: Any) -> str:
    """A value as text, floats with four digits.

    >>> cell(0.123456), cell(None), cell(3)
    ('0.1235', '', '3')
    """
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def as_html(cells: Sequence[Sequence[str]]) -> str:
    """Cells as an HTML table; the first row is the head.

    >>> as_html([["a"], ["<1"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1</td></tr></tbody></table>'
    """
    line = lambda row, tag: "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row)
    head, *rows = cells
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


class Rows(list):
    """A list of dicts, one per row.

    >>> Rows([{"round": 1, "global_acc": 0.5}, {"round": 2, "global_acc": 0.61234567}])
    round  global_acc
    -----  ----------
    1             0.5
    2          0.6123
    >>> Rows([{"a": 1}])[0]["a"]
    1
    """

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self for name in row))

    def cells(self) -> list[list[str]]:
        """Text, the head first; of many rows only the first and the last."""
        half = MOST // 2
        rows: Sequence[Any] = self if len(self) <= MOST else [*self[:half], {}, *self[-half:]]
        text = lambda row: (
            [cell(row.get(name)) for name in self.names()] if row else ["…"] * len(self.names())
        )
        return [self.names(), *map(text, rows)]

    def __repr__(self) -> str:
        return columns(self.cells()) if self else "no rows"

    def _repr_html_(self) -> str:
        return as_html(self.cells())

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a column per name."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas; install it with: pip install pandas") from None
        return pandas.DataFrame(list(self), columns=self.names())


# ---- curves of results in memory, drawn like those of run directories ----------------------------
AGAINST = ("rounds", "bytes")


class Picture:
    """A figure that a notebook shows. `files`: the files it was written to, if any."""

    def __init__(self, png: bytes, files: Sequence[pathlib.Path] = ()):
        self.png, self.files = png, list(files)

    def __repr__(self) -> str:
        return f"Picture({', '.join(map(str, self.files)) or f'{len(self.png)} bytes of PNG'})"

    def _repr_png_(self) -> bytes:
        return self.png


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    number = lambda value: float(value) if isinstance(value, (int, float)) else np.nan
    return {name: np.array([number(row.get(name)) for row in rows]) for name in names}


def as_run(result: Result) -> Run:
    """A Result as `report` reads a run directory."""
    path = result.out or pathlib.Path(result.summary["method"])
    rounds, rows = as_table(result.rounds), as_table(result.rows)
    return Run(path, result.setup.experiment.flat(), rounds, rows, {}, result.summary)


@contextlib.contextmanager
def isolated_drawing() -> Iterator[None]:
    """Restore the caller's matplotlib backend and style afterwards."""
    matplotlib = load_matplotlib()
    backend = matplotlib.get_backend()
    with matplotlib.rc_context():
        yield
    matplotlib.use(backend)


def picture(
    results: Sequence[Result], path: str | pathlib.Path | None = None, against: str = "rounds"
) -> Picture:
    """Draw the accuracy of results against rounds or bytes, seeds of one method together. path:
    also write it there, as PNG and PDF."""
    lookup("axis", against, dict.fromkeys(AGAINST))
    groups = grouped([as_run(result) for result in results])
    if not curves.measured(groups):
        raise UserError("there is no accuracy to draw: the run has no evaluated round")
    with isolated_drawing(), tempfile.TemporaryDirectory() as folder:
        target = (
            pathlib.Path(folder) / "curves" if path is None else pathlib.Path(path).with_suffix("")
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        files = curves.accuracy(groups, target, against)
        png = next(file for file in files if file.suffix == ".png").read_bytes()
    return Picture(png, () if path is None else files)
