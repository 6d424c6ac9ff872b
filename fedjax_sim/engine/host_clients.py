"""`--state-on host`: client states stay in host memory, the cohort's travel.

    round:       draw the cohort → its M states (and its K peers') to the device → the same
                 compiled round → M states back
    evaluation:  what is measured client by client is streamed over all clients, block by block

The device then holds M + K client states instead of N; the host holds all N once, as NumPy arrays.
Costs: M states each way per round, and one dispatch per round instead of one per segment. Draws
are keyed by client ids, so a run gives the numbers of `--state-on device`, and checkpoints have the
same form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.evaluation import score_server, score_stored
from fedjax_sim.engine.records import Data, open_env
from fedjax_sim.engine.round import one_round, peer_ids, sample
from fedjax_sim.engine.simulation import Simulation, drive, set_up
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import SetsUp
from fedjax_sim.types import Client, State, Tree

# bytes of client states streamed at once by evaluation; a few copies of a block are in memory
BLOCK = 64 * 2**20


def states_at(clients: Client, ids: np.ndarray) -> Client:
    """A copy of the states `ids` [B] in host arrays [N, …]."""
    return jax.tree.map(lambda stored: stored[ids], clients)


def put_back(clients: Client, ids: np.ndarray, new: Client) -> None:
    """Write states [≥ B, …] into host arrays [N, …] at `ids` [B], in place."""

    def one(stored: np.ndarray, leaf: Any) -> None:
        stored[ids] = np.asarray(leaf)[: len(ids)]

    jax.tree.map(one, clients, new)


class HostClients:
    """The functions of a `Simulation` made with stored="cohort", for States whose clients are NumPy
    arrays [N, …]."""

    def __init__(self, sim: Simulation):
        if jax.process_count() > 1:
            raise UserError("state-on host is not possible with several processes; allowed: device")
        self.sim, self.layout, self.clients = sim, sim.layout, sim.env.num_clients
        r = sim.stages

        def ids(state: State, data: Data) -> tuple:
            env = open_env(r, data)
            return sample(r, env, state)[0], peer_ids(r, env, state)

        self.ids = jax.jit(ids)
        self.one_round = jax.jit(
            lambda s, d, peers: one_round(r, open_env(r, d), s, d.dropout, peers)[:2],
            donate_argnums=0,
        )
        self.score_server = jax.jit(lambda s, d: score_server(r, open_env(r, d), s, d))
        self.set_up = jax.jit(lambda s, d, who: set_up(r, open_env(r, d), s, who))
        self.score = jax.jit(lambda s, d, who: score_stored(r, open_env(r, d), s, who))
        self.tune = jax.jit(lambda s, d, who: score_stored(r, open_env(r, d), s, who, True))

    def with_clients(self, state: State, ids: np.ndarray) -> State:
        """`state` with only the clients `ids`, on the device, padded to what the layout wants."""
        extra = self.layout.padded(len(ids)) - len(ids)
        some = states_at(state.clients, np.concatenate([ids, np.repeat(ids[:1], extra)]))
        if self.layout.mesh is None:  # never an alias: the compiled round writes into these buffers
            return state._replace(clients=jax.device_put(some, jax.devices()[0], may_alias=False))
        where = layouts.shardings(self.layout, state._replace(clients=some)).clients
        return state._replace(clients=jax.device_put(some, where, may_alias=False))

    def init(self, seed: int, net: Tree) -> State:
        """The start: one state from the device, repeated on the host, and the method's own set-up
        block by block."""
        state = self.sim.init(seed, net)

        def repeat(state: Any) -> np.ndarray:
            stored = np.empty((self.layout.padded(self.clients), *state.shape[1:]), state.dtype)
            stored[:] = np.asarray(state)[0]
            return stored

        state = state._replace(clients=jax.tree.map(repeat, state.clients))
        if self.sim.method.ask(SetsUp) is not None:
            data = layouts.everywhere(self.layout, self.sim.data)
            for who, real in self.blocks(state):
                put_back(
                    state.clients, who[:real], self.set_up(self.with_clients(state, who), data, who)
                )
        return state

    def blocks(self, state: State) -> list[tuple[np.ndarray, int]]:
        """(client numbers [B], how many are real): all clients in equal blocks, the last one padded
        by repetition."""
        per_client = sum(
            stored.nbytes // stored.shape[0] for stored in jax.tree.leaves(state.clients)
        )
        # fills the vmap width
        some = max(self.layout.chunk * self.layout.devices, BLOCK // max(1, per_client))
        size = self.layout.padded(min(self.clients, some))
        everyone = np.arange(self.clients, dtype=np.int32)
        parts = [everyone[first : first + size] for first in range(0, self.clients, size)]
        return [(np.pad(part, (0, size - len(part)), mode="edge"), len(part)) for part in parts]

    def stream(self, fn: Callable, state: State, data: Data) -> dict[str, Tree]:
        """`fn(state, data, who) -> tree of [B]` over all clients -> tree of [N]; nothing moves
        where fn returns nothing."""
        first = self.blocks(state)[0][0]
        some = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((len(first), *a.shape[1:]), a.dtype), state.clients
        )
        if not jax.eval_shape(fn, state._replace(clients=some), data, first):
            return {}
        found = [
            jax.tree.map(
                lambda a, n=real: np.asarray(a)[:n], fn(self.with_clients(state, who), data, who)
            )
            for who, real in self.blocks(state)
        ]
        return jax.tree.map(lambda *blocks: np.concatenate(blocks), *found)

    def evaluate(self, state: State, data: Data) -> dict[str, Tree]:
        out = self.score_server(state._replace(clients=Client()), data)
        return {**out, **self.stream(self.score, state, data)}

    def adapt(self, state: State, data: Data) -> dict[str, Tree]:
        return self.stream(self.tune, state, data)

    def step(self, state: State, data: Data) -> tuple[State, dict]:
        """One round; the clients of `state` are written in place."""
        clients = state.clients
        ids, peers = layouts.as_numpy(self.ids(state._replace(clients=Client()), data))
        read = layouts.everywhere(self.layout, states_at(clients, peers))
        state, log = self.one_round(self.with_clients(state, ids), data, read)
        put_back(clients, ids, state.clients)
        return state._replace(clients=clients), log


def on_host(sim: Simulation) -> Simulation:
    """A Simulation made with stored="cohort" -> one with the same functions whose States keep their
    clients on the host."""
    kept = HostClients(sim)
    run = drive(kept.step, kept.evaluate, sim.eval_every)
    return dataclasses.replace(
        sim, init=kept.init, run=run, evaluate=kept.evaluate, adapt=kept.adapt, round=kept.step
    )


def place(layout: layouts.Layout, state: State, data: Data) -> tuple[State, Data]:
    """As `layout.place`; the clients stay where they are, as arrays of our own that may be
    written."""
    own = lambda a: a if isinstance(a, np.ndarray) and a.flags.writeable else np.array(a)
    clients = jax.tree.map(own, state.clients)
    state, data = layouts.place(layout, state._replace(clients=Client()), data)
    return state._replace(clients=clients), data
