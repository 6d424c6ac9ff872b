"""Figures of several runs in one table, per seed and as mean and standard deviation: rows, Markdown
and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.metrics.base import on_rows
from fedjax_sim.report import style
from fedjax_sim.report.groups import Group, spread


class Column(NamedTuple):
    """One figure of the summary in a table."""

    key: str
    title: str
    better: int  # 1: the largest is best, -1: the smallest
    kind: str  # percent, number, bytes, seconds, rounds


COLUMNS = (  # percent: of the primary metric, whose name replaces {}
    Column("best_global", "best", 1, "percent"),
    Column("best_by_val", "by val", 1, "percent"),
    Column("last_global", "last", 1, "percent"),
    Column("mean_last10", "mean last 10", 1, "percent"),
    Column("client_{}_mean", "client mean", 1, "percent"),
    Column("client_{}_pooled", "pooled", 1, "percent"),
    Column("client_{}_worst10", "worst 10 %", 1, "percent"),
    Column("bytes_down", "down", -1, "bytes"),
    Column("bytes_up", "up", -1, "bytes"),
    Column("seconds_per_round", "s/round", -1, "seconds"),
)
NOT_FIGURES = ("seed", "data_seed")
MOST_SPLITS = 2  # splits named in the head of a table


class Cell(NamedTuple):
    mean: float
    std: float  # 0 for one value
    n: int


def figures_of(summary: dict[str, Any]) -> dict[str, float]:
    """Every number of a summary; a table inside it becomes rounds_to.50 and so on.

    >>> figures_of(
    ...     {
    ...         "seed": 1,
    ...         "method": "a",
    ...         "best_global": 0.5,
    ...         "rounds_to": {"50": 3, "60": None},
    ...         "ok": True,
    ...     }
    ... )
    {'best_global': 0.5, 'rounds_to.50': 3.0}
    """
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        inside = isinstance(value, dict)
        flat |= {f"{key}.{k}": v for k, v in value.items()} if inside else {key: value}
    number = lambda v: isinstance(v, (int, float)) and not isinstance(v, bool)
    return {k: float(v) for k, v in flat.items() if number(v) and k not in NOT_FIGURES}


def statistics(group: Group) -> dict[str, Cell]:
    """Mean, standard deviation (n - 1) and number of every figure over the seeds that have it."""
    per_seed = [figures_of(run.summary) for run in group.runs]
    out = {}
    for name in dict.fromkeys(n for figures in per_seed for n in figures):
        values = np.array([f[name] for f in per_seed if name in f and math.isfinite(f[name])])
        if len(values):
            out[name] = Cell(float(values.mean()), float(spread(values)), len(values))
    return out


def shown_columns(groups: Sequence[Group]) -> list[Column]:
    """The columns with values, and the rounds to each accuracy that was reached."""
    from fedjax_sim.report.costs import reached

    known = {name for g in groups for name in statistics(g)}
    abouts = {n: about for g in groups for run in g.runs for n, about in run.others.items()}
    others = [
        Column(f"metrics.{n}", n.replace("_", " "), about.better, about.unit)
        for n, about in abouts.items()
        if about.tabled and n.startswith(("global_", "client_"))
    ]
    primary = groups[0].runs[0].primary
    read = lambda c: c._replace(
        key=c.key.format(primary.figure), better=primary.better, kind=primary.unit
    )
    always = [read(c) if c.kind == "percent" else c for c in COLUMNS]
    goals = [Column(f"rounds_to.{x}", f"rounds to {x} %", -1, "rounds") for x in reached(groups)]
    return [c for c in (*always, *others, *goals) if c.key in known]


def best_of(groups: Sequence[Group], column: Column, scene: str) -> float | None:
    """The best mean among the groups of a scene that have ended; None if all means are equal."""
    ended = [g for g in groups if g.scene == scene and g.ended]
    means = [s[column.key].mean for g in ended if column.key in (s := statistics(g))]
    return column.better * max(column.better * m for m in means) if len(set(means)) > 1 else None


def scale_of(groups: Sequence[Group], column: Column) -> tuple[str, float, int]:
    """(unit, divisor, digits) of a column."""
    if column.kind == "bytes":
        largest = [s[column.key].mean for g in groups if column.key in (s := statistics(g))]
        return *style.unit(largest, style.BYTES), 2
    return {
        "percent": ("%", 0.01, 2),
        "number": ("", 1.0, 4),
        "seconds": ("s", 1.0, 3),
        "rounds": ("", 1.0, 1),
    }[column.kind]


NOTHING = "–"  # no such figure, e.g. of a method without a global model
NEVER = "×"  # measured, but never reached


def missing(group: Group, column: Column) -> str:
    """The sign for a cell without a number."""
    measured = any(run.summary.get("targets_of", True) for run in group.runs)
    return NEVER if column.kind == "rounds" and measured else NOTHING


def number(cell: Cell, scale: float, digits: int, seeds: int) -> str:
    """A cell as text, with the number of seeds if some have no value.

    >>> number(Cell(0.5, 0.01, 3), 0.01, 2, 3), number(Cell(7, 0, 2), 1, 1, 3)
    ('50.00 ± 1.00', '7.0 (2 of 3)')
    """
    text = f"{cell.mean / scale:.{digits}f}"
    if cell.std:
        text += f" ± {cell.std / scale:.{digits}f}"
    return text + (f" ({cell.n} of {seeds})" if cell.n < seeds else "")


def written(groups: Sequence[Group], bold: str) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of text; bold: a format string for the best values."""
    columns = shown_columns(groups)
    several = len({g.scene for g in groups}) > 1
    units = {c.key: scale_of(groups, c) for c in columns}
    runs = [run for g in groups for run in g.runs]
    splits = list(dict.fromkeys(on_rows(run.resolved, short=True) for run in runs))
    rows_of_clients = [text for text in splits if text] if len(splits) <= MOST_SPLITS else []

    def title(c: Column) -> str:
        notes = [units[c.key][0]] if units[c.key][0] and c.kind in ("percent", "bytes") else []
        if c.key.startswith("client_") and rows_of_clients:
            notes.append(f"{' or '.join(rows_of_clients)} rows")
        return f"{c.title} ({'; '.join(notes)})" if notes else c.title

    head = ["method", *(["setting"] if several else []), "seeds", *map(title, columns)]
    rows = []
    for g in groups:
        name = g.label if g.ended else f"{g.label} (not ended)"
        cells, row = statistics(g), [name, *([g.scene] if several else []), str(len(g.runs))]
        for c in columns:
            _, scale, digits = units[c.key]
            if c.key not in cells:
                row.append(missing(g, c))
                continue
            text = number(cells[c.key], scale, digits, len(g.runs))
            best = g.ended and cells[c.key].mean == best_of(groups, c, g.scene)
            row.append(bold.format(text) if best else text)
        rows.append(row)
    return head, rows


