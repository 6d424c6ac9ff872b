"""Run directories as arrays: what the figures are drawn from. Reads the CSV files only, no JAX."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.runner.files import read_csv

ORDER = ("full", "backbone", "head")  # as in the paper, not as the columns are sorted


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: a column per name, a row per round (`rounds`) or per evaluated round (`metrics`); empty cells are NaN."""

    label: str
    path: pathlib.Path
    config: dict[str, Any]
    rounds: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]

    @property
    def actions(self) -> dict[str, np.ndarray]:
        """Action name -> how many participants were given it, per round; {} without a controller."""
        names = [name.removeprefix("action_") for name in self.rounds if name.startswith("action_")]
        order = [name for name in ORDER if name in names] + [n for n in names if n not in (*ORDER, "entropy")]
        return {name: self.rounds[f"action_{name}"] for name in order}


def table(path: pathlib.Path) -> dict[str, np.ndarray]:
    rows = read_csv(path)
    number = lambda text: float(text) if text not in ("", None) else np.nan
    return {name: np.array([number(row[name]) for row in rows]) for name in (rows[0] if rows else {})}


def load_run(path: str | pathlib.Path) -> Run:
    """Read one run directory; its label is its method, with the agent if it has one."""
    path = pathlib.Path(path)
    try:
        config = json.loads((path / "config.json").read_text())["config"]
        rounds, metrics = table(path / "rounds.csv"), table(path / "metrics.csv")
    except (OSError, ValueError, KeyError) as problem:
        raise UserError(f"'{path}' is not a finished run directory: {problem}") from None
    if "round" not in rounds or "round" not in metrics:
        raise UserError(f"'{path}' holds no round yet")
    agent = config.get("options", {}).get("agent")
    return Run(config["method"] + (f" ({agent})" if agent else ""), path, config, rounds, metrics)


def load_runs(paths: Sequence[str | pathlib.Path]) -> list[Run]:
    """Several runs; equal labels are told apart by their directories.

    A directory without config.json, as `compare` writes it, stands for the run directories inside it.
    """
    found: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        inside = sorted(p.parent for p in path.glob("*/config.json"))
        found += [path] if (path / "config.json").exists() or not inside else inside
    runs = [load_run(path) for path in found]
    labels = [run.label for run in runs]
    return [
        run if labels.count(run.label) == 1 else dataclasses.replace(run, label=f"{run.label} {run.path.name}")
        for run in runs
    ]


def windowed_shares(actions: dict[str, np.ndarray], window: int = 10) -> dict[str, np.ndarray]:
    """Share of each action among the decisions of the last `window` rounds (fewer at the start).

    >>> windowed_shares({"a": np.array([2.0, 0.0, 0.0]), "b": np.array([0.0, 2.0, 2.0])}, window=2)["a"].tolist()
    [1.0, 0.5, 0.0]
    """
    running = {name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in actions.items()}
    last = np.arange(1, len(next(iter(running.values()))))
    first = np.maximum(last - window, 0)
    recent = {name: sums[last] - sums[first] for name, sums in running.items()}
    total = np.maximum(sum(recent.values()), 1)
    return {name: values / total for name, values in recent.items()}
