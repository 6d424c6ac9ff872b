"""The folder of a sweep: which runs have ended, the progress of the others, which failed;
results.csv.

A run has ended when its directory matches its manifest, has all rounds, and was started for this
run of the sweep file. One that was edited, cut or renamed is reported and has no figures here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.metrics.base import Primary
from fedjax_sim.options import shown
from fedjax_sim.report.runs import write_order
from fedjax_sim.report.tables import figures_of
from fedjax_sim.runner import run_directory
from fedjax_sim.runner.files import Lock, csv_bytes, csv_rows, write_bytes, write_json
from fedjax_sim.sweeps.plan import Job, as_text

DONE, FAILED, DAMAGED, BEGUN, WAITING = "done", "failed", "damaged", "begun", "waiting"


class End(NamedTuple):
    """The end of a run, from its directory."""

    summary: dict[str, Any]  # {}: the run has not ended
    problem: str = ""  # why the directory cannot be used


@dataclasses.dataclass(frozen=True)
class Folder:
    """The folder of a sweep: sweep.json, runs/NAME, ended/NAME.json, logs/NAME.txt,
    failed/NAME.json, results.csv."""

    path: pathlib.Path
    _seen: dict[str, tuple[Any, End]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def begin(self, data: Mapping[str, Any], jobs: Sequence[Job]) -> None:
        """Create it, with the sweep file: a task reads the same runs in the same order."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(f"'{self.path}' cannot be created: {problem.strerror}") from None
        if (self.path / run_directory.CONFIG).exists():
            raise UserError(f"'{self.path}' is a run directory; choose another --out")
        write_bytes(self.file, json.dumps(data, indent=1, default=os.fspath).encode())
        write_order(self.path / "runs", [job.name for job in jobs])

    @property
    def file(self) -> pathlib.Path:
        """A copy of the sweep file."""
        return self.path / "sweep.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder: two sweeps in it would start the same runs."""
        lock = Lock(self.path)
        lock.take()
        try:
            yield
        finally:
            lock.release()

    def pending(self, jobs: Sequence[Job]) -> list[Job]:
        """The runs that have not ended; failed ones are tried again."""
        return [job for job in jobs if not self.summary(job)]

    def run(self, job: Job) -> pathlib.Path:
        return self.path / "runs" / job.name

    def log(self, job: Job) -> pathlib.Path:
        return self.path / "logs" / f"{job.name}.txt"

    def _failed(self, job: Job) -> pathlib.Path:
        return self.path / "failed" / f"{job.name}.json"

    def fail(self, job: Job, sentence: str) -> None:
        self._failed(job).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._failed(job), {"run": job.name, "why": sentence})

    def clear_failure(self, job: Job) -> None:
        self._failed(job).unlink(missing_ok=True)

    def why(self, job: Job) -> str:
        """Why a run failed or is damaged; '' for others."""
        return self._reason(job) or self.end(job).problem

    def _reason(self, job: Job) -> str:
        try:
            return str(json.loads(self._failed(job).read_text())["why"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    def finish(self, job: Job) -> None:
        """Record that the directory, which has ended, belongs to this run of the sweep file."""
        self._ended(job).parent.mkdir(parents=True, exist_ok=True)
        config = json.loads((self.run(job) / run_directory.CONFIG).read_bytes())
        which = {"run": job.name, "digits": job.digits}
        write_json(self._ended(job), which | {"config_hash": config.get("config_hash")})

    def _ended(self, job: Job) -> pathlib.Path:
        return self.path / "ended" / f"{job.name}.json"

    def _mismatch(self, job: Job) -> str:
        """Why the run's directory does not belong to this run; '' if it does."""
        try:
            record = json.loads(self._ended(job).read_text())
            config = json.loads((self.run(job) / run_directory.CONFIG).read_bytes())
            same = record["digits"] == job.digits
            same = same and record["config_hash"] == config.get("config_hash")
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            same = False
        if same:
            return ""
        name = shown(str(self.run(job)), 200)
        return f"'{name}' was not run with the settings of this sweep file; choose another --out"

    def summary(self, job: Job) -> dict[str, Any]:
        """summary.json of a run that has all of its rounds; {} otherwise."""
        return self.end(job).summary

    def end(self, job: Job) -> End:
        """The end of a run, read again when one of its files has changed."""
        run = self.run(job)
        files = {run / name for name in (*run_directory.FILES, run_directory.MANIFEST)}
        marks = []
        for file in sorted({self._ended(job), *files}):
            with contextlib.suppress(OSError):
                mark = file.stat()
                marks.append((file.name, mark.st_mtime_ns, mark.st_size))
        known = self._seen.get(job.name)
        if known is None or known[0] != marks:
            self._seen[job.name] = known = marks, self._end(job, run)
        return known[1]

    def _end(self, job: Job, run: pathlib.Path) -> End:
        name = run_directory.SUMMARY
        try:
            ended = (run / name).exists() or name in run_directory.read_manifest(run)
        except ValueError:
            ended = False
        if not ended:
            return End({})
        try:
            files = run_directory.verified(run)
            if mismatch := self._mismatch(job):
                return End({}, mismatch)
            # not in the manifest: the run is being extended
            summary = json.loads(files.get(name, b'{"rounds": 0}'))
            return End(summary if int(summary["rounds"]) >= job.experiment.training.rounds else {})
        except UserError as problem:
            return End({}, str(problem))
        except (ValueError, KeyError, TypeError, RecursionError):
            return End({}, f"'{shown(str(run), 200)}' is damaged: its {name} cannot be read")

    def status(self, job: Job) -> str:
        if self.summary(job):
            return DONE
        if self._reason(job):
            return FAILED
        if self.end(job).problem:
            return DAMAGED
        return BEGUN if (self.run(job) / run_directory.CONFIG).exists() else WAITING

    def primary(self, job: Job) -> Primary:
        """The primary metric of a run."""
        try:
            config = json.loads((self.run(job) / run_directory.CONFIG).read_bytes())
            return Primary.read(config.get("resolved"))
        except (OSError, ValueError, AttributeError):
            return Primary()

    def progress(self, job: Job) -> tuple[int, float | None]:
        """(rounds done, last value of the primary metric) of a running job."""
        try:
            rows = csv_rows((self.run(job) / "metrics.csv").read_bytes())
            last = rows[-1]
            of_server, of_clients = self.primary(job).columns
            text = last.get(of_server) or last.get(of_clients) or ""
            return int(last["round"]), float(text) if text else None
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return 0, None


def started(job: Job, folder: Folder) -> Experiment:
    """The run's experiment, with the path of the run that it starts from."""
    if job.before is None:
        return job.experiment
    return job.experiment.replace(start_from=f"{folder.run(job.before)}:{job.parts}")


def waits(job: Job, folder: Folder) -> bool:
    """Whether the run that it starts from has not ended yet."""
    return job.before is not None and not folder.summary(job.before)


def result_rows(folder: Folder, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """A row per run with its status, its settings and every figure of its summary."""
    rows = []
    for job in jobs:
        named = ("method", "seed", "data_seed", "dataset", "partition", "model")
        settings = {name: job.experiment.get(name) for name in named}
        state = {"run": job.name, "status": folder.status(job), "why": folder.why(job) or None}
        rows.append(state | settings | job.point | figures_of(folder.summary(job)))
    return rows


def write_results(folder: Folder, jobs: Sequence[Job]) -> pathlib.Path:
    """Write results.csv, a row per run."""
    text = lambda value: as_text(value) if isinstance(value, (bool, list, tuple)) else value
    rows = [{k: text(v) for k, v in row.items()} for row in result_rows(folder, jobs)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_bytes(folder.path / "results.csv", csv_bytes(columns, rows))
    return folder.path / "results.csv"
