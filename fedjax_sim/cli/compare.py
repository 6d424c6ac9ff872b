"""`fedjax-sim compare`: several runs on the same draws, each with options of its own, in one table
and in files."""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from fedjax_sim.cli import commands
from fedjax_sim.cli.settings import make_config, output_directory
from fedjax_sim.cli.several import Federations, execute_all, set_ups
from fedjax_sim.cli.words import OF_THE_COMMAND, ONE_PROCESS, applied, read_entry, words
from fedjax_sim.errors import UserError


def folder_of(entry: str) -> str:
    """The name of an entry's folder.

    >>> folder_of("fedavg"), folder_of("fedprox:mu=0.1,dataset=a/b.npz")
    ('fedavg', 'fedprox,mu=0.1,dataset=a_b.npz')
    """
    return re.sub(r"[^\w.=,+-]", "_", entry.replace(":", ",", 1))[:100]


def entries(args: argparse.Namespace) -> list[tuple[str, Any, argparse.Namespace]]:
    """(entry as it was written, its Config, its options) of everything that is compared."""
    read = [(entry, *read_entry(entry)) for entry in args.methods]
    out: list[tuple[str, Any, argparse.Namespace]] = []
    for entry, method, settings in read:
        own = applied(args, words(method, settings, OF_THE_COMMAND | ONE_PROCESS))
        out.append((entry, make_config(own, method, [m for _, m, _ in read]), own))
    for i, (entry, config, _) in enumerate(out):
        for other, before, _ in out[:i]:
            if config.hash() == before.hash() or folder_of(entry) == folder_of(other):
                raise UserError(
                    f"'{other}' and '{entry}' are the same run; compare names each once"
                )
    return out


def compare(args: argparse.Namespace) -> int:
    told = entries(args)
    out = output_directory(args, "compare", told[0][1])
    commands.start(told[0][1], args)
    from fedjax_sim.cli import describe
    from fedjax_sim.methods import make_method
    from fedjax_sim.report.runs import write_order
    from fedjax_sim.runner.config import check
    from fedjax_sim.transforms import transformed

    for _, config, _ in told:  # what is wrong in itself is said before any data are read
        check(config)
        transformed(make_method(config.method, **config.options), config.transforms)
    feds, speech = Federations(), commands.talk(args)
    ready = [
        (entry, set_ups(config, own, feds, commands.note)) for entry, config, own in told
    ]  # all, before one trains
    differs = describe.differing({entry: setups[0] for entry, setups in ready})
    if not args.dry_run and commands.first_process():
        write_order(out, [folder_of(entry) for entry, _ in ready])
    results: list[Any] = []
    lines, summaries = [], []
    seen: list[Any] = []  # federations that have been described
    for entry, setups in ready:
        fed = setups[0].fed
        commands.foretell(setups[0], args, data=not any(fed is other for other in seen))
        seen.append(fed)
        if args.dry_run:
            continue
        runs = execute_all(
            setups, args, out / folder_of(entry), again=commands.the_same(args, out), **speech
        )
        results += runs
        summaries += [r.summary | {"method": entry} for r in runs]
        if args.seeds > 1:
            lines.append(f"{entry} {describe.seeds_line([r.summary for r in runs])}")
    for line in describe.differing_lines(differs):
        commands.say(line)
    if results:
        commands.tables(summaries, args.seeds)
        commands.say(describe.gains_line(summaries))
        for line in lines or [describe.speed_line(s) for s in summaries]:
            commands.say(line)
        files = (
            write(out, [r.out for r in results], summaries, differs)
            if commands.first_process()
            else []
        )
        commands.say(f"run directories: {', '.join(str(r.out) for r in results)}")
        commands.say(f"written: {', '.join(map(str, files))}; figures: fedjax-sim report {out}")
    return 0


def write(
    out: pathlib.Path,
    paths: Sequence[pathlib.Path],
    summaries: list[dict[str, Any]],
    differs: dict[str, dict[str, Any]],
) -> list[pathlib.Path]:
    """compare.json, .csv, .md and .tex, and the curves where matplotlib is installed."""
    from fedjax_sim.cli import describe
    from fedjax_sim.report import curves, tables
    from fedjax_sim.report.groups import grouped
    from fedjax_sim.report.runs import load_runs
    from fedjax_sim.runner.files import csv_bytes, write_bytes, write_json

    groups = grouped(load_runs(paths))
    rows = tables.rows_of(groups)
    statistics = [
        {"method": g.label, "setting": g.scene, "seeds": [run.config["seed"] for run in g.runs]}
        | {"figures": {name: cell._asdict() for name, cell in tables.statistics(g).items()}}
        for g in groups
    ]
    named = {
        name: {entry: str(value) for entry, value in values.items()}
        for name, values in differs.items()
    }
    told = {
        "relative_gain": describe.gains(summaries),
        "differs": named,
        "statistics": statistics,
        "runs": summaries,
    }
    write_json(out / "compare.json", told)
    write_bytes(
        out / "compare.csv",
        csv_bytes(list(dict.fromkeys(name for row in rows for name in row)), rows),
    )
    write_bytes(out / "compare.md", tables.markdown(groups).encode())
    write_bytes(out / "compare.tex", tables.latex(groups).encode())
    files = [out / f"compare.{kind}" for kind in ("json", "csv", "md", "tex")]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return files
    return files + curves.accuracy(groups, out / "curves")
