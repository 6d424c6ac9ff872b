"""What the folder of a sweep tells: which runs have ended, how far the others are, which failed; results.csv."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from fedjax_sim.cli.sweep.plan import Job
from fedjax_sim.metrics.base import Primary
from fedjax_sim.runner.files import csv_bytes, read_csv, write_bytes, write_json

DONE, FAILED, BEGUN, WAITING = "done", "failed", "begun", "waiting"


@dataclasses.dataclass(frozen=True)
class Folder:
    """The folder of a sweep: sweep.toml, runs/NAME, logs/NAME.txt, failed/NAME.json, results.csv."""

    path: pathlib.Path

    def run(self, job: Job) -> pathlib.Path:
        return self.path / "runs" / job.name

    def log(self, job: Job) -> pathlib.Path:
        return self.path / "logs" / f"{job.name}.txt"

    def _failed(self, job: Job) -> pathlib.Path:
        return self.path / "failed" / f"{job.name}.json"

    def fail(self, job: Job, sentence: str) -> None:
        self._failed(job).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._failed(job), {"run": job.name, "why": sentence})

    def forgive(self, job: Job) -> None:
        self._failed(job).unlink(missing_ok=True)

    def why(self, job: Job) -> str:
        """The sentence of a run that failed; '' for none."""
        try:
            return str(json.loads(self._failed(job).read_text())["why"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def summary(self, job: Job) -> dict[str, Any]:
        """summary.json of a run that has all of its rounds; {} otherwise."""
        try:
            told = json.loads((self.run(job) / "summary.json").read_text())
            return told if int(told["rounds"]) >= job.config.rounds else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def status(self, job: Job) -> str:
        if self.summary(job):
            return DONE
        if self.why(job):
            return FAILED
        return BEGUN if (self.run(job) / "config.json").exists() else WAITING

    def primary(self, job: Job) -> Primary:
        """The metric by which the run is read."""
        try:
            return Primary.read(json.loads((self.run(job) / "config.json").read_text()).get("resolved"))
        except (OSError, ValueError, AttributeError):
            return Primary()

    def progress(self, job: Job) -> tuple[int, float | None]:
        """(rounds done, last value of the primary metric) of a run that goes on."""
        try:
            rows = read_csv(self.run(job) / "metrics.csv")
            last = rows[-1]
            of_server, of_clients = self.primary(job).columns
            text = last.get(of_server) or last.get(of_clients) or ""
            return int(last["round"]), float(text) if text else None
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return 0, None


def pending(folder: Folder, jobs: Sequence[Job]) -> list[Job]:
    """What is to be run: everything that has not ended; what failed before is tried again."""
    return [job for job in jobs if not folder.summary(job)]


def write_results(folder: Folder, jobs: Sequence[Job]) -> pathlib.Path:
    """results.csv: a row per run with its status, its settings and every figure of its summary."""
    from fedjax_sim.report.tables import figures_of

    rows = []
    for job in jobs:
        config = job.config
        settings = dict(method=config.method, seed=config.seed, data_seed=config.data_seed, dataset=config.dataset)
        settings |= dict(partition=config.partition, model=config.model) | job.point
        figures = figures_of(folder.summary(job))
        rows.append({"run": job.name, "status": folder.status(job), "why": folder.why(job)} | settings | figures)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_bytes(folder.path / "results.csv", csv_bytes(columns, rows))
    return folder.path / "results.csv"
