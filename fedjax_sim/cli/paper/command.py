"""`fedjax-sim paper list | run | show`."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from fedjax_sim.cli import commands
from fedjax_sim.cli.settings import as_path, read_sets
from fedjax_sim.errors import lookup
from fedjax_sim.papers.tables import SCALES, Table, find, papers


def paper(args: argparse.Namespace) -> int:
    return {"list": listed, "run": run, "show": run}[args.what](args)


def listed(args: argparse.Namespace) -> int:
    """Print papers and their tables; for a table its rows and columns as --rows and --cols take
    them."""
    for text in args.tables or papers():
        if ":" in text:
            details(find(text))
            continue
        one = lookup("paper", text, papers())
        print(f"{one.key}: {one.title}. {one.about}")
        for table in one.tables.values():
            kind = "figure" if table.draw else "table"
            print(
                f"  {table.name:18s} {kind:7s} {len(table.rows)} × {len(table.cols)}  {table.title}"
            )
    return 0


def details(table: Table) -> None:
    print(f"{table.name}. {table.title}")
    for what, lines in (
        ("rows", table.rows),
        ("cols", table.cols),
        (f"extra {table.rank}", table.extra),
    ):
        width = max((len(line.key) for line in lines), default=0)
        print(f"  {what}:" if lines else f"  {what}: none")
        for line in lines:
            print(f"    {line.key:{width}s}  {line.label}")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of all runs on the command line."""
    out = read_sets(args.sets, "rounds=50 or fedprox.mu=0.1", dotted=False)
    given = {name: getattr(args, name) for name in ("rounds", "data_dir", "devices", "chunk")}
    return out | {name: value for name, value in given.items() if value is not None}


def run(args: argparse.Namespace) -> int:
    from fedjax_sim.cli.paper.cells import Choice, Planner, check, jobs_in
    from fedjax_sim.cli.paper.show import show
    from fedjax_sim.sweeps.folder import FAILED
    from fedjax_sim.sweeps.work import Shared, work_here

    lookup("scale", args.scale, dict.fromkeys(SCALES, ""))
    choice = Choice(args.scale, args.rows, args.cols, args.seeds, settings(args))
    check(choice.typed)
    plans = []
    root = as_path(args.out) if args.out else pathlib.Path("runs") / "papers"
    for name in args.tables:  # errors come before anything runs
        table = find(name)
        plans.append((table, list(Planner(table, choice).cells()), Shared(root / table.paper)))
    failed = False
    if args.what == "run":
        jobs = [(job, folder) for _, cells, folder in plans for job in jobs_in(cells)]
        if args.dry_run:
            for job, folder in jobs:
                print(f"{job.name}  {folder.status(job)}  {job.experiment.training.rounds} rounds")
            return 0
        if jobs:
            commands.start(jobs[0][0].experiment)
        for _, cells, folder in plans:
            try:
                work_here(jobs_in(cells), folder, **commands.output(args))
            except KeyboardInterrupt:
                commands.note("interrupted; the same command resumes it")
                raise
    for table, cells, folder in plans:
        show(table, choice, cells, folder, args.client)
        failed = failed or any(folder.status(job) == FAILED for job in jobs_in(cells))
    return 1 if failed and args.what == "run" else 0
