"""Where a run's numbers go while it runs: one interface for files, progress, TensorBoard, Weights &
Biases, a callback.

The driver tells every sink of every run: begin, compiling, waiting, compiled, then segment after
segment, and the end. Sinks are told in process 0 only. The CSV files are always there (`Files`);
the others are asked for by name (`SINKS`) or given.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedjax_sim.errors import lookup

if TYPE_CHECKING:
    from fedjax_sim.runner.driver import ActiveRun


@dataclasses.dataclass(frozen=True)
class Segment:
    """What one call of the compiled program brought: rounds first..last."""

    first: int
    last: int
    total: int  # rounds of the whole run
    seconds: float
    rounds: list[dict[str, Any]]  # a row per round, as in rounds.csv
    rows: list[dict[str, Any]]  # a row per evaluated round, as in metrics.csv
    method: str = ""
    seed: int = 0


class Sink:
    """Does nothing; say only what you want to hear of."""

    def begin(self, run: ActiveRun, done: int) -> None:
        """A run starts, or goes on after `done` rounds."""

    def compiling(self, run: ActiveRun) -> None: ...

    def waiting(self, run: ActiveRun, seconds: float) -> None:
        """It compiles, for so many seconds so far; told several times a second."""

    def compiled(self, run: ActiveRun, seconds: float) -> None: ...

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None: ...

    def end(self, run: ActiveRun, summary: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Also after a failure or an interrupt."""


class Files(Sink):
    """metrics.csv, rounds.csv, timings.csv, clients.npz of the run directory."""

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None:
        self.write(run, timings)

    def write(self, run: ActiveRun, timings: list[dict[str, Any]]) -> None:
        if run.directory is not None:
            run.directory.write(run.recorder, timings)


class Callback(Sink):
    """Your function, called with every `Segment`; what it raises ends the run."""

    def __init__(self, call: Callable[[Segment], Any]):
        self.call = call

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None:
        self.call(segment)


def name_of(run: ActiveRun) -> str:
    """A run among others."""
    return f"{run.setup.config.method} seed {run.setup.config.seed}"


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """What can be drawn over rounds.

    >>> numbers({"round": 3, "global_acc": 0.5, "val_acc": float("nan")})
    {'global_acc': 0.5}
    """
    return {
        k: float(v)
        for k, v in row.items()
        if k != "round" and isinstance(v, (int, float)) and v == v
    }


# name -> (module, class, one line)
SINKS: dict[str, tuple[str, str, str]] = {
    "tensorboard": (
        "tensorboard",
        "TensorBoard",
        "event files in the run directory (look at them with tensorboard)",
    ),
    "wandb": (
        "wandb_run",
        "WandB",
        "Weights & Biases; offline unless WANDB_MODE or WANDB_API_KEY says otherwise",
    ),
}


def named(names: Sequence[str]) -> list[Sink]:
    """The sinks with these names; a missing package is a sentence."""
    found = [lookup("log", name, SINKS) for name in names]
    return [
        getattr(importlib.import_module(f"fedjax_sim.runner.{module}"), kind)()
        for module, kind, _ in found
    ]
