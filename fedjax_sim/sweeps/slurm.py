"""Runs as tasks of a SLURM array job: the script is written into the folder and submitted."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from fedjax_sim.errors import UserError
from fedjax_sim.runner.files import write_bytes
from fedjax_sim.sweeps.folder import Folder
from fedjax_sim.sweeps.plan import Job


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
