"""Runs as processes on this machine: each on its own accelerator, or on its own group of cores."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.sweeps.folder import Folder
from fedjax_sim.sweeps.plan import Job
from fedjax_sim.sweeps.queue import child_environment, last_line

T = TypeVar("T", int, str)


def accelerators() -> list[str]:
    """The visible NVIDIA devices, named as in CUDA_VISIBLE_DEVICES; [] for none."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    if os.environ.get("JAX_PLATFORMS", "") == "cpu" or not (tool := shutil.which("nvidia-smi")):
        return []
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True).stdout
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shares(items: Sequence[T], number: int) -> list[list[T]]:
    """`items` in `number` consecutive groups of nearly equal size.

    >>> shares([0, 1, 2, 3, 4], 2)
    [[0, 1, 2], [3, 4]]
    """
    return [part.tolist() for part in np.array_split(np.array(items), number)]


class Local:
    """Starts up to `workers` processes; 0: one per accelerator, or one for all cores."""

    def __init__(self, command: Sequence[str], folder: Folder, workers: int = 0):
        self.command, self.folder = command, folder
        devices, every = accelerators(), cores()
        self.room = workers or len(devices) or 1
        most = len(devices) or len(every)
        if self.room > most:
            kind = "accelerators" if devices else "cores"
            raise UserError(f"workers {self.room} is more than the {most} {kind} there are")
        self.devices = shares(devices, self.room) if devices else []
        self.cores = shares(every, self.room)
        self.free = list(range(self.room))

    def start(self, job: Job) -> Any:
        slot = self.free.pop(0)
        env = child_environment()
        if self.devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[slot])
        self.folder.log(job).parent.mkdir(parents=True, exist_ok=True)
        log = self.folder.log(job).open("w", encoding="utf-8")
        process = subprocess.Popen(
            [*self.command, str(job.index)], stdout=log, stderr=subprocess.STDOUT, env=env
        )
        log.close()
        if hasattr(os, "sched_setaffinity") and self.room > 1:
            try:
                os.sched_setaffinity(process.pid, self.cores[slot])  # before it starts JAX
            except OSError:
                pass  # it has already ended
        return process, slot, job

    def poll(self, handle: Any) -> tuple[int, str] | None:
        process, slot, job = handle
        code = process.poll()
        if code is None:
            return None
        if slot not in self.free:
            self.free.append(slot)
        return code, last_line(self.folder.log(job).read_text(encoding="utf-8", errors="replace"))

    def stop(self, handle: Any) -> None:
        handle[0].send_signal(signal.SIGTERM)
