"""Curves of results in memory, drawn like those of run directories."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.report import curves as drawn
from fedjax_sim.report.groups import grouped
from fedjax_sim.report.runs import Run, Table
from fedjax_sim.report.style import load_matplotlib

AGAINST = ("rounds", "bytes")


class Picture:
    """A figure that a notebook shows. `files`: the files it was written to, if any."""

    def __init__(self, png: bytes, files: Sequence[pathlib.Path] = ()):
        self.png, self.files = png, list(files)

    def __repr__(self) -> str:
        return f"Picture({', '.join(map(str, self.files)) or f'{len(self.png)} bytes of PNG'})"

    def _repr_png_(self) -> bytes:
        return self.png


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    number = lambda value: float(value) if isinstance(value, (int, float)) else np.nan
    return {name: np.array([number(row.get(name)) for row in rows]) for name in names}


def as_run(result: Any) -> Run:
    """A Result as `report` reads a run directory."""
    path = result.out or pathlib.Path(result.summary["method"])
    return Run(
        path,
        result.setup.experiment.flat(),
        as_table(result.rounds),
        as_table(result.rows),
        {},
        result.summary,
    )


@contextlib.contextmanager
def isolated_drawing() -> Iterator[None]:
    """Restore the caller's matplotlib backend and style afterwards."""
    matplotlib = load_matplotlib()
    backend = matplotlib.get_backend()
    with matplotlib.rc_context():
        yield
    matplotlib.use(backend)


def curves(
    results: Sequence[Any], path: str | pathlib.Path | None = None, against: str = "rounds"
) -> Picture:
    """Draw the accuracy of results against rounds or bytes, seeds of one method together. path:
    also write it there, as PNG and PDF."""
    lookup("axis", against, dict.fromkeys(AGAINST))
    groups = grouped([as_run(result) for result in results])
    if not drawn.measured(groups):
        raise UserError("there is no accuracy to draw: the run has no evaluated round")
    with isolated_drawing(), tempfile.TemporaryDirectory() as folder:
        target = (
            pathlib.Path(folder) / "curves" if path is None else pathlib.Path(path).with_suffix("")
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        files = drawn.accuracy(groups, target, against)
        png = next(file for file in files if file.suffix == ".png").read_bytes()
    return Picture(png, () if path is None else files)
