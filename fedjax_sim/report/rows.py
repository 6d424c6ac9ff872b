"""Rows of results: text in a console, a table in a notebook, a DataFrame if pandas is installed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from fedjax_sim.errors import UserError
from fedjax_sim.report.text import columns

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
