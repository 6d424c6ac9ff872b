"""The finished cells of a table: on the screen, as Markdown and as JSON; its figures."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.cli import commands
from fedjax_sim.cli.paper.cells import Cell, Choice
from fedjax_sim.errors import UserError
from fedjax_sim.papers import pictures, pivot, reading
from fedjax_sim.papers.tables import Table, papers
from fedjax_sim.report.groups import Group
from fedjax_sim.report.runs import Run, load_run
from fedjax_sim.runner.files import write_bytes, write_json
from fedjax_sim.sweeps.folder import FAILED
from fedjax_sim.sweeps.plan import Job
from fedjax_sim.sweeps.work import Shared


class Found:
    """The results of runs, each read once."""

    def __init__(self, folder: Shared):
        self.folder = folder
        self.read: dict[str, Run | reading.Profile | None] = {}

    def of(self, job: Job) -> Run | reading.Profile | None:
        """A Run, perhaps unfinished; a Profile; or None."""
        if job.name not in self.read:
            self.read[job.name] = self._load(job)
        return self.read[job.name]

    def _load(self, job: Job) -> Run | reading.Profile | None:
        place = self.folder.run(job)
        if job.kind == "profile":
            return reading.load_profile(place)
        try:
            return load_run(place)
        except UserError:
            return None  # not started, or without a row


def figure_of(table: Table, cell: Cell, found: Found) -> pivot.Cell:
    finished = [(job, s) for job in cell.jobs if (s := found.of(job)) is not None]
    sources = [s for _, s in finished]
    printed = table.published.get((cell.row.key, cell.col.key))
    kind, _ = reading.split(cell.reading)
    failed = next((job for job in cell.jobs if found.folder.status(job) == FAILED), None)
    rounds = tuple(int(s.rounds["round"][-1]) if isinstance(s, Run) else 0 for s in sources)
    return pivot.Cell(
        tuple(reading.value(cell.reading, s) for s in sources),
        tuple(job.experiment.training.seed for job, _ in finished),
        rounds,
        planned=cell.jobs[0].experiment.training.rounds if cell.jobs and table.kind == "run" else 0,
        published=printed.text + (f"±{printed.sd:g}" if printed.sd else "") if printed else "",
        theirs=printed.value if printed else None,
        marks=printed.marks if printed else "",
        digits=kind.digits,
        better=kind.better,
        reading=cell.reading,
        figure=cell.col.figure or cell.row.figure,
        note="failed" if failed is not None else "",
    )


def pivot_of(table: Table, choice: Choice, cells: Sequence[Cell], found: Found) -> pivot.Pivot:
    rows, cols = (
        list(dict.fromkeys((line.key, line.label) for line in lines))
        for lines in ([c.row for c in cells], [c.col for c in cells])
    )
    readings = dict.fromkeys(cell.reading for cell in cells)
    head = [f"Scale {choice.scale}. {reading.sentence(one)}" for one in readings][:1]
    if len(readings) > 1:
        head = [
            f"Scale {choice.scale}.",
            *(f"{labels_of(one, cells, table)}: {reading.describe(one)}." for one in readings),
        ]
    return pivot.Pivot(
        f"{table.name}. {table.title}",
        rows,
        cols,
        {(cell.row.key, cell.col.key): figure_of(table, cell, found) for cell in cells},
        table.rank,
        head,
        table.notes,
        foot_of(table, cells, found),
        table.reference,
    )


def foot_of(table: Table, cells: Sequence[Cell], found: Found) -> list[str]:
    """Sentences below a table or figure: notes on the whole, what the paper does not say, what is
    smaller, what failed."""
    marked = {m for one in table.published.values() for m in one.marks}
    foot = [note for mark, note in table.notes.items() if mark not in marked]
    if (silent := papers()[table.paper].silent) and any(cell.jobs for cell in cells):
        foot.append(silent)
    jobs = {job.name: job for cell in cells for job in cell.jobs}
    failed = [job for job in jobs.values() if found.folder.status(job) == FAILED]
    whys = [f"failed: {job.name}: {found.folder.why(job)}" for job in failed]
    return [*foot, *smaller_of(cells), *whys]


def labels_of(one: str, cells: Sequence[Cell], table: Table) -> str:
    """The labels of the columns (or rows) with this reading."""
    mine = [cell for cell in cells if cell.reading == one]
    by_col = all(cell.col.read == one for cell in mine)
    by_row = all(cell.row.read == one for cell in mine) or table.rank == "rows"
    lines = [cell.row if by_row and not by_col else cell.col for cell in mine]
    return ", ".join(dict.fromkeys(line.label for line in lines))


def smaller_of(cells: Sequence[Cell]) -> list[str]:
    """Notes on settings that differ from the published ones (in brackets), and in which lines."""
    real = [cell for cell in cells if cell.jobs]
    places: dict[tuple[str, ...], list[str]] = {}
    for text in dict.fromkeys(t for cell in real for t in cell.smaller):
        place = where([cell for cell in real if text in cell.smaller], real)
        places.setdefault(place, []).append(text)
    name = lambda place: f" in {', '.join(place)}" if place else " in any cell"
    return [
        f"Not as published (in brackets){name(place)}: {', '.join(texts)}."
        for place, texts in places.items()
    ]


def where(some: Sequence[Cell], every: Sequence[Cell]) -> tuple[str, ...]:
    """Labels of the columns or rows that these cells fill, else of the cells; () for all cells."""
    if len(some) == len(every):
        return ()
    for line in (lambda cell: cell.col, lambda cell: cell.row):
        keys = {line(cell).key for cell in some}
        if len(some) == sum(line(cell).key in keys for cell in every):
            return tuple(dict.fromkeys(line(cell).label for cell in some))
    return tuple(f"{cell.row.label} / {cell.col.label}" for cell in some)


def also(table: Table, cells: Sequence[Cell], found: Found) -> list[dict[str, Any]]:
    """The other readings of every cell, for the JSON file."""
    out = []
    for cell in cells:
        sources = [s for job in cell.jobs if (s := found.of(job)) is not None]
        for text in table.also if table.kind == "run" else ():
            values = [v for s in sources if math.isfinite(v := reading.value(text, s))]
            if values:
                out.append(dict(row=cell.row.key, col=cell.col.key, reading=text, values=values))
    return out


def runs_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    names = lambda cell: [job.name for job in cell.jobs]
    return [
        dict(row=c.row.key, col=c.col.key, runs=names(c), smaller=list(c.smaller)) for c in cells
    ]


def groups_of(cells: Sequence[Cell], found: Found, column: str = "") -> list[Group]:
    """The runs as groups for figures: a panel per column, a colour per row.

    A row that is read from another column of metrics than the figure's is drawn from its own one.
    """
    out = []
    for cell in cells:
        runs = runs_in(cell, found)
        own = reading.split(cell.reading)[1][-1] if column and cell.reading else column
        label = cell.row.label
        if own != column:
            runs = tuple(under(run, column, own) for run in runs)
            label += f" ({own.replace('_', ' ')})"
        if runs:
            out.append(Group(label, cell.col.label, runs))
    return out


def runs_in(cell: Cell, found: Found) -> tuple[Run, ...]:
    return tuple(s for job in cell.jobs if isinstance(s := found.of(job), Run))


def under(run: Run, column: str, own: str) -> Run:
    """The run with its column `own` of metrics under the name `column`."""
    nothing = np.full(len(run.metrics["round"]), np.nan)
    return dataclasses.replace(run, metrics={**run.metrics, column: run.metrics.get(own, nothing)})


def draw(
    table: Table, choice: Choice, cells: Sequence[Cell], found: Found, client: int | None
) -> list[pathlib.Path]:
    path = found.folder.path / f"{table.key}-{choice.scale}"
    again = f"run it with: fedjax-sim paper run {table.name} --scale {choice.scale}"
    column = reading.split(table.read)[1][0] if table.read else ""
    groups = groups_of(cells, found, column)
    if not groups:
        raise UserError(f"{table.name} has no finished runs yet; {why_not(cells, found) or again}")
    written = []
    for name in table.draw:
        leaves = pictures.picture(name).leaves
        runs = [run for g in groups for run in g.runs] if leaves else []
        states = {run.path: state_of(run.path, leaves) for run in runs}
        wanted = pictures.Wanted(groups, table.client if client is None else client, column, states)
        one = path if len(table.draw) == 1 else path.with_name(f"{path.name}-{name}")
        written += pictures.draw(name, wanted, one)
    return written


def why_not(cells: Sequence[Cell], found: Found) -> str:
    """The first failure, or ''."""
    jobs = [job for cell in cells for job in cell.jobs]
    bad = next((job for job in jobs if found.folder.status(job) == FAILED), None)
    return f"{bad.name} failed: {found.folder.why(bad)}" if bad else ""


def caption_of(table: Table, choice: Choice, cells: Sequence[Cell], found: Found) -> list[str]:
    """Sentences below a figure: rounds and seeds, and those below a table."""
    extents: dict[str, list[Cell]] = {}
    for cell in cells:
        extents.setdefault(extent(cell, found), []).append(cell)
    places = {text: where(some, cells) for text, some in extents.items()}
    said = [text + (f" ({', '.join(place)})" if place else "") for text, place in places.items()]
    return [f"Scale {choice.scale}: {'; '.join(said)}.", *foot_of(table, cells, found)]


def extent(cell: Cell, found: Found) -> str:
    """Rounds and seeds of a cell of a figure."""
    rounds = [int(run.rounds["round"][-1]) for run in runs_in(cell, found)]
    if not rounds:
        return "no run"
    planned = cell.jobs[0].experiment.training.rounds
    of = f" of {planned}" if min(rounds) < planned else ""
    return f"{min(rounds)}{of} rounds, {pivot.counted(len(rounds), 'seed')}"


def state_of(run: pathlib.Path, leaves: Sequence[str]) -> dict[str, Any]:
    from fedjax_sim.runner import checkpoint

    return checkpoint.arrays(checkpoint.latest(run / "checkpoints"), leaves)


def show(
    table: Table, choice: Choice, cells: Sequence[Cell], folder: Shared, client: int | None = None
) -> None:
    """Print a table, write TABLE-SCALE.md and .json, draw its figures."""
    found, stem = Found(folder), f"{table.key}-{choice.scale}"
    written: list[pathlib.Path] = []
    if table.draw:
        drawn = draw(table, choice, cells, found, client)
        title, below = f"{table.name}. {table.title}", caption_of(table, choice, cells, found)
        commands.say("\n".join([title, *below]))
        pictured = [f"![{title}]({file.name})" for file in drawn if file.suffix == ".png"]
        lines = [f"## {title}", *pictured, *(f"* {text}" for text in below)]
        write_bytes(folder.path / f"{stem}.md", ("\n\n".join(lines) + "\n").encode())
        written += [*drawn, folder.path / f"{stem}.md"]
    else:
        pivoted = pivot_of(table, choice, cells, found)
        commands.say(pivoted.as_text())
        folder.path.mkdir(parents=True, exist_ok=True)
        files = folder.path / f"{stem}.md", folder.path / f"{stem}.json"
        write_bytes(files[0], pivoted.as_markdown().encode())
        record = pivoted.as_json() | dict(
            table=table.name,
            scale=choice.scale,
            also=also(table, cells, found),
            runs=runs_of(cells),
        )
        write_json(files[1], record)
        written += files
    commands.say(f"written: {', '.join(map(str, written))}")
