"""The queue: as many runs at a time as a launcher has room for; a failure is recorded, and the
other runs continue."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fedjax_sim.sweeps.folder import Folder, waits, write_results
from fedjax_sim.sweeps.plan import Job

EVERY = 0.5  # seconds between two polls
PARENT = "FEDJAX_SIM_PARENT"  # in the environment of a run: the process that started it
DEATH_SIGNAL = 1  # prctl's number for it


class Launcher(Protocol):
    """Starts runs. `poll` returns None while a run is running, then its exit code and the last line
    of its output."""

    room: int

    def start(self, job: Job) -> Any: ...

    def poll(self, handle: Any) -> tuple[int, str] | None: ...

    def stop(self, handle: Any) -> None: ...


def work_off(
    jobs: Sequence[Job],
    every: Sequence[Job],
    folder: Folder,
    launcher: Launcher,
    look: Callable[[Sequence[Job], bool], None],
) -> None:
    """Run `jobs` of `every`. look(running, whether something changed): called after every poll."""
    waiting, running = list(jobs), dict[str, tuple[Job, Any]]()
    try:
        with terminated():
            while waiting or running:
                changed = False
                drop_orphans(waiting, list(running), folder)
                while len(running) < launcher.room and (
                    ready := [job for job in waiting if not waits(job, folder)]
                ):
                    job = ready[0]
                    waiting.remove(job)
                    folder.clear_failure(job)
                    running[job.name] = job, launcher.start(job)
                    changed = True
                for job, handle in list(running.values()):
                    ended = launcher.poll(handle)
                    if ended is not None:
                        del running[job.name]
                        record_failure(folder, job, *ended)
                        write_results(folder, every)
                        changed = True
                look([job for job, _ in running.values()], changed)
                if running:
                    time.sleep(EVERY)
    except KeyboardInterrupt:
        for _, handle in running.values():
            launcher.stop(handle)
        while any(launcher.poll(handle) is None for _, handle in running.values()):
            time.sleep(EVERY)  # they write a checkpoint
        write_results(folder, every)
        raise


def drop_orphans(waiting: list[Job], running: Sequence[str], folder: Folder) -> None:
    """Fail the runs that start from a failed one."""
    alive = {job.name for job in waiting} | set(running)
    for job in list(waiting):
        if job.before is not None and waits(job, folder) and job.before.name not in alive:
            waiting.remove(job)
            folder.fail(job, f"the run that it starts from, {job.before.name}, failed")


def record_failure(folder: Folder, job: Job, code: int, last: str) -> None:
    """Record why a run failed, unless it did so itself; last: the last line of its output."""
    if code != 0 and not folder.why(job):
        if code < 0:
            folder.fail(
                job, f"it was ended by signal {-code}" + (f", after: {last}" if last else "")
            )
        else:
            folder.fail(job, last or f"it ended with code {code}")


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt like Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def last_line(text: str) -> str:
    """The last line that is not empty.

    >>> last_line("one\\nfedjax-sim: no such file\\n\\n")
    'no such file'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("fedjax-sim: ")[:500] if lines else ""


def command(folder: Folder, log: str = "", imports: Sequence[str] = ()) -> list[str]:
    """The command of a process for one run, to which the number of the run is appended."""
    files = [argument for path in imports for argument in ("--import", path)]
    place = folder.path.resolve()
    start = [sys.executable, "-m", "fedjax_sim", "sweep", str(place / folder.file.name)]
    return [*start, "--out", str(place), *(["--log", log] if log else []), *files, "--task"]


def child_environment() -> dict[str, str]:
    """The environment of a run that this process starts."""
    return {**os.environ, PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """In a run: be killed when the parent process ends, as after kill -9 of a sweep; Linux only.

    Otherwise the run would continue unnoticed and keep the lock that the next `sweep` needs.
    """
    parent = os.environ.pop(PARENT, "")
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != int(parent):
            raise SystemExit(128 + signal.SIGKILL)


def task(command: Sequence[str], log: str) -> tuple[int, str]:
    """Run one process to its end, with its output in a file; an interrupt lets it write a
    checkpoint."""
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=child_environment()
        )
        try:
            while (code := process.poll()) is None:
                time.sleep(EVERY)  # an interrupt from a cluster is only seen between two sleeps
        except BaseException:  # KeyboardInterrupt, or a cluster's cancellation
            process.terminate()
            process.wait()
            raise
    with open(log, encoding="utf-8", errors="replace") as file:
        return code, last_line(file.read())
