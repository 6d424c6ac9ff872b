"""Weights & Biases: a run there for every run here. Works without a network: then its files wait
for `wandb sync`."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from fedjax_sim.errors import UserError
from fedjax_sim.runner.sinks import Segment, Sink, name_of, numbers

if TYPE_CHECKING:
    from fedjax_sim.runner.driver import ActiveRun


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

    def begin(self, run: ActiveRun, done: int) -> None:
        config = run.setup.config
        online = "WANDB_API_KEY" in os.environ
        self.runs[id(run)] = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedjax_sim"),
            name=run.directory.path.name if run.directory else name_of(run),
            id=None if not run.directory else f"{config.hash()}-{run.directory.path.name}",
            resume="allow",
            config=config.to_json(),
            dir=str(run.directory.path if run.directory else pathlib.Path(".")),
            mode=os.environ.get("WANDB_MODE", "online" if online else "offline"),
            reinit="create_new",
        )

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None:
        told: dict[int, dict[str, float]] = {}
        for kind, rows in (("round", segment.rounds), ("evaluation", segment.rows)):
            for row in rows:
                told.setdefault(int(row["round"]), {}).update(
                    {f"{kind}/{k}": v for k, v in numbers(row).items()}
                )
        for step, values in sorted(told.items()):
            self.runs[id(run)].log(values, step=step)

    def end(self, run: ActiveRun, summary: dict[str, Any]) -> None:
        self.runs[id(run)].summary.update(summary)

    def close(self) -> None:
        while self.runs:
            self.runs.popitem()[1].finish()
