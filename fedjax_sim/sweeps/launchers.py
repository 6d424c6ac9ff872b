"""Where the runs of a sweep run: processes of this machine, tasks of a Ray cluster, a SLURM job."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from fedjax_sim.errors import UserError, first_line
from fedjax_sim.runner.files import write_bytes
from fedjax_sim.sweeps.folder import Folder
from fedjax_sim.sweeps.plan import Job
from fedjax_sim.sweeps.queue import child_environment, last_line, task

# ---- this machine: a run per accelerator, or per group of cores ----------------------------------
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


# ---- a Ray cluster with access to the folder: RAY_ADDRESS, or one on this machine ----------------
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


# ---- SLURM: the script is written into the folder and submitted ----------------------------------
def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in SLURM's notation.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in out)


def script(
    jobs: Sequence[Job], folder: Folder, command: Sequence[str], workers: int, options: str
) -> str:
    """The script of the array job. command: that of a task, without its number."""
    most = f"%{workers}" if workers else ""
    logs = folder.path.resolve() / "logs"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=sweep-{folder.path.name}",
        f"#SBATCH --array={ranges([job.index for job in jobs])}{most}",
        f"#SBATCH --chdir={shlex.quote(os.getcwd())}",
        f"#SBATCH --output={shlex.quote(str(logs / 'slurm-%A_%a.txt'))}",
        "#SBATCH --signal=B:TERM@120",  # a run saves itself two minutes before its time limit
        *(f"#SBATCH {option}" for option in separate(options)),
        f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"',
    ]
    return "\n".join(lines) + "\n"


def separate(options: str) -> list[str]:
    """Options of sbatch as lines of a script.

    >>> separate("--partition=gpu --time 2:00:00 -c 4")
    ['--partition=gpu', '--time 2:00:00', '-c 4']
    """
    try:
        found = shlex.split(options)
    except ValueError as problem:
        raise UserError(f"--slurm '{options}' cannot be read: {problem}") from None
    out: list[str] = []
    for argument in found:
        if argument.startswith("-") or not out:
            out.append(shlex.quote(argument))
        else:
            out[-1] += " " + shlex.quote(argument)
    if out and not out[0].startswith("-"):
        raise UserError(
            f"--slurm '{options}' cannot be read; use options of sbatch, e.g. --slurm"
            " '--partition=gpu -c 4'"
        )
    return out


def submit(
    jobs: Sequence[Job], folder: Folder, command: Sequence[str], workers: int, options: str
) -> tuple[pathlib.Path, str]:
    """Write and submit the job; returns (the script, the number of the job)."""
    file = folder.path / "sweep.sbatch"
    (folder.path / "logs").mkdir(parents=True, exist_ok=True)
    write_bytes(file, script(jobs, folder, command, workers, options).encode())
    tool = shutil.which("sbatch")
    if tool is None:
        raise UserError(
            f"--launcher slurm needs sbatch, which this machine does not have; submit '{file}' on"
            " one that has"
        )
    done = subprocess.run([tool, str(file)], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"code {done.returncode}"
        raise UserError(f"sbatch refused '{file}': {said.splitlines()[-1]}")
    found = re.search(r"(\d+)\s*$", done.stdout.strip())
    return file, found[1] if found else "?"
