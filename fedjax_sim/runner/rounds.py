"""A run round by round, with all uploads, the server's net and the clients' nets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine import predictor
from fedjax_sim.engine.records import Data
from fedjax_sim.engine.round import one_round
from fedjax_sim.errors import UserError
from fedjax_sim.platform import floats
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.recorder import Recorder
from fedjax_sim.types import State, Tree


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
