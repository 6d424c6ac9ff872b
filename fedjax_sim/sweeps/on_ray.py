"""Runs as tasks of a Ray cluster with access to the sweep's folder: RAY_ADDRESS, or one on this
machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fedjax_sim.errors import UserError, first_line
from fedjax_sim.sweeps.folder import Folder
from fedjax_sim.sweeps.plan import Job
from fedjax_sim.sweeps.queue import task


class OnRay:
    """Starts up to `workers` tasks at a time (0: one per GPU, or one); Ray decides where."""

    def __init__(self, command: Sequence[str], folder: Folder, workers: int = 0):
        try:
            import ray
        except ImportError:
            raise UserError(
                "--launcher ray needs Ray; install it with: pip install 'fedjax-sim[ray]'"
            ) from None
        self.ray, self.command, self.folder = ray, command, folder
        if not ray.is_initialized():
            ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False)
        have = ray.cluster_resources()
        gpus, cpus = int(have.get("GPU", 0)), int(have.get("CPU", 1))
        self.room = workers or gpus or 1
        share = max(1, cpus // self.room)
        self.needs = {"num_gpus": 1, "num_cpus": 1} if gpus else {"num_cpus": share}

    def start(self, job: Job) -> Any:
        log = self.folder.log(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        return self.ray.remote(**self.needs, max_retries=0)(task).remote(
            [*self.command, str(job.index)], str(log)
        )

    def poll(self, handle: Any) -> tuple[int, str] | None:
        ready, _ = self.ray.wait([handle], timeout=0)
        if not ready:
            return None
        try:
            return self.ray.get(handle)
        except Exception as problem:  # the node was lost, or the task was cancelled
            return 1, (first_line(problem) or type(problem).__name__)[:500]

    def stop(self, handle: Any) -> None:
        self.ray.cancel(handle)
