"""Runs of a folder in this process, one after another. Another process with the same command takes
other runs; unfinished runs are resumed."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedjax_sim.errors import expected
from fedjax_sim.papers.reading import load_profile
from fedjax_sim.runner.facts import facts
from fedjax_sim.runner.files import InUse, Lock, write_json
from fedjax_sim.runner.many import Federations, ready, run_all
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.profile import stage_seconds
from fedjax_sim.sweeps.folder import DONE, FAILED, Folder, started
from fedjax_sim.sweeps.plan import Job

EVERY = 5.0  # seconds between two checks of other processes
REPEATS = 3  # of a profile


class Shared(Folder):
    """A folder that several processes may share: claims/NAME is locked by the one that does a run.
    Runs may also be profiles."""

    def summary(self, job: Job) -> dict[str, Any]:
        if job.kind != "profile":
            return super().summary(job)
        found = load_profile(self.run(job))
        return dict(found.seconds) if found else {}

    @contextlib.contextmanager
    def claimed(self, job: Job) -> Iterator[bool]:
        """Claim a run; False if another process has it."""
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
    """Does one run after another; keeps the data while the next run has the same.

    say: called with messages; more: progress and sinks, see `driver.drive`.
    """

    def __init__(self, folder: Folder, say: Callable[[str], None], **more: Any):
        self.folder, self.say, self.more = folder, say, more
        self.feds = Federations()
        self.data: Any = None

    def do(self, job: Job) -> None:
        experiment = started(job, self.folder)
        if Federations.key(experiment) != self.data:
            self.feds, self.data = Federations(), Federations.key(experiment)
        setup = ready(experiment, None, self.feds, self.say)
        self.folder.run(job).parent.mkdir(parents=True, exist_ok=True)
        if job.kind == "profile":
            write_profile(setup, self.folder.run(job))
        else:
            run_all([setup], 1, self.folder.run(job), say=self.say, **self.more)
            self.folder.finish(job)  # only now: `run_all` refuses another configuration

    def attempt(self, job: Job) -> None:
        """Do a run; record an expected failure, so that the others continue."""
        try:
            self.folder.clear_failure(job)
            self.do(job)
        except Exception as problem:
            sentence = expected(problem)
            self.folder.fail(job, sentence or f"{type(problem).__name__}: {problem}")
            if sentence is None:
                raise
            self.say(f"{job.name} failed: {sentence}")


def write_profile(setup: Setup, place: pathlib.Path) -> None:
    """Write profile.json: seconds of the stages of a round, and bytes per client."""
    sizes, cohort = facts(setup), setup.participation.high
    record = dict(
        method=setup.experiment.method.name,
        config=setup.experiment.flat(),
        seconds=stage_seconds(setup, REPEATS),
        bytes={way: sizes[way] / cohort for way in ("down", "up")},
    )
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / "profile.json", record)


def work_here(
    jobs: Sequence[Job],
    folder: Shared,
    say: Callable[[str], None],
    look: Callable[[Sequence[Job], bool], None] = lambda running, changed: None,
    **more: Any,
) -> None:
    """Do all runs that have not ended and that no other process does; wait for others' runs if ours
    start from them. look: as in `queue.work_off`."""
    worker, waiting = Worker(folder, say, **more), [j for j in jobs if folder.status(j) != DONE]
    tried: set[str] = set()
    say(f"{len(jobs)} runs in '{folder.path}', {len(jobs) - len(waiting)} of them have ended")
    while waiting:
        moved = False
        blocked = []
        for job in list(waiting):
            if folder.status(job) == DONE or job.name in tried:
                waiting.remove(job)
                continue
            if job.before is not None and folder.status(job.before) != DONE:
                if job.before.name in tried or folder.status(job.before) == FAILED:
                    why = folder.why(job.before)
                    folder.fail(job, f"the run that it starts from failed: {why}")
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
                    say(f"{job.name}, then {left} more")
                    look([job], True)
                    worker.attempt(job)
                    look([], True)
        if not moved and blocked:
            time.sleep(EVERY)
        elif not moved:
            break
    if waiting := [j for j in waiting if folder.status(j) not in (DONE, FAILED)]:
        say(f"another process does the other {len(waiting)} runs")
