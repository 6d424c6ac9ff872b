"""`fs.sweep`: the Python form of `fedjax-sim sweep`; every run is a process of its own, and the
same call goes on."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.cli.parser import make_parser
from fedjax_sim.cli.sweep.command import sweep as run_sweep
from fedjax_sim.cli.sweep.plan import flattened
from fedjax_sim.errors import UserError
from fedjax_sim.notebook.rows import Rows
from fedjax_sim.runner.files import read_csv, write_bytes
from fedjax_sim.runner.own import load_file


def sweep(
    methods: str | pathlib.Path | Sequence[str],
    out: str | pathlib.Path,
    *,
    seeds: int | Sequence[int] = 1,
    grid: Mapping[str, Any] | None = None,
    preset: str | None = None,
    workers: int = 0,
    imports: Sequence[str | pathlib.Path] = (),
    progress: bool = False,
    **settings: Any,
) -> Rows:
    """Methods × grid × seeds, as `docs/sweep.md` has them; results.csv as rows (status, settings,
    every figure).

    methods: entries as `compare` takes them, or the path of a sweep file, which then says
    everything. out: the folder; what has ended there is not run again. grid: {"lr": [0.01, 0.1],
    "fedprox.mu": [0.1, 1]}; settings: the same in every run. imports: files that register methods
    of your own, since the runs are other processes.
    """
    folder = pathlib.Path(out)
    if isinstance(methods, (str, pathlib.Path)):
        if grid or settings or preset or seeds != 1:
            raise UserError(
                f"'{methods}' is a sweep file and says everything; methods of your own go as a list"
            )
        file = pathlib.Path(methods)
    else:
        parts: dict[str, Any] = {
            "methods": list(methods),
            "seeds": seeds if isinstance(seeds, int) else list(seeds),
        }
        file = folder / "asked.toml"
        told = {
            **parts,
            **({"preset": preset} if preset else {}),
            "settings": settings,
            "grid": grid or {},
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, toml(told).encode())
    words = [
        "sweep",
        str(file),
        "--out",
        str(folder),
        "--workers",
        str(workers),
        *([] if progress else ["--quiet"]),
    ]
    words += [word for path in imports for word in ("--import", str(path))]
    args = make_parser().parse_args(words)
    for path in imports:
        load_file(str(path))
    quiet = contextlib.nullcontext() if progress else contextlib.redirect_stdout(io.StringIO())
    notes = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    with quiet, notes:
        run_sweep(args)
    return Rows(
        {name: value(text) for name, text in row.items()}
        for row in read_csv(folder / "results.csv")
    )


def toml(data: Mapping[str, Any]) -> str:
    """Plain values and tables as TOML; JSON writes numbers, text, truth and lists as TOML does.

    >>> print(toml({"seeds": 2, "grid": {"fedprox.mu": [0.1, 1]}}))
    "seeds" = 2
    [grid]
    "fedprox.mu" = [0.1, 1]
    """
    try:
        line = lambda name, value: f"{json.dumps(str(name))} = {json.dumps(value, allow_nan=False)}"
        lines = [
            line(name, value) for name, value in data.items() if not isinstance(value, Mapping)
        ]
        for table, values in data.items():
            if isinstance(values, Mapping):
                lines += [
                    f"[{table}]",
                    *(line(name, value) for name, value in flattened(values).items()),
                ]
    except (TypeError, ValueError) as problem:
        raise UserError(f"a sweep holds numbers, text and lists of them: {problem}") from None
    return "\n".join(lines)


def value(text: str) -> Any:
    """A cell of a CSV file: a number where it is one, None where it is empty."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            pass
    return text or None
