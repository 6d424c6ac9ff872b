"""Run directories as arrays: what the figures are drawn from. Reads plain files only, no JAX."""

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
    stored: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # summary.json; {}: the run has not ended
    resolved: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of config.json: what was decided at its start

    @property
    def actions(self) -> Table:
        """Action name -> how many participants were given it, per round; {} without a
        controller."""
        names = [name.removeprefix("action_") for name in self.rounds if name.startswith("action_")]
        order = [name for name in ORDER if name in names] + [
            n for n in names if n not in (*ORDER, "entropy")
        ]
        return {name: self.rounds[f"action_{name}"] for name in order}

    @property
    def matrices(self) -> dict[str, np.ndarray]:
        """What was logged as a matrix per round, e.g. who mixes whose model: name -> [T, rows,
        columns]."""
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
        """[T, N, N] how much of whose model (second) went into a participant's (first) by a
        controller's weights; else None.

        Where the actions of a round with M participants are M + 1 weights: of those of the round
        before, and of itself.
        """
        ids, given = self.clients.get("acted_ids"), self.clients.get("acted_actions")
        if ids is None or given is None or given.ndim != 3 or given.shape[2] != ids.shape[1] + 1:
            return None
        out = np.full((len(ids), ids.max() + 1, ids.max() + 1), np.nan)
        for t in range(len(ids)):
            for who, weights in zip(ids[t], given[t], strict=True):
                for source, weight in zip([*ids[max(t - 1, 0)], who], weights, strict=True):
                    if (
                        who >= 0 and source >= 0
                    ):  # a client may be there twice: as itself and from the round before
                        out[t, who, source] = np.nansum([out[t, who, source], weight])
        return out

    def counted(self, name: str) -> np.ndarray | None:
        """[T] a column of rounds.csv, or the mean over clients of NAME_0, NAME_1, …; None where
        there is neither."""
        if name in self.rounds:
            return self.rounds[name]
        each = [v for column, v in self.rounds.items() if re.fullmatch(rf"{name}_\d+", column)]
        return np.mean(each, 0) if each else None

    @property
    def layers(self) -> Table:
        """Parameter group -> mean distance of the participants to the server's model, per round; {}
        where not logged."""
        return {
            n.removeprefix("layer_dist_"): v
            for n, v in self.rounds.items()
            if n.startswith("layer_dist_")
        }

    def points(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of an evaluated column, without gaps."""
        values = self.metrics.get(column, np.full(len(self.metrics["round"]), np.nan))
        known = ~np.isnan(values)
        return self.metrics["round"][known], values[known]

    def bytes_at(self, rounds: Any) -> Any:
        """Bytes down and up together until the end of each of `rounds`."""
        total = np.cumsum(self.rounds["bytes_down"] + self.rounds["bytes_up"])
        return np.interp(rounds, self.rounds["round"], total)

    def seconds_at(self, rounds: np.ndarray) -> np.ndarray:
        """Seconds until the end of each of `rounds`: of the simulated clock where one was kept,
        else of the real one."""
        if self.virtual:
            return np.interp(
                rounds, self.rounds["round"], np.cumsum(self.rounds["virtual_seconds"])
            )
        return np.array([seconds_at(int(r), self.segments) for r in rounds])

    @property
    def virtual(self) -> bool:
        return "virtual_seconds" in self.rounds

    @property
    def segments(self) -> list[dict[str, Any]]:
        return [
            dict(zip(self.timings, row, strict=True))
            for row in zip(*self.timings.values(), strict=True)
        ]

    @functools.cached_property
    def primary(self) -> Primary:
        """The metric by which the run is compared with others."""
        return Primary.read(self.stored if "primary" in self.stored else self.resolved)

    @functools.cached_property
    def others(self) -> dict[str, About]:
        """Columns of the other metrics, and how they are read."""
        abouts = self.stored.get("metrics_about") or self.resolved.get("metrics_about") or {}
        return {name: About(**about) for name, about in abouts.items()}

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; of a run that has not ended, what its rows tell so far."""
        if self.stored:
            return self.stored
        rows = [
            dict(zip(self.metrics, row, strict=True))
            for row in zip(*self.metrics.values(), strict=True)
        ]
        for row in rows:
            row |= dict(
                round=int(row["round"]), bytes_down=float(self.bytes_at(row["round"])), bytes_up=0.0
            )
        seen = self.segments if "seconds" in self.timings else []
        primary = self.primary
        over = ("mean", "pooled", "std", "worst10")
        last = {name: self.points(f"client_{primary.over}{name}")[1][-1:].tolist() for name in over}
        spans = sum(s["last_round"] - s["first_round"] + 1 for s in seen)
        return {
            **summary_figures(rows, primary),
            **progress_figures(rows, seen, primary=primary),
            **{
                primary.of_clients(name): value[0] if value else None
                for name, value in last.items()
            },
            **{k: self.resolved[k] for k in ("primary", "metrics_about") if k in self.resolved},
            "metrics": {
                name: float(v[-1]) for name in self.others if len(v := self.points(name)[1])
            },
            "rounds": int(self.rounds["round"][-1]),
            "seconds_per_round": sum(s["seconds"] for s in seen) / spans if spans else None,
            "bytes_down": float(self.rounds["bytes_down"].sum()),
            "bytes_up": float(self.rounds["bytes_up"].sum()),
        }

    @functools.cached_property
    def clients(self) -> Table:
        """clients.npz and labels.npz: per-client counts; {} where there are none."""
        out: Table = {}
        for name in ("clients.npz", "labels.npz"):
            try:
                with np.load(self.path / name, allow_pickle=False) as file:
                    out |= {key: file[key] for key in file.files}
            except Exception:  # not there, cut, no archive: nothing to draw
                continue
        return out

    def of_clients(self, mode: str) -> np.ndarray | None:
        """[E, N] the primary metric client by client at each evaluation, NaN for clients without
        rows; None: not kept."""
        count = self.clients.get(f"{mode}_count")
        kept = [n for n in self.clients if re.fullmatch(rf"{mode}_(?!at_|count$|rounds$)\w+", n)]
        if count is None or not kept:
            return None
        if f"{mode}_values" in kept:
            return self.clients[f"{mode}_values"]
        return self.clients[kept[0]] / np.where(count > 0, count, np.nan)

    def last_of_clients(self) -> tuple[str, np.ndarray]:
        """(evaluation mode, the primary metric of each client at the last evaluation); of those
        with rows. '' for none."""
        for mode in ("personal", "resident", "global_at_clients"):
            values = self.of_clients(mode)
            if values is not None and len(values) and np.isfinite(values[-1]).any():
                return mode, values[-1][np.isfinite(values[-1])]
        return "", np.zeros(0)


def table(content: bytes) -> Table:
    rows = csv_rows(content)
    number = lambda text: float(text) if text not in ("", None) else np.nan
    return {
        name: np.array([number(row[name]) for row in rows]) for name in (rows[0] if rows else {})
    }


def load_run(path: str | pathlib.Path) -> Run:
    """Read one run directory, every file as its manifest says; a sentence says what is missing or
    damaged."""
    path = pathlib.Path(path)
    files = run_directory.verified(path)
    try:
        content = json.loads(files[run_directory.CONFIG])
        config, resolved = content["config"], content.get("resolved", {})
        stored = json.loads(files.get(run_directory.SUMMARY, b"{}"))
        rounds, metrics, timings = (
            table(files.get(f"{name}.csv", b"")) for name in ("rounds", "metrics", "timings")
        )
        if not (
            isinstance(config["method"], str)
            and isinstance(stored, dict)
            and isinstance(resolved, dict)
        ):
            raise ValueError("its config.json or summary.json is none")
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise UserError(
            f"'{shown(str(path), 200)}' is not a run directory: {shown(str(problem), 200)}"
        ) from None
    if "round" not in rounds or "round" not in metrics:
        raise UserError(f"'{shown(str(path), 200)}' holds no round yet")
    return Run(path, config, rounds, metrics, timings, stored, resolved)


ORDER_FILE = "order.json"


def write_order(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Leave in `folder` in which order its folders were asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ORDER_FILE, list(names))


def read_order(folder: pathlib.Path) -> list[str]:
    """In which order the folders in `folder` were asked for, as far as it is known."""
    try:
        names = json.loads((folder / ORDER_FILE).read_bytes())
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    except (OSError, ValueError, RecursionError):
        return []


def run_folders(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """`path` if it is a run directory, or what is left of one, else those below it; what is inside
    one is its own."""
    for folder, inside, files in os.walk(path):
        typed = read_order(pathlib.Path(folder))
        inside.sort(key=lambda name: (typed.index(name) if name in typed else len(typed), name))
        if {run_directory.CONFIG, run_directory.MANIFEST, "rounds.csv"} & set(files):
            inside.clear()
            yield pathlib.Path(folder)


def load_runs(
    paths: Sequence[str | pathlib.Path], say: Callable[[str], None] = lambda text: None
) -> list[Run]:
    """The runs in several folders, of `compare` and `sweep` too. What is no run is skipped and
    said, unless it was named."""
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
    running = {name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in actions.items()}
    last = np.arange(1, len(next(iter(running.values()))))
    first = np.maximum(last - window, 0)
    recent = {name: sums[last] - sums[first] for name, sums in running.items()}
    total = np.maximum(sum(recent.values()), 1)
    return {name: values / total for name, values in recent.items()}
