"""The papers' tables and figures as data in the package: presets/papers/PAPER.toml.

title, about        of the paper
silent              what the paper does not say or what we do otherwise; below each of its tables
[settings]          of all of its runs. A run's settings are merged in this order, later ones
                    override: the preset, the paper, the table, the row, the column; then the
                    changes of the scale, in the same order; then `always`
[smoke] [small]     changes of these scales for all runs, `seeds` included
[before.NAME]       a run that others start from: "METHOD.start_from" = "@NAME" or
                    "@NAME:PART,PART"; a cell: "@row ID:…"; participation = "same": as many
                    participants as in the run that starts from it
[lines.ID]          a row or a column: label, method, preset, read, settings; smoke, small; always:
                    settings that no scale changes; read = "KIND:*": the column that its row reads
[tables.T2]         title, preset, read, seeds, settings
                    published: a block of text, columns above, rows in front (82.51±.38, × never
                    reached, – not given, ? lost; ^ab: footnotes a and b of `notes`); or, without
                    figures, rows and cols
                    rank = "cols": columns are compared, not rows
                    extra: more rows (or columns) that were not published, run when named
                    reference: the row (or column) that the others are compared with
[tables.F3]         the same with draw = ["accuracy"]: a figure

METHOD.OPTION is for that method only, whether it is an option of the method or of the run; ''
removes it. A name in `rows`, `cols` or the block is an ID, or ID+ID: both merged, the second
overrides.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.options import shown

SCALES = ("smoke", "small", "paper")
OF_A_LINE = ("label", "method", "preset", "read", "settings", "always", *SCALES[:2])
OPTIONAL = ("preset", "read", "seeds", "rank", "reference", "kind", "client", "about")
OF_A_TABLE = (
    *("title", "also", "published", "rows", "cols", "extra", "draw", "notes", "settings"),
    *OPTIONAL,
    *SCALES[:2],
)
OF_A_PAPER = ("title", "about", "silent", "settings", "before", "lines", "tables", *SCALES[:2])
KINDS = ("run", "profile")
CELL = re.compile(
    r"(?P<value>×|–|\?|α?Σ[^^]*|-?\d*\.?\d+)(±(?P<sd>\d*\.?\d+))?(\^(?P<marks>[a-z]+))?"
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A row, a column, or a run that others start from."""

    key: str
    label: str
    method: str = ""
    preset: str = ""
    read: str = ""
    figure: str = ""  # cells with the same one are ranked together: the reading, if not a method
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scales: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Line) -> Line:
        """Both lines merged; the second overrides."""
        return Line(
            f"{self.key}+{other.key}",
            ", ".join(filter(None, (self.label, other.label))),
            other.method or self.method,
            other.preset or self.preset,
            other.read or self.read,
            other.figure or self.figure,
            {**self.settings, **other.settings},
            {s: {**self.scales.get(s, {}), **other.scales.get(s, {})} for s in SCALES},
            {**self.always, **other.always},
        )


@dataclasses.dataclass(frozen=True)
class Published:
    """One figure as printed."""

    text: str
    value: float | None  # None: never reached, not given, or lost
    sd: float = 0.0
    marks: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    paper: str
    key: str
    title: str
    rows: tuple[Line, ...]
    cols: tuple[Line, ...]
    extra: tuple[Line, ...] = ()
    published: Mapping[tuple[str, str], Published] = dataclasses.field(default_factory=dict)
    preset: str = ""
    read: str = ""
    also: tuple[str, ...] = ()
    seeds: int = 1
    rank: str = "rows"  # whether rows or cols are compared
    reference: str = ""  # the line that the others are compared with, seed by seed
    kind: str = "run"
    draw: tuple[str, ...] = ()
    client: int = 0  # for figures of one client
    about: str = ""
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scales: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.paper}:{self.key}"

    def reading(self, row: Line, col: Line) -> str:
        """The reading of a cell's figure; * in a column's: the column of metrics of its row."""
        own = row.read or self.read
        return col.read.replace("*", own.rpartition(":")[2]) if col.read else own

    def chosen(self, rows: str = "", cols: str = "") -> tuple[tuple[Line, ...], tuple[Line, ...]]:
        """(rows, columns) in comma lists of names; '': all published ones, 'all': the extra ones
        too."""
        more = {"rows": (self.extra, ()), "cols": ((), self.extra)}[self.rank]
        chosen = pick("row", rows, self.rows, more[0], self)
        return chosen, pick("column", cols, self.cols, more[1], self)


def pick(
    what: str, text: str, lines: tuple[Line, ...], extra: tuple[Line, ...], table: Table
) -> tuple[Line, ...]:
    known = {line.key: line for line in (*lines, *extra)}
    if not text:
        return lines
    if text == "all":
        return tuple(known.values())
    names = [name.strip() for name in text.split(",") if name.strip()]
    return tuple(lookup(f"{what} of {table.name}", name, known) for name in dict.fromkeys(names))


@dataclasses.dataclass(frozen=True)
class Paper:
    key: str
    title: str
    about: str
    silent: str
    settings: Mapping[str, Any]
    scales: Mapping[str, Mapping[str, Any]]
    before: Mapping[str, Line]
    tables: Mapping[str, Table]


