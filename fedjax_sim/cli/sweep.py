"""`fedjax-sim sweep`: read the file, run what has not ended with a launcher, show and write the
results."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from fedjax_sim.cli import commands
from fedjax_sim.cli.settings import as_path
from fedjax_sim.errors import UserError, expected
from fedjax_sim.options import names
from fedjax_sim.runner.sinks import named
from fedjax_sim.sweeps import pivots, plan
from fedjax_sim.sweeps.folder import DAMAGED, DONE, FAILED, Folder, waits, write_results
from fedjax_sim.sweeps.launchers import Local, OnRay, submit
from fedjax_sim.sweeps.plan import Job
from fedjax_sim.sweeps.queue import Launcher, command, end_with_parent, work_off
from fedjax_sim.sweeps.table import Table, emit, results
from fedjax_sim.sweeps.work import Worker

LAUNCHERS: dict[str, Callable[..., Launcher]] = {"local": Local, "ray": OnRay}


def check(args: argparse.Namespace) -> None:
    """Refuse options that have no effect together, and an unknown --log, before it fails every
    run."""
    if args.slurm and args.launcher != "slurm":
        raise UserError("--slurm has options for sbatch; it needs --launcher slurm")
    alone = {"--task": args.task is not None, "--dry-run": args.dry_run, "--gather": args.gather}
    others = alone | {"--workers": args.workers != 0, "--launcher": args.launcher != "local"}
    mode, *_ = [flag for flag, given in alone.items() if given] or [""]
    clash = [flag for flag, given in others.items() if given and flag != mode]
    if mode and clash:
        raise UserError(
            f"{mode} starts no other runs, so {clash[0]} has no meaning beside it; leave one of"
            " them out"
        )
    if args.read and not args.pivot:
        raise UserError("--read chooses the figure of --pivot; it needs --pivot ROWS,COLUMNS")
    named(names(args.log))


def sweep(args: argparse.Namespace) -> int:
    check(args)
    file = as_path(args.file)
    data = plan.read(file)
    jobs = plan.jobs_of(data)
    folder = Folder(as_path(args.out) if args.out else pathlib.Path("runs") / file.stem)
    if args.task is not None:
        return run_task(args, jobs, folder)
    if args.pivot:
        pivots.pivots(jobs, folder, args.pivot, args.read)  # errors come before anything runs
    if args.dry_run:
        for job in jobs:
            list_job(job, folder, args.json)
        return 0
    if folder.pending(jobs) and not args.gather:
        launch(args, data, jobs, folder)
    return show(args, jobs, folder)


def list_job(job: Job, folder: Folder, json: bool) -> None:
    status = folder.status(job)
    if json:
        which = dict(run=job.name, index=job.index, method=job.experiment.method.name)
        emit(status, **which, point=job.point)
        return
    settings = ", ".join(f"{k} {plan.as_text(v)}" for k, v in job.point.items())
    print(f"{job.index:5d}  {job.name}  {status}  {settings}".rstrip())


def launch(args: argparse.Namespace, data: dict[str, Any], jobs: list[Job], folder: Folder) -> None:
    """Run, or submit, the runs that have not ended."""
    todo = folder.pending(jobs)
    files = [str(as_path(file).resolve()) for file in args.imports]
    task = command(folder, args.log, files)
    again = f"fedjax-sim sweep {args.file} --out {folder.path}"
    if args.launcher == "slurm":
        folder.begin(data, jobs)
        ready = [job for job in todo if not waits(job, folder)]
        script, number = submit(ready, folder, task, args.workers, args.slurm)
        if len(ready) < len(todo):
            commands.note(
                f"{len(todo) - len(ready)} runs start from some of these; repeat the command when"
                " these have ended"
            )
        commands.note(f"submitted '{script}' as job {number}; gather with: {again} --gather")
        return
    launcher = LAUNCHERS[args.launcher](task, folder, args.workers)
    folder.begin(data, jobs)
    with folder.locked():
        ended = len(jobs) - len(todo)
        commands.note(f"{len(jobs)} runs in '{folder.path}', {ended} of them have ended")
        try:
            work_off(todo, jobs, folder, launcher, Table(jobs, folder, args.quiet, args.json))
        except KeyboardInterrupt:
            commands.note(f"interrupted; the same command resumes it: {again}")
            raise


def show(args: argparse.Namespace, jobs: list[Job], folder: Folder) -> int:
    """Write and print the results; returns 1 if a run failed."""
    written, status = write_results(folder, jobs), [folder.status(job) for job in jobs]
    number = {name: status.count(name) for name in (DONE, FAILED, DAMAGED)}
    if args.json:
        emit("end", runs=len(jobs), **number, results=str(written))
    else:
        pivot = pivots.written(jobs, folder, args.pivot, args.read) if args.pivot else ""
        last = f"written: {written}; figures: fedjax-sim report {folder.path}"
        print("\n".join(filter(None, [pivot if args.pivot else results(jobs, folder), last])))
    return 1 if number[FAILED] or number[DAMAGED] else 0


def run_task(args: argparse.Namespace, jobs: list[Job], folder: Folder) -> int:
    """Start or resume one run of the sweep in this process, unless it has ended."""
    if not 0 <= args.task < len(jobs):
        raise UserError(f"task {args.task} is not in the sweep; allowed: 0 to {len(jobs) - 1}")
    end_with_parent()
    job = jobs[args.task]
    if folder.summary(job):
        return 0
    try:
        commands.start(job.experiment)
        if job.before is not None and waits(job, folder):
            raise UserError(f"{job.name} starts from {job.before.name}, which has not ended")
        Worker(folder, **commands.output(args)).do(job)
    except Exception as problem:
        folder.fail(job, expected(problem) or f"{type(problem).__name__}: {problem}")
        raise
    folder.clear_failure(job)
    return 0
