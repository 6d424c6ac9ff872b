"""Running what is left of a table: run directory by run directory, in this process. Another process
with the same command takes other runs; what one of them has begun and left goes on."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.cli import commands
from fedjax_sim.cli.several import DATA, Federations, execute_all, set_ups
from fedjax_sim.cli.sweep.jobs import DONE, FAILED, Folder, started
from fedjax_sim.cli.sweep.plan import Job
from fedjax_sim.cli.words import option_parser
from fedjax_sim.papers.reading import load_profile
from fedjax_sim.runner.files import InUse, Lock

EVERY = 5.0  # seconds between two looks at what other processes do
REPEATS = 3  # of a profile


class Cells(Folder):
    """The folder of a paper's runs: runs/NAME, failed/NAME.json, claims/NAME while a process is at
    it."""

    def summary(self, job: Job) -> dict[str, Any]:
        if job.kind != "profile":
            return super().summary(job)
        found = load_profile(self.run(job))
        return dict(found.seconds) if found else {}

    @contextlib.contextmanager
    def claimed(self, job: Job) -> Iterator[bool]:
        """Whether this process may do it; nobody else does as long."""
        place = self.path / "claims" / job.name
        place.mkdir(parents=True, exist_ok=True)
        lock = Lock(place)
        try:
            lock.take()
        except InUse:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()
            with contextlib.suppress(OSError):
                place.rmdir()


class Worker:
    """Does one run after another; keeps the data as long as the next run has the same."""

    def __init__(self, folder: Cells, args: argparse.Namespace):
        self.folder, self.args = folder, args
        self.feds = Federations()
        self.data: tuple | None = None

    def do(self, job: Job) -> None:
        own, config = option_parser().parse_args([]), started(job, self.folder)
        data = tuple(getattr(config, name) for name in DATA)
        if data != self.data:
            self.feds, self.data = Federations(), data
        setups = set_ups(config, own, self.feds, commands.note)
        self.folder.run(job).parent.mkdir(parents=True, exist_ok=True)
        if job.kind == "profile":
            self.profile(setups[0], self.folder.run(job))
        else:
            execute_all(setups, own, self.folder.run(job), **commands.talk(self.args))
            self.folder.own(job)

    def profile(self, setup: Any, place: pathlib.Path) -> None:
        from fedjax_sim.runner.facts import facts
        from fedjax_sim.runner.files import write_json
        from fedjax_sim.runner.profile import stage_seconds

        sizes, several = facts(setup), setup.participation.high
        seconds = stage_seconds(setup, REPEATS)
        place.mkdir(parents=True, exist_ok=True)
        told = {"method": setup.config.method, "config": setup.config.to_json(), "seconds": seconds}
        write_json(
            place / "profile.json",
            told | {"bytes": {w: sizes[w] / several for w in ("down", "up")}},
        )

    def attempt(self, job: Job) -> None:
        """A run that fails is written down, and the others go on."""
        from fedjax_sim.cli.main import expected

        try:
            self.folder.forgive(job)
            self.do(job)
        except Exception as problem:
            sentence = expected(problem)
            if sentence is None:
                self.folder.fail(job, f"{type(problem).__name__}: {problem}")
                raise
            self.folder.fail(job, sentence)
            commands.note(f"{job.name} failed: {sentence}")


def work_off(jobs: Sequence[Job], folder: Cells, args: argparse.Namespace) -> None:
    """All runs that have not ended, as far as no other process is at them; what others begin here
    is waited for where a run of ours starts from it."""
    worker, waiting, tried = (
        Worker(folder, args),
        [j for j in jobs if folder.status(j) != DONE],
        set[str](),
    )
    commands.note(
        f"{len(jobs)} runs in '{folder.path}', {len(jobs) - len(waiting)} of them have ended"
    )
    while waiting:
        moved = False
        blocked = []
        for job in list(waiting):
            if folder.status(job) == DONE or job.name in tried:
                waiting.remove(job)
                continue
            if job.before is not None and folder.status(job.before) != DONE:
                if job.before.name in tried or folder.status(job.before) == FAILED:
                    folder.fail(
                        job, f"the run that it starts from failed: {folder.why(job.before)}"
                    )
                    tried.add(job.name)
                else:
                    blocked.append(job)
                continue
            with folder.claimed(job) as mine:
                if not mine:
                    continue
                moved = True
                tried.add(job.name)
                if folder.status(job) != DONE:
                    left = sum(other.name not in tried for other in waiting)
                    commands.note(f"{job.name}, then {left} more")
                    worker.attempt(job)
        if not moved and blocked:
            time.sleep(EVERY)
        elif not moved:
            break
    if waiting := [j for j in waiting if folder.status(j) not in (DONE, FAILED)]:
        commands.note(f"{len(waiting)} runs are with another process")
