"""`sweep --pivot rows,cols`: results as tables of two settings, mean ± sd over seeds; one table per
value of the other settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.options import names, shown
from fedjax_sim.papers import reading
from fedjax_sim.papers.pivot import Cell, Pivot
from fedjax_sim.report.runs import Run, load_run
from fedjax_sim.sweeps.folder import DONE, FAILED, Folder
from fedjax_sim.sweeps.plan import Job, as_text

METHOD = "method"
READINGS = ("best:global_acc", "last:client_mean", "last:resident_mean")  # the first with values


def facts(job: Job, several: bool) -> dict[str, str]:
    """{setting: value} that identify a run; several: with the method's options, since other entries
    have the same method."""
    bare = {name.rpartition(".")[2] for name in job.point}
    options = job.experiment.method.options.items() if several else ()
    method = [job.experiment.method.name, *(f"{k}={v}" for k, v in options if k not in bare)]
    return {METHOD: ",".join(method), **{name: as_text(v) for name, v in job.point.items()}}


def distinguishing(jobs: Sequence[Job]) -> list[dict[str, str]]:
    """The `facts` of every run, with options of the method only where entries differ in them."""
    plain = [(facts(job, False), job.experiment.training.seed) for job in jobs]
    return [facts(job, plain.count(one) > 1) for job, one in zip(jobs, plain, strict=True)]


def read_of(text: str, runs: Sequence[Run]) -> str:
    """The given reading, or the first default with a value in any run."""
    if text:
        reading.describe(text)
        return text
    has = lambda one: any(not math.isnan(reading.value(one, run)) for run in runs)
    return next((one for one in READINGS if has(one)), READINGS[0])


def pivots(jobs: Sequence[Job], folder: Folder, text: str, read: str = "") -> list[Pivot]:
    """One table per combination of the settings that are neither rows nor columns."""
    wanted = names(text)
    mine = [job for job in jobs if not any(other.before is job for other in jobs)]
    facts_of = distinguishing(mine)
    known = {name: "" for one in facts_of for name in one}
    if len(wanted) != 2 or wanted[0] == wanted[1]:
        raise UserError(
            f"--pivot '{shown(text)}' does not name rows and columns; use two of"
            f" {', '.join(known)}, as in method,lr"
        )
    row, col = wanted
    for name in wanted:
        lookup("setting in --pivot", name, known)
    loaded = {job.name: load_run(folder.run(job)) for job in mine if folder.status(job) == DONE}
    read = read_of(read, list(loaded.values()))
    tables: dict[tuple[tuple[str, str], ...], dict[tuple[str, str], list[Job]]] = {}
    for job, one in zip(mine, facts_of, strict=True):
        rest = tuple((k, v) for k, v in one.items() if k not in (row, col))
        place = one.get(row, "–"), one.get(col, "–")
        tables.setdefault(rest, {}).setdefault(place, []).append(job)
    every = [dict(rest) for rest in tables]
    varying = {k for rest in every for k in rest if len({other.get(k) for other in every}) > 1}
    out = []
    for rest, cells in tables.items():
        title = ", ".join(f"{k} {v}" for k, v in rest if k in varying)
        title = f"{row} × {col}" + (f": {title}" if title else "")
        out.append(table(title, cells, loaded, folder, read))
    return out


def table(
    title: str,
    jobs: dict[tuple[str, str], list[Job]],
    loaded: dict[str, Run],
    folder: Folder,
    read: str,
) -> Pivot:
    kind, _ = reading.split(read)
    failed = lambda job: folder.status(job) == FAILED
    cells = {}
    for place, several in jobs.items():
        runs = [loaded[job.name] for job in several if job.name in loaded]
        cells[place] = Cell(
            tuple(reading.value(read, run) for run in runs),
            rounds=tuple(int(run.rounds["round"][-1]) for run in runs),
            planned=several[0].experiment.training.rounds,
            digits=kind.digits,
            reading=read,
            note="" if runs else FAILED if any(map(failed, several)) else "not ended",
        )
    lines = lambda axis: [(key, key) for key in dict.fromkeys(place[axis] for place in jobs)]
    return Pivot(title, lines(0), lines(1), cells, head=[reading.sentence(read)])


def written(jobs: Sequence[Job], folder: Folder, text: str, read: str) -> str:
    """The tables as text; also writes them to pivot.md."""
    from fedjax_sim.runner.files import write_bytes

    found = pivots(jobs, folder, text, read)
    write_bytes(folder.path / "pivot.md", "\n".join(one.as_markdown() for one in found).encode())
    return "\n\n".join(one.as_text() for one in found)
