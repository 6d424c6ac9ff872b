"""From a published table to runs: every cell is a run per seed; equal runs are shared between cells
and tables."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.given import OF_THE_COMMAND, experiment_of, key_of, scoped
from fedjax_sim.methods import METHODS, make_method, options_in
from fedjax_sim.papers.tables import Line, Paper, Table, papers
from fedjax_sim.presets import preset
from fedjax_sim.sweeps.plan import Job, as_text, digits_of, handed_over

# differences from the paper's setting that are not mentioned
NOT_MENTIONED = {"data_dir", "devices", "chunk", "eval_every", "seeds"}


@dataclasses.dataclass(frozen=True)
class Cell:
    row: Line
    col: Line
    reading: str
    jobs: tuple[Job, ...] = ()  # one per seed; (): only a published figure
    smaller: tuple[str, ...] = ()  # differences from the published setting


@dataclasses.dataclass(frozen=True)
class Choice:
    """The options of the command line."""

    scale: str = "paper"
    rows: str = ""
    cols: str = ""
    seeds: int | None = None
    typed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of all runs


# ---- settings ------------------------------------------------------------------------------------
def merged(
    paper: Paper, table: Table | None, lines: Sequence[Line], scale: str, typed: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of one cell, `seeds` included; later layers override earlier ones."""
    name = next(
        (line.preset for line in reversed(lines) if line.preset), table.preset if table else ""
    )
    holders: list[Any] = [paper, *([table] if table else []), *lines]
    layers = [preset(name).settings if name else {}, *(holder.settings for holder in holders)]
    layers += [holder.scales.get(scale, {}) for holder in holders]
    layers += [typed, *(line.always for line in lines)]
    return {key_of(name): value for layer in layers for name, value in layer.items()}


def planned(method: str, settings: Mapping[str, Any]) -> Experiment:
    """The run without redundant options, so that the same run always has the same name."""
    chosen = {n: value for n, value in settings.items() if n not in ("seeds", "start_from")}
    experiment = experiment_of(method, chosen, METHODS, OF_THE_COMMAND)
    options, loss = experiment.method.options, experiment.training.loss
    built = make_method(method, **options)
    changed = options_in(built) or {}
    kept = {n: v for n, v in options.items() if n in changed or n.startswith("agent")}
    return experiment.replace(options=kept, loss=built.loss if loss == "auto" else loss)


def check(typed: Mapping[str, Any]) -> None:
    """Refuse an option that its method does not have, also if no cell is of that method."""
    for name, value in typed.items():
        owner = name.partition(".")[0]
        if owner in METHODS:
            planned(owner, scoped(owner, {name: value}))


# ---- runs ----------------------------------------------------------------------------------------
def job_of(e: Experiment, kind: str, before: Job | None = None, parts: str = "") -> Job:
    start = before.name if before else ""
    digits = digits_of([e.hash(), e.training.rounds, kind, start, parts])
    data = f"{e.data.dataset.partition(':')[0].rpartition('/')[2]}-{e.data.partition}"
    data = re.sub(r"[^\w.-]+", "_", data)
    name = f"{e.method.name}-{data}-s{e.training.seed}-{digits}"
    return Job(0, name, e, {}, digits, before=before, parts=parts, kind=kind)


class Planner:
    """The runs of one table under one choice."""

    def __init__(self, table: Table, choice: Choice):
        self.table, self.choice = table, choice
        self.paper = papers()[table.paper]

    def settings(self, lines: Sequence[Line], table: Table | None) -> dict[str, Any]:
        return merged(self.paper, table, lines, self.choice.scale, self.choice.typed)

    def run(
        self, method: str, settings: Mapping[str, Any], seed: int, across: Line | None, kind: str
    ) -> Job:
        mine = scoped(method, settings)
        experiment = planned(method, mine | {"seed": seed})
        source = str(mine.get("start_from", ""))
        if not source.startswith("@"):
            return job_of(experiment.replace(start_from=source or None), kind)
        name, _, parts = source[1:].partition(":")
        before = self.before(name, seed, across, experiment)
        return job_of(experiment, kind, before, parts or handed_over(before))

    def before(self, name: str, seed: int, across: Line | None, then: Experiment) -> Job:
        """The run that another one starts from: one of the paper's [before], or another cell of the
        same column (or row).

        It has the same seed, hence the same initial weights; others would not fit together.
        """
        if name.startswith("row ") and across is not None:
            line = self.line(name.removeprefix("row "))
            pair = (line, across) if self.table.rank == "rows" else (across, line)
            return self.run(line.method, self.settings(pair, self.table), seed, across, "run")
        line = lookup(f"run before others in {self.paper.key}", name, self.paper.before)
        typed = {n: v for n, v in self.choice.typed.items() if n != "rounds"}  # those of the cells
        settings = merged(self.paper, None, [line], self.choice.scale, typed)
        if settings.get("participation") == "same":
            settings["participation"] = f"{participants(then)}/{settings['clients']}"
        return self.run(line.method, settings, seed, None, "run")

    def line(self, key: str) -> Line:
        lines = self.table.rows if self.table.rank == "rows" else self.table.cols
        known = {line.key: line for line in (*lines, *self.table.extra)}
        return lookup(f"line of {self.table.name}", key, known)

    def cell(self, row: Line, col: Line) -> Cell:
        reading = self.table.reading(row, col)
        method = col.method or row.method
        if not method:
            return Cell(row, col, reading)
        lookup("method", method, METHODS)
        used = self.settings((row, col), self.table)
        published = merged(self.paper, self.table, (row, col), "paper", {})
        seeds = self.choice.seeds or int(used.get("seeds", self.table.seeds))
        across = col if self.table.rank == "rows" else row
        jobs = tuple(self.run(method, used, seed, across, self.table.kind) for seed in range(seeds))
        return Cell(row, col, reading, jobs, tuple(differences(method, used, published)))

    def cells(self) -> Iterator[Cell]:
        """Column by column (or row by row), so that cells with the same data are neighbours."""
        rows, cols = self.table.chosen(self.choice.rows, self.choice.cols)
        by_column = [(row, col) for col in cols for row in rows]
        by_row = [(row, col) for row in rows for col in cols]
        for row, col in by_column if self.table.rank == "rows" else by_row:
            yield self.cell(row, col)


def participants(e: Experiment) -> int:
    """How many clients take part in a round, if the participation is a fraction."""
    share = e.training.participation
    if not isinstance(share, int | float) or share > 1:
        raise UserError(f"participation {share} is no fraction, as a run before this one needs")
    return max(1, math.ceil(share * (e.data.clients or 0) - 1e-9))


def differences(
    method: str, used: Mapping[str, Any], published: Mapping[str, Any]
) -> Iterator[str]:
    """'rounds 100 (500)' for every setting that is not the published one."""
    ours, theirs = scoped(method, used), scoped(method, published)
    for name in dict.fromkeys([*ours, *theirs]):
        owner = name.partition(".")[0]
        mine, other = (as_text(s[name]) if name in s else "" for s in (ours, theirs))
        of_others = owner in METHODS and owner != method
        if mine != other and name not in NOT_MENTIONED and not of_others:
            yield f"{name} {mine or 'default'} ({other or 'default'})"


def jobs_in(cells: Sequence[Cell]) -> list[Job]:
    """Every run once; a run comes after the one that it starts from."""
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        if job.before is not None:
            add(job.before)
        found.setdefault(job.name, job)

    for cell in cells:
        for job in cell.jobs:
            add(job)
    return list(found.values())
