"""The files of a comparison: its run directories, and compare.json, .csv, .md and .tex."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

from fedjax_sim.report import curves, tables, text
from fedjax_sim.report.groups import grouped
from fedjax_sim.report.runs import ORDER_FILE, load_runs
from fedjax_sim.runner import run_directory
from fedjax_sim.runner.files import csv_bytes, write_bytes, write_json


def folder_of(entry: str) -> str:
    """The name of an entry's folder.

    >>> folder_of("fedavg"), folder_of("fedprox:mu=0.1,dataset=a/b.npz")
    ('fedavg', 'fedprox,mu=0.1,dataset=a_b.npz')
    """
    return re.sub(r"[^\w.=,+-]", "_", entry.replace(":", ",", 1))[:100]


def is_comparison(folder: pathlib.Path) -> bool:
    """Whether `folder` holds run directories of `compare` or `--seeds`, or only empty folders for
    them."""
    if any(folder.glob("*/config.json")) or any(folder.glob("*/seed-*/config.json")):
        return True
    # empty folders remain after a kill before the first file
    started = lambda path: path.is_dir() and all(map(run_directory.empty, path.iterdir()))
    inside = [p for p in folder.iterdir() if p.name != ORDER_FILE] if folder.is_dir() else []
    return folder.is_dir() and all(run_directory.empty(path) or started(path) for path in inside)


def write(
    out: pathlib.Path,
    paths: Sequence[pathlib.Path],
    summaries: list[dict[str, Any]],
    differs: dict[str, dict[str, Any]],
) -> list[pathlib.Path]:
    """Write compare.json, .csv, .md and .tex, and the curves if matplotlib is installed."""
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
    record = dict(
        relative_gain=text.gains(summaries), differs=named, statistics=statistics, runs=summaries
    )
    write_json(out / "compare.json", record)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_bytes(out / "compare.csv", csv_bytes(columns, rows))
    write_bytes(out / "compare.md", tables.markdown(groups).encode())
    write_bytes(out / "compare.tex", tables.latex(groups).encode())
    files = [out / f"compare.{kind}" for kind in ("json", "csv", "md", "tex")]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return files
    return files + curves.accuracy(groups, out / "curves")
