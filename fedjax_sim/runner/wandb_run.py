"""Weights & Biases: a run there for every run here. Works without a network: then its files wait
for `wandb sync`."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from fedjax_sim.errors import UserError
from fedjax_sim.runner.sinks import Segment, Sink, name_of, numbers

if TYPE_CHECKING:
    from fedjax_sim.runner.driver import Lane


class WandB(Sink):
    """Project WANDB_PROJECT or fedjax_sim; files in OUT/wandb."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "--log wandb needs Weights & Biases; install it with: pip install"
                " 'fedjax-sim[wandb]'"
            ) from None
        self.wandb = wandb
        self.runs: dict[int, Any] = {}

    def begin(self, lane: Lane, done: int) -> None:
        config = lane.setup.experiment
        online = "WANDB_API_KEY" in os.environ
        self.runs[id(lane)] = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedjax_sim"),
            name=lane.directory.path.name if lane.directory else name_of(lane),
            id=None if not lane.directory else f"{lane.setup.hash}-{lane.directory.path.name}",
            resume="allow",
            config=config.flat(),
            dir=str(lane.directory.path if lane.directory else pathlib.Path(".")),
            mode=os.environ.get("WANDB_MODE", "online" if online else "offline"),
            reinit="create_new",
        )

    def segment(self, lane: Lane, segment: Segment, timings: list[dict[str, Any]]) -> None:
        told: dict[int, dict[str, float]] = {}
        for kind, rows in (("round", segment.rounds), ("evaluation", segment.rows)):
            for row in rows:
                told.setdefault(int(row["round"]), {}).update(
                    {f"{kind}/{k}": v for k, v in numbers(row).items()}
                )
        for step, values in sorted(told.items()):
            self.runs[id(lane)].log(values, step=step)

    def end(self, lane: Lane, summary: dict[str, Any]) -> None:
        self.runs[id(lane)].summary.update(summary)

    def close(self) -> None:
        while self.runs:
            self.runs.popitem()[1].finish()