# ---- reading the files ---------------------------------------------------------------------------
def refuse(where: str, found: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for name in found:
        if name not in allowed:
            raise unknown(f"entry of {where}", shown(name), allowed)


def scales_of(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {scale: dict(data[scale]) for scale in SCALES if scale in data}


def line_of(where: str, key: str, data: Mapping[str, Any]) -> Line:
    refuse(where, data, OF_A_LINE)
    given = {name: str(data.get(name, "")) for name in ("method", "preset", "read")}
    label = str(data.get("label", key))
    return Line(
        key,
        label,
        figure="" if given["method"] else given["read"],
        settings=dict(data.get("settings", {})),
        scales=scales_of(data),
        always=dict(data.get("always", {})),
        **given,
    )


def joined(what: str, name: str, known: Mapping[str, Line]) -> Line:
    """'a+b' -> both lines merged, under this name."""
    parts = [lookup(what, part, known) for part in name.split("+")]
    return dataclasses.replace(functools.reduce(Line.__add__, parts), key=name)


def cell_of(where: str, text: str) -> Published:
    """A published figure from its text.

    >>> cell_of("here", "64.13±.79^ab")
    Published(text='64.13', value=64.13, sd=0.79, marks='ab')
    """
    found = CELL.fullmatch(text)
    if found is None:
        raise UserError(
            f"{where}: '{shown(text)}' is not a published figure; use for example 82.51±.38, ×, –,"
            " ? or 64.1^a"
        )
    number = found["value"]
    value = None if number in "×–?" or "Σ" in number else float(number)
    return Published(number, value, float(found["sd"] or 0), found["marks"] or "")


def block_of(
    where: str, text: str
) -> tuple[list[str], list[str], dict[tuple[str, str], Published]]:
    """(rows, columns, figures) of a block of text."""
    head, *lines = [line.split() for line in text.strip().splitlines() if line.strip()]
    cells: dict[tuple[str, str], Published] = {}
    for name, *figures in lines:
        if len(figures) != len(head):
            raise UserError(
                f"{where}: the line '{name}' has {len(figures)} figures for {len(head)} columns"
            )
        for col, figure in zip(head, figures, strict=True):
            cells[name, col] = cell_of(where, figure)
    return [line[0] for line in lines], head, cells


def table_of(paper: str, key: str, data: Mapping[str, Any], lines: Mapping[str, Line]) -> Table:
    where = f"{paper}:{key}"
    refuse(where, data, OF_A_TABLE)
    block = block_of(where, data["published"]) if "published" in data else ([], [], {})
    marks = {m for one in block[2].values() for m in one.marks}
    if missing := sorted(marks - set(data.get("notes", {}))):
        raise UserError(
            f"{where}: there is no footnote '{missing[0]}'; allowed:"
            f" {', '.join(data.get('notes', {})) or 'none'}"
        )
    lookup(f"kind of {where}", data.get("kind", "run"), dict.fromkeys(KINDS, ""))
    lookup(f"rank of {where}", data.get("rank", "rows"), {"rows": "", "cols": ""})
    given = {name: data[name] for name in OPTIONAL if name in data}
    named = lambda names: tuple(joined(f"line in {where}", name, lines) for name in names)
    return Table(
        paper,
        key,
        data["title"],
        rows=named(data.get("rows", block[0])),
        cols=named(data.get("cols", block[1])),
        extra=named(data.get("extra", ())),
        published=block[2],
        also=tuple(data.get("also", ())),
        draw=tuple(data.get("draw", ())),
        notes=dict(data.get("notes", {})),
        settings=dict(data.get("settings", {})),
        scales=scales_of(data),
        **given,
    )


def paper_of(key: str, data: Mapping[str, Any]) -> Paper:
    refuse(key, data, OF_A_PAPER)
    read = lambda part: {
        name: line_of(f"{key}.{part}.{name}", name, one) for name, one in data.get(part, {}).items()
    }
    lines = {part: read(part) for part in ("lines", "before")}
    tables = {n: table_of(key, n, one, lines["lines"]) for n, one in data["tables"].items()}
    about, silent = data.get("about", ""), data.get("silent", "")
    settings, scales = data.get("settings", {}), scales_of(data)
    return Paper(key, data["title"], about, silent, settings, scales, lines["before"], tables)


@functools.cache
def papers() -> dict[str, Paper]:
    folder = importlib.resources.files("fedjax_sim.presets") / "papers"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    named = {
        f.name.removesuffix(".toml"): tomllib.loads(f.read_text(encoding="utf-8")) for f in files
    }
    return {key: paper_of(key, data) for key, data in named.items()}


def find(text: str) -> Table:
    """'PAPER:TABLE' -> that table.

    >>> find("fedpolicy:T4").title
    'Rounds to an accuracy, CIFAR-10, β = 0.3'
    """
    paper, colon, key = text.partition(":")
    known = papers()
    if not colon:
        example = f"{next(iter(known))}:{next(iter(known[next(iter(known))].tables))}"
        raise UserError(
            f"'{shown(text)}' is not the name of a table; use PAPER:TABLE, e.g. {example} (see"
            " fedjax-sim paper list)"
        )
    return lookup(f"table of {paper}", key, lookup("paper", paper, known).tables)
