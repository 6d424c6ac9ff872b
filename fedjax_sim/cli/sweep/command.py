"""The command: read the file, leave out what has ended, hand the rest to a launcher, show and write
what came of it."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

from fedjax_sim.cli import commands
from fedjax_sim.cli.settings import own_path
from fedjax_sim.cli.several import Federations, execute_all, set_ups
from fedjax_sim.cli.sweep import pivots, plan, slurm
from fedjax_sim.cli.sweep.jobs import (
    DAMAGED,
    DONE,
    FAILED,
    Folder,
    pending,
    started,
    waits,
    write_results,
)
from fedjax_sim.cli.sweep.local import Local
from fedjax_sim.cli.sweep.on_ray import OnRay
from fedjax_sim.cli.sweep.plan import Job
from fedjax_sim.cli.sweep.queue import Launcher, end_with_parent, work_off
from fedjax_sim.cli.sweep.table import Table, results, tell
from fedjax_sim.cli.words import option_parser
from fedjax_sim.errors import UserError
from fedjax_sim.options import names
from fedjax_sim.runner.files import Lock, write_bytes
from fedjax_sim.runner.sinks import named

LAUNCHERS: dict[str, Callable[..., Launcher]] = {"local": Local, "ray": OnRay}


def check(args: argparse.Namespace) -> None:
    """Options that would say nothing beside others are refused; so is a log that nobody knows,
    before it fails every run."""
    if args.slurm and args.launcher != "slurm":
        raise UserError("--slurm has options for sbatch; it needs --launcher slurm")
    mode = next(
        (m for m in ("task", "dry_run", "gather") if getattr(args, m) not in (None, False)), None
    )
    others = {
        "task": args.task is not None,
        "dry_run": args.dry_run,
        "gather": args.gather,
        "workers": args.workers != 0,
    }
    others["launcher"] = args.launcher != "local"
    clash = next((name for name, given in others.items() if given and mode and name != mode), None)
    if clash is not None and mode is not None:
        flag = lambda name: f"--{name.replace('_', '-')}"
        raise UserError(
            f"{flag(mode)} starts no other runs, so {flag(clash)} has no meaning beside it; leave"
            " one of them out"
        )
    if args.read and not args.pivot:
        raise UserError(
            "--read says how the figures of --pivot are read; it needs --pivot ROWS,COLUMNS"
        )
    named(names(args.log))


def sweep(args: argparse.Namespace) -> int:
    check(args)
    file = own_path(args.file)
    jobs = plan.jobs_of(plan.read(file))
    folder = Folder(own_path(args.out) if args.out else pathlib.Path("runs") / file.stem)
    if args.task is not None:
        return run_task(args, jobs, folder)
    if args.pivot:
        pivots.pivots(jobs, folder, args.pivot, args.read)  # mistakes are said before anything runs
    todo = pending(folder, jobs)
    if args.dry_run:
        for job in jobs:
            if args.json:
                tell(
                    folder.status(job),
                    run=job.name,
                    index=job.index,
                    method=job.config.method,
                    point=job.point,
                )
                continue
            settings = ", ".join(f"{k} {v}" for k, v in job.point.items())
            print(f"{job.index:5d}  {job.name}  {folder.status(job)}  {settings}".rstrip())
        return 0
    if todo and not args.gather:
        command = [
            sys.executable,
            "-m",
            "fedjax_sim",
            "sweep",
            str(folder.path.resolve() / "sweep.toml"),
        ]
        command += ["--out", str(folder.path.resolve()), *commands.passed_on(args), "--task"]
        if args.launcher == "slurm":
            begin(file, folder, jobs)
            ready = [job for job in todo if not waits(job, folder)]
            script, number = slurm.submit(ready, folder, command, args.workers, args.slurm)
            if len(ready) < len(todo):
                commands.note(
                    f"{len(todo) - len(ready)} runs start from some of these; repeat the command"
                    " when they have ended"
                )
            commands.note(
                f"submitted '{script}' as job {number}; gather with: fedjax-sim sweep {file} --out"
                f" {folder.path} --gather"
            )
        else:
            launcher = LAUNCHERS[args.launcher](
                lambda job: [*command, str(job.index)], folder, args.workers
            )
            begin(file, folder, jobs)
            lock = Lock(folder.path)
            lock.take()  # two sweeps in one folder would start the same runs
            commands.note(
                f"{len(jobs)} runs in '{folder.path}', {len(jobs) - len(todo)} of them have ended"
            )
            try:
                work_off(todo, jobs, folder, launcher, Table(jobs, folder, args.quiet, args.json))
            except KeyboardInterrupt:
                commands.note(
                    f"interrupted; the same command goes on: fedjax-sim sweep {file} --out"
                    f" {folder.path}"
                )
                raise
            finally:
                lock.release()
    written, status = write_results(folder, jobs), [folder.status(job) for job in jobs]
    if args.json:
        tell(
            "end",
            runs=len(jobs),
            done=status.count(DONE),
            failed=status.count(FAILED),
            damaged=status.count(DAMAGED),
            results=str(written),
        )
    else:
        shown = (
            pivots.written(jobs, folder, args.pivot, args.read)
            if args.pivot
            else results(jobs, folder)
        )
        print(
            "\n".join(
                filter(
                    None, [shown, f"written: {written}; figures: fedjax-sim report {folder.path}"]
                )
            )
        )
    return 1 if FAILED in status or DAMAGED in status else 0


def begin(file: pathlib.Path, folder: Folder, jobs: list[Job]) -> None:
    """The folder, with a copy of the file: a task reads the same runs in the same order."""
    from fedjax_sim.report.runs import write_order

    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"'{folder.path}' cannot be made: {problem.strerror}") from None
    if (folder.path / "config.json").exists():
        raise UserError(f"'{folder.path}' is a run directory; choose another --out")
    write_bytes(folder.path / "sweep.toml", file.read_bytes())
    write_order(folder.path / "runs", [job.name for job in jobs])


def run_task(args: argparse.Namespace, jobs: list[Job], folder: Folder) -> int:
    """One run of the sweep, in this process: begun, or gone on with, or left alone if it has
    ended."""
    if not 0 <= args.task < len(jobs):
        raise UserError(f"task {args.task} is not in the sweep; allowed: 0 to {len(jobs) - 1}")
    end_with_parent()
    job = jobs[args.task]
    if folder.summary(job):
        return 0
    try:
        commands.start(job.config)
        own = option_parser().parse_args([])  # one seed, no dry run
        if job.before is not None and waits(job, folder):
            raise UserError(f"{job.name} starts from {job.before.name}, which has not ended")
        setups = set_ups(started(job, folder), own, Federations(), commands.note)
        folder.run(job).parent.mkdir(parents=True, exist_ok=True)
        execute_all(setups, own, folder.run(job), **commands.talk(args))
        folder.own(job)  # not before: another configuration there is refused
    except Exception as problem:
        from fedjax_sim.cli.main import expected

        folder.fail(job, expected(problem) or f"{type(problem).__name__}: {problem}")
        raise
    folder.forgive(job)
    return 0