def markdown_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table of cells, the head first."""
    escape = lambda text: text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    line = lambda cells: "| " + " | ".join(map(escape, cells)) + " |"
    return [line(rows[0]), "|---|" + "---:|" * (len(rows[0]) - 1), *map(line, rows[1:])]


def markdown(groups: Sequence[Group]) -> str:
    head, rows = written(groups, "**{}**")
    return "\n".join(markdown_lines([head, *rows])) + "\n"


TEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "×": r"$\times$",
    "–": "--",
    "·": r"$\cdot$",
}


def latex(groups: Sequence[Group]) -> str:
    """A LaTeX tabular that needs \\usepackage{booktabs}."""
    escape = lambda text: "".join(TEX.get(c, c) for c in text)
    head, rows = written(groups, "★{}")
    signs = lambda text: escape(text).replace("±", r"$\pm$")
    cell = lambda text: f"\\textbf{{{signs(text[1:])}}}" if text.startswith("★") else signs(text)
    line = lambda cells: " & ".join(map(cell, cells)) + r" \\"
    width = "l" * (2 if "setting" in head else 1)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{width}{'r' * (len(head) - len(width))}}}",
            r"\toprule",
            line(head),
            r"\midrule",
            *map(line, rows),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def rows_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Rows of a tidy table: for every group one per seed, then mean, std and n."""
    out: list[dict[str, Any]] = []
    for g in groups:
        base = dict(method=g.label, setting=g.scene)
        for run in g.runs:
            which = dict(seed=run.config.get("seed", 0), run=run.path.name)
            out.append(base | which | figures_of(run.summary))
        cells = statistics(g)
        for name in ("mean", "std", "n"):
            values = {key: getattr(cell, name) for key, cell in cells.items()}
            out.append(base | dict(seed=name, run="") | values)
    return out
