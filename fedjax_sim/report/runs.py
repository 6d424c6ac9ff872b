"""Run directories as arrays, the input of all figures. Reads plain files only, no JAX."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.metrics.base import About, Primary
from fedjax_sim.options import shown
from fedjax_sim.runner import run_directory
from fedjax_sim.runner.figures import progress_figures, seconds_at, summary_figures
from fedjax_sim.runner.files import csv_rows, write_json

ORDER = ("full", "backbone", "head")  # as in the paper, not as the columns are sorted
Table = dict[str, np.ndarray]  # a column per name; empty cells are NaN


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: a row per round in `rounds`, per evaluated round in `metrics`, per segment in
    `timings`."""

    path: pathlib.Path
    config: dict[str, Any]
    rounds: Table
    metrics: Table
    timings: Table = dataclasses.field(default_factory=dict)
    # summary.json; {}: the run has not ended
    stored: dict[str, Any] = dataclasses.field(default_factory=dict)
    # of config.json: values resolved at the start
    resolved: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def actions(self) -> Table:
        """{action: number of participants that took it, per round}; {} without a controller."""
        found = after("action_", self.rounds)
        order = dict.fromkeys((*(name for name in ORDER if name in found), *found))
        return {name: found[name] for name in order if name != "entropy"}

    @property
    def matrices(self) -> dict[str, np.ndarray]:
        """{name: [T, rows, columns]} of logged matrices, e.g. mixing weights."""
        found: dict[str, dict[tuple[int, int], np.ndarray]] = {}
        for column, values in self.rounds.items():
            if cell := re.fullmatch(r"(.+)_(\d+)_(\d+)", column):
                found.setdefault(cell[1], {})[int(cell[2]), int(cell[3])] = values
        out = {}
        for name, cells in found.items():
            high, wide = (1 + max(at[axis] for at in cells) for axis in (0, 1))
            nothing = np.full(len(self.rounds["round"]), np.nan)
            out[name] = np.stack(
                [[cells.get((i, j), nothing) for j in range(wide)] for i in range(high)]
            ).transpose(2, 0, 1)
        mixed = self.mixtures
        return out if mixed is None else out | {"weights": mixed}

    @property
    def mixtures(self) -> np.ndarray | None:
        """[T, N, N] weight of a client's model (last axis) in that of a participant (second axis),
        if a controller chose it; else None.

        In a round with M participants an action is M + 1 weights: one for each participant of the
        round before, and one for the client itself.
        """
        ids, actions = self.clients.get("acted_ids"), self.clients.get("acted_actions")
        if ids is None or actions is None:
            return None
        if actions.ndim != 3 or actions.shape[2] != ids.shape[1] + 1:
            return None
        out = np.full((len(ids), ids.max() + 1, ids.max() + 1), np.nan)
        for t in range(len(ids)):
            for client, weights in zip(ids[t], actions[t], strict=True):
                for source, weight in zip([*ids[max(t - 1, 0)], client], weights, strict=True):
                    if client >= 0 and source >= 0:  # a client may be its own source twice: add
                        out[t, client, source] = np.nansum([out[t, client, source], weight])
        return out

    def counted(self, name: str) -> np.ndarray | None:
        """[T] a column of rounds.csv, or the mean over clients of NAME_0, NAME_1, …; None without
        either."""
        if name in self.rounds:
            return self.rounds[name]
        each = [v for column, v in self.rounds.items() if re.fullmatch(rf"{name}_\d+", column)]
        return np.mean(each, 0) if each else None

    @property
    def layers(self) -> Table:
        """{parameter group: mean distance of the participants to the server's model, per round}; {}
        if not logged."""
        return after("layer_dist_", self.rounds)

    def points(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of an evaluated column, without NaN."""
        values = self.metrics.get(column, np.full(len(self.metrics["round"]), np.nan))
        known = ~np.isnan(values)
        return self.metrics["round"][known], values[known]

    def bytes_at(self, rounds: Any) -> Any:
        """Bytes down and up together until the end of each of `rounds`."""
        total = np.cumsum(self.rounds["bytes_down"] + self.rounds["bytes_up"])
        return np.interp(rounds, self.rounds["round"], total)

    def seconds_at(self, rounds: np.ndarray) -> np.ndarray:
        """Seconds until the end of each of `rounds`, simulated if the run has a simulated clock."""
        if self.virtual:
            passed = np.cumsum(self.rounds["virtual_seconds"])
            return np.interp(rounds, self.rounds["round"], passed)
        return np.array([seconds_at(int(r), self.segments) for r in rounds])

    @property
    def virtual(self) -> bool:
        return "virtual_seconds" in self.rounds

    @property
    def segments(self) -> list[dict[str, Any]]:
        return rows_of(self.timings)

    @functools.cached_property
    def primary(self) -> Primary:
        """The metric by which the run is compared with others."""
        return Primary.read(self.stored if "primary" in self.stored else self.resolved)

    @functools.cached_property
    def others(self) -> dict[str, About]:
        """{column: unit and direction} of the other metrics."""
        abouts = self.stored.get("metrics_about") or self.resolved.get("metrics_about") or {}
        return {name: About(**about) for name, about in abouts.items()}

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; for a run that has not ended, the same figures from its rows."""
        if self.stored:
            return self.stored
        rows = rows_of(self.metrics)
        for row in rows:
            sent = float(self.bytes_at(row["round"]))
            row |= dict(round=int(row["round"]), bytes_down=sent, bytes_up=0.0)
        seen = self.segments if "seconds" in self.timings else []
        primary = self.primary
        over = ("mean", "pooled", "std", "worst10")
        last = {name: self.points(f"client_{primary.over}{name}")[1][-1:].tolist() for name in over}
        spans = sum(s["last_round"] - s["first_round"] + 1 for s in seen)
        return {
            **summary_figures(rows, primary),
            **progress_figures(rows, seen, primary=primary),
            **{primary.of_clients(name): v[0] if v else None for name, v in last.items()},
            **{k: self.resolved[k] for k in ("primary", "metrics_about") if k in self.resolved},
            "metrics": {k: float(v[-1]) for k in self.others if len(v := self.points(k)[1])},
            "rounds": int(self.rounds["round"][-1]),
            "seconds_per_round": sum(s["seconds"] for s in seen) / spans if spans else None,
            "bytes_down": float(self.rounds["bytes_down"].sum()),
            "bytes_up": float(self.rounds["bytes_up"].sum()),
        }

    @functools.cached_property
    def clients(self) -> Table:
        """Per-client counts in clients.npz and labels.npz; {} without any."""
        out: Table = {}
        for name in ("clients.npz", "labels.npz"):
            try:
                with np.load(self.path / name, allow_pickle=False) as file:
                    out |= {key: file[key] for key in file.files}
            except Exception:  # missing or damaged: nothing to draw
                continue
        return out

    def of_clients(self, mode: str) -> np.ndarray | None:
        """[E, N] the primary metric of each client at each evaluation, NaN for clients without
        rows; None if not stored."""
        count = self.clients.get(f"{mode}_count")
        kept = [n for n in self.clients if re.fullmatch(rf"{mode}_(?!at_|count$|rounds$)\w+", n)]
        if count is None or not kept:
            return None
        if f"{mode}_values" in kept:
            return self.clients[f"{mode}_values"]
        return self.clients[kept[0]] / np.where(count > 0, count, np.nan)

    def last_of_clients(self) -> tuple[str, np.ndarray]:
        """(evaluation mode, the primary metric of each client with rows at the last evaluation);
        mode '' for none."""
        for mode in ("personal", "resident", "global_at_clients"):
            values = self.of_clients(mode)
            if values is not None and len(values) and np.isfinite(values[-1]).any():
                return mode, values[-1][np.isfinite(values[-1])]
        return "", np.zeros(0)


def after(prefix: str, table: Table) -> Table:
    """The columns whose names begin so, by the rest of their names."""
    return {n.removeprefix(prefix): v for n, v in table.items() if n.startswith(prefix)}


def rows_of(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def table(content: bytes) -> Table:
    rows = csv_rows(content)
    number = lambda text: float(text) if text not in ("", None) else np.nan
    names = rows[0] if rows else ()
    return {name: np.array([number(row[name]) for row in rows]) for name in names}


def load_run(path: str | pathlib.Path) -> Run:
    """Read one run directory and check it against its manifest; a UserError says what is missing or
    damaged."""
    path = pathlib.Path(path)
    files = run_directory.verified(path)
    try:
        content = json.loads(files[run_directory.CONFIG])
        config, resolved = flat_config(content), content.get("resolved", {})
        stored = json.loads(files.get(run_directory.SUMMARY, b"{}"))
        rounds, metrics, timings = (
            table(files.get(f"{name}.csv", b"")) for name in ("rounds", "metrics", "timings")
        )
        read = isinstance(stored, dict) and isinstance(resolved, dict)
        if not (read and isinstance(config["method"], str)):
            raise ValueError("its config.json or summary.json cannot be read")
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise UserError(
            f"'{shown(str(path), 200)}' is not a run directory: {shown(str(problem), 200)}"
        ) from None
    if "round" not in rounds or "round" not in metrics:
        raise UserError(f"'{shown(str(path), 200)}' holds no round yet")
    return Run(path, config, rounds, metrics, timings, stored, resolved)


ORDER_FILE = "order.json"


def write_order(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Store the order in which the folders in `folder` were requested."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ORDER_FILE, list(names))


def read_order(folder: pathlib.Path) -> list[str]:
    """The order stored by `write_order`; [] without one."""
    try:
        names = json.loads((folder / ORDER_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def run_folders(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """`path` if it is a run directory, perhaps a damaged one, else all run directories below it;
    none inside another."""
    for folder, inside, files in os.walk(path):
        order = read_order(pathlib.Path(folder))
        inside.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
        if {run_directory.CONFIG, run_directory.MANIFEST, "rounds.csv"} & set(files):
            inside.clear()
            yield pathlib.Path(folder)


def load_runs(
    paths: Sequence[str | pathlib.Path], say: Callable[[str], None] = lambda text: None
) -> list[Run]:
    """The runs in several folders, also of `compare` and `sweep`. A damaged run is skipped and
    reported; it is an error if it was named itself."""
    runs: list[Run] = []
    seen: set[pathlib.Path] = set()
    for path in map(pathlib.Path, paths):
        if not path.is_dir():
            raise UserError(
                f"'{shown(str(path), 200)}' is not a run directory: there is no such folder"
            )
        for folder in run_folders(path):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                runs.append(load_run(folder))
            except UserError as problem:
                if folder == path:
                    raise
                say(f"left out: {problem}")
    if not runs:
        raise UserError(
            "there is no run directory that can be read in"
            f" {', '.join(shown(str(p), 200) for p in paths)}"
        )
    return runs


def windowed_shares(actions: Table, window: int = 10) -> Table:
    """Share of each action among the decisions of the last `window` rounds (fewer at the start).

    >>> windowed_shares({"a": np.array([2.0, 0.0, 0.0]), "b": np.array([0.0, 2.0, 2.0])}, window=2)[
    ...     "a"
    ... ].tolist()
    [1.0, 0.5, 0.0]
    """
    recent = {name: smooth(values, window) for name, values in actions.items()}
    total = np.asarray(sum(recent.values()))
    return {name: values / np.where(total > 0, total, 1) for name, values in recent.items()}


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values (fewer at the start).

    >>> smooth(np.array([1.0, 3.0, 5.0]), 2).tolist()
    [1.0, 2.0, 4.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(sums))
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)
