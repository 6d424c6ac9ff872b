"""The result of a run in memory: rows, State, and methods for a notebook."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedjax_sim.data.arrays import check_inputs
from fedjax_sim.engine import predictor
from fedjax_sim.metrics.base import Primary
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.weights import save_net
from fedjax_sim.tasks import task_called
from fedjax_sim.types import State, Tree


@dataclasses.dataclass(repr=False)
class Result:
    """The result of a run: evaluated rows, per-round rows, per-client counts, the summary, the
    final State."""

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    clients: dict[str, np.ndarray]
    state: State
    setup: Setup
    out: pathlib.Path | None = None
    program: Callable | None = None  # the compiled rounds, for further seeds of the same set-up

    def __repr__(self) -> str:
        s = self.summary
        primary = Primary.read(s)
        rows = s.get("client_rows", {}).get("split")
        of_clients = f"clients ({rows} rows)" if rows else "clients"
        found = {"global": s.get("last_global"), of_clients: s.get(primary.of_clients("mean"))}
        shown = ", ".join(
            f"{name} {primary.about.text(v, sign=True)}"
            for name, v in found.items()
            if v is not None
        )
        measured = (
            shown if primary.label == "accuracy" else f"{primary.label} {shown}" if shown else ""
        )
        what = f"{s['method']} on {s['dataset']}, {s['rounds']} rounds, seed {s['seed']}"
        return (
            f"Result({what}:"
            f" {measured or 'nothing measured'}{f', in {str(self.out)!r}' if self.out else ''})"
        )

    @functools.cached_property
    def net(self) -> Tree:
        """The final common net: {"params": {group: …}, "batch_stats": {…}}, NumPy arrays.
        `fs.save_net` writes it."""
        return predictor.global_net(self.setup.simulation, self.state)

    def personal(self, client: int) -> Tree:
        """ONE client's own predictor at the end: a net, or whatever the method's `predict`
        takes."""
        return predictor.personal(self.setup.simulation, self.state, client)

    def predict(
        self, x: npt.ArrayLike, client: int | None = None, *, logits: bool = False
    ) -> np.ndarray:
        """Predicted classes [B] of raw examples, as they are in the dataset; they are normalised as
        in training. Other tasks: numbers [B, K], labels [B, K], a token for every place [B, T].

        client: predict with this client's own model instead of the common one. logits: return
        scores [B, classes].
        """
        sim = self.setup.simulation
        x = predictor.normalised(
            self.setup.fed, check_inputs(x, "x", self.setup.fed.task), sim.env.dtype
        )
        net = self.net if client is None else self.personal(client)
        scores = predictor.logits(sim, net, x, client is not None)
        return scores if logits else task_called(self.setup.fed.task).read(scores)

    def save_net(self, path: str | pathlib.Path) -> None:
        """The final common net as .npz: `fs.run(…, init=path)` starts from it."""
        save_net(path, self.net)
