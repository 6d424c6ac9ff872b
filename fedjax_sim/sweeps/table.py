"""The output of a sweep: a live table on a terminal, a line per event elsewhere, and the results at
the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from fedjax_sim.report.text import columns, duration
from fedjax_sim.runner.sinks import json_line
from fedjax_sim.sweeps.folder import DAMAGED, DONE, FAILED, Folder
from fedjax_sim.sweeps.plan import Job, as_text

MOST_ROWS = 20


class Table:
    """Shows progress; called with the running jobs after every poll."""

    def __init__(
        self, jobs: Sequence[Job], folder: Folder, quiet: bool = False, json: bool = False
    ):
        self.jobs, self.folder, self.quiet, self.json = jobs, folder, quiet, json
        self.live = sys.stderr.isatty() and not json
        self.lines = 0
        self.began = time.monotonic()
        self.status: dict[str, str] = {}
        self.first_done = sum(folder.status(job) == DONE for job in jobs)

    def __call__(self, running: Sequence[Job], changed: bool) -> None:
        if (self.quiet and not self.json) or (not changed and not self.live):
            return
        status = self.folder.status
        now = {job.name: "running" if job in running else status(job) for job in self.jobs}
        # before the first look only runs that have been started are news
        before = {name: s for name, s in now.items() if s != "running"} | self.status
        if self.live:
            self.redraw(self.rows(running, now))
        else:
            for job in (job for job in self.jobs if now[job.name] != before.get(job.name)):
                if self.json:
                    emit(now[job.name], run=job.name, why=self.folder.why(job) or None)
                else:
                    print(self.event(job, now), file=sys.stderr, flush=True)
        self.status = now

    def counts(self, now: dict[str, str]) -> str:
        number = lambda status: sum(s == status for s in now.values())
        done, left = number(DONE), len(self.jobs) - number(DONE) - number(FAILED)
        fresh = done - self.first_done
        spent = time.monotonic() - self.began
        eta = f", about {duration(spent / fresh * left)} left" if fresh and left else ""
        failed = f", {number(FAILED)} failed" if number(FAILED) else ""
        return f"{done} of {len(self.jobs)} done{failed}{eta}"

    def event(self, job: Job, now: dict[str, str]) -> str:
        status = now[job.name]
        more = f": {self.folder.why(job)}" if status == FAILED else ""
        if status == DONE:
            about = self.folder.primary(job).about
            more = f", {about.label} {about.text(self.folder.progress(job)[1])}{about.sign}"
        return f"{job.name} {status}{more} ({self.counts(now)})"

    def rows(self, running: Sequence[Job], now: dict[str, str]) -> list[str]:
        shown = []
        for job in running[:MOST_ROWS]:
            (done, value), about = self.folder.progress(job), self.folder.primary(job).about
            point = ", ".join(f"{k} {as_text(v)}" for k, v in job.point.items())
            rounds = f"{done} / {job.experiment.training.rounds}"
            shown.append([job.name, point, rounds, about.text(value)])
        if not shown:
            return [self.counts(now)]
        table = columns([["running", "setting", "round", about.label], *shown])
        return [self.counts(now), *table.splitlines()]

    def redraw(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self.lines}F" if self.lines else ""
        sys.stderr.write(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J")
        sys.stderr.flush()
        self.lines = len(lines)


def emit(event: str, **facts: Any) -> None:
    print(json_line(event, **facts), flush=True)


def results(jobs: Sequence[Job], folder: Folder) -> str:
    """Mean ± std of the runs that have ended, and why the others failed."""
    from fedjax_sim.report import tables
    from fedjax_sim.report.groups import grouped
    from fedjax_sim.report.runs import load_runs

    ended = [folder.run(job) for job in jobs if folder.status(job) == DONE]
    parts = []
    if ended:
        head, rows = tables.written(grouped(load_runs(ended)), "{} *")
        signs = {tables.NOTHING: "no such figure", tables.NEVER: "never reached"}
        used = [
            f"{sign} {what}" for sign, what in signs.items() if any(sign in r[1:] for r in rows)
        ]
        parts += [columns([head, *rows]), "; ".join(["* the best of its setting", *used])]
    for status in (FAILED, DAMAGED):
        mine = [job for job in jobs if folder.status(job) == status]
        parts += [f"{job.name} {status}: {folder.why(job)}" for job in mine]
    return "\n".join(parts)
