"""What a run gives back in memory: the Result of all of it, or a Step for every round."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from fedjax_sim.data.arrays import check_inputs
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine import predictor
from fedjax_sim.engine.records import Data
from fedjax_sim.engine.round import one_round
from fedjax_sim.errors import UserError
from fedjax_sim.metrics.base import Primary
from fedjax_sim.platform import floats
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.recorder import Recorder
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


# ---- round by round ------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, repr=False)
class Step:
    """One round and its results, as NumPy arrays. P: participants that reported."""

    round: int  # from 1
    ids: np.ndarray  # [P] clients that reported, in the order they were drawn
    uploads: Tree  # nets [P, …] that they uploaded
    weights: np.ndarray  # [P] their weights in the mean
    log: dict[str, Any]  # the row of rounds.csv
    state: State  # after the round
    setup: Setup

    def __repr__(self) -> str:
        return (
            f"Step(round {self.round}: {len(self.ids)} uploads, training loss"
            f" {self.log['train_loss']:.4g})"
        )

    @property
    def server(self) -> Tree:
        """The server's state after the round: by convention a record with the common model in
        `net`."""
        return layouts.as_numpy(self.state.server)

    @functools.cached_property
    def net(self) -> Tree:
        """The common net after the round, as it is evaluated."""
        return predictor.global_net(self.setup.simulation, self.state)

    def personal(self, client: int) -> Tree:
        """ONE client's own predictor after the round: a net, or whatever the method's `predict`
        takes."""
        return predictor.personal(self.setup.simulation, self.state, client)

    def upload(self, client: int) -> Tree:
        """The net that `client` uploaded in this round."""
        places = np.flatnonzero(self.ids == client)
        if not len(places):
            raise UserError(
                f"client {client} did not report in round {self.round}; those who did:"
                f" {self.ids.tolist()}"
            )
        return jax.tree.map(lambda a: a[places[0]], self.uploads)


def steps_of(setup: Setup) -> Iterator[Step]:
    """The rounds of a prepared run, one by one."""
    train, dtype = setup.experiment.training, setup.experiment.compute.dtype
    sim, recorder = setup.simulation, Recorder(setup)
    r = dataclasses.replace(sim.stages, stacks=True)

    def advance(state: State, data: Data) -> tuple:
        state, log, outcome, ids = one_round(r, sim.open(data), state, data.dropout)
        return state, log, ids, outcome.reports["ok"], outcome.reports["weight"], outcome.stacked

    program = jax.jit(advance)
    with floats(dtype):
        state, data = layouts.place(sim.layout, setup.first_state(), sim.data)
    for number in range(1, train.rounds + 1):
        with floats(dtype):  # not around the yield: the caller's code keeps its own precision
            state, *results = program(state, data)
        log, ids, ok, weights, nets = layouts.as_numpy(results)
        recorder.add_rounds({name: value[None] for name, value in log.items()}, 1)
        uploads = jax.tree.map(lambda a: a[ok], nets)
        yield Step(number, ids[ok], uploads, weights[ok], recorder.rounds[-1], state, setup)
