"""`--state-on host`: the clients' stored rows stay in host memory, the cohort's travel.

    round:       draw the cohort → its M rows to the device → the same compiled round → M rows back, in place
    evaluation:  what is measured client by client is streamed over all clients, a block of rows at a time

The device then holds M rows of client state instead of N; the host holds N rows once, as NumPy arrays. Costs: M rows
each way per round, and one dispatch per round instead of one per segment. Draws are keyed by client ids, so a run gives
the numbers of `--state-on device`, and checkpoints have the same form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.round import Data, Simulation
from fedjax_sim.errors import UserError
from fedjax_sim.types import Client, State, Tree

BLOCK = 64 * 2**20  # bytes of rows streamed at once by evaluation; a few copies of a block are in memory


def check(sim: Simulation) -> None:
    """Refuse what needs all rows in one place."""
    if "bank" in sim.method.needs:
        raise UserError(
            f"state-on host is not possible with method '{sim.method.name}': its clients read each other's "
            f"models; allowed: device"
        )
    if jax.process_count() > 1:
        raise UserError("state-on host is not possible with several processes; allowed: device")


def rows_at(clients: Client, ids: np.ndarray) -> Client:
    """A copy of the rows `ids` [B] of host arrays [N, …]."""
    return jax.tree.map(lambda bank: bank[ids], clients)


def put_back(clients: Client, ids: np.ndarray, rows: Client) -> None:
    """Write rows [≥ B, …] into host arrays [N, …] at `ids` [B], in place."""

    def one(bank: np.ndarray, new: Any) -> None:
        bank[ids] = np.asarray(new)[: len(ids)]

    jax.tree.map(one, clients, rows)


class HostBank:
    """The functions of a `Simulation` made with bank="cohort", for States whose clients are NumPy arrays [N, …]."""

    def __init__(self, sim: Simulation, eval_every: int):
        check(sim)
        self.sim, self.eval_every = sim, eval_every
        parts, self.layout, self.clients = sim.parts, sim.layout, sim.env.num_clients
        self.ids = jax.jit(parts.ids)
        self.round = jax.jit(sim.round, donate_argnums=0)
        self.evaluate_server = jax.jit(parts.evaluate)
        self.set_up, self.score, self.tune = jax.jit(parts.setup), jax.jit(parts.score), jax.jit(parts.adapt)

    def with_rows(self, state: State, ids: np.ndarray) -> State:
        """`state` with only the rows `ids`, on the device; padded with a repeated row to what the layout wants."""
        extra = self.layout.padded(len(ids)) - len(ids)
        rows = rows_at(state.clients, np.concatenate([ids, np.repeat(ids[:1], extra)]))
        if self.layout.mesh is None:  # never an alias: the compiled round writes into these buffers
            return state._replace(clients=jax.device_put(rows, jax.devices()[0], may_alias=False))
        where = layouts.shardings(self.layout, state._replace(clients=rows)).clients
        return state._replace(clients=jax.device_put(rows, where, may_alias=False))

    def init(self, seed: int, net: Tree) -> State:
        """The start: one row from the device, repeated on the host, and the method's own set-up block by block."""
        state = self.sim.init(seed, net)

        def repeat(rows: Any) -> np.ndarray:
            bank = np.empty((self.layout.padded(self.clients), *rows.shape[1:]), rows.dtype)
            bank[:] = np.asarray(rows)[0]
            return bank

        state = state._replace(clients=jax.tree.map(repeat, state.clients))
        if self.sim.method.setup is not None:
            data = layouts.everywhere(self.layout, self.sim.data)
            for who, real in self.blocks(state):
                put_back(state.clients, who[:real], self.set_up(self.with_rows(state, who), data, who))
        return state

    def blocks(self, state: State) -> list[tuple[np.ndarray, int]]:
        """(client numbers [B], how many are real): all clients in equal blocks, the last one padded by repetition."""
        per_row = sum(bank.nbytes // bank.shape[0] for bank in jax.tree.leaves(state.clients))
        some = max(self.layout.chunk * self.layout.devices, BLOCK // max(1, per_row))  # fills the lanes
        size = self.layout.padded(min(self.clients, some))
        everyone = np.arange(self.clients, dtype=np.int32)
        parts = [everyone[first : first + size] for first in range(0, self.clients, size)]
        return [(np.pad(part, (0, size - len(part)), mode="edge"), len(part)) for part in parts]

    def stream(self, fn: Callable, state: State, data: Data) -> dict[str, Tree]:
        """`fn(state, data, who) -> tree of [B]` over all clients -> tree of [N]; nothing moves where fn returns nothing."""
        first = self.blocks(state)[0][0]
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(first), *a.shape[1:]), a.dtype), state.clients)
        if not jax.eval_shape(fn, state._replace(clients=rows), data, first):
            return {}
        found = [
            jax.tree.map(lambda a, n=real: np.asarray(a)[:n], fn(self.with_rows(state, who), data, who))
            for who, real in self.blocks(state)
        ]
        return jax.tree.map(lambda *blocks: np.concatenate(blocks), *found)

    def evaluate(self, state: State, data: Data) -> dict[str, Tree]:
        out = self.evaluate_server(state._replace(clients=Client()), data)
        return {**out, **self.stream(self.score, state, data)}

    def adapt(self, state: State, data: Data) -> dict[str, Tree]:
        return self.stream(self.tune, state, data)

    def run(self, state: State, data: Data, rounds: Any) -> tuple[State, dict, dict]:
        """As `Simulation.run`, round by round; the rows of `state` are written in place."""
        logs, scores = [], []
        for left in range(int(rounds), 0, -1):
            clients, ids = state.clients, np.asarray(self.ids(state._replace(clients=Client())))
            state, log = self.round(self.with_rows(state, ids), data)
            put_back(clients, ids, state.clients)
            state = state._replace(clients=clients)
            logs.append(log)
            if int(state.t) % self.eval_every == 0 or left == 1:
                scores.append({**self.evaluate(state, data), "round": state.t})
        stack = lambda rows: jax.tree.map(lambda *a: np.stack([np.asarray(x) for x in a]), *rows)
        return state, stack(logs), stack(scores)


def on_host(sim: Simulation, eval_every: int) -> Simulation:
    """A Simulation made with bank="cohort" -> one with the same functions whose States keep their clients on the host."""
    bank = HostBank(sim, eval_every)
    return dataclasses.replace(sim, init=bank.init, run=bank.run, evaluate=bank.evaluate, adapt=bank.adapt)


def place(layout: layouts.Layout, state: State, data: Data) -> tuple[State, Data]:
    """As `layouts.place`; the clients stay where they are, as arrays of our own that may be written."""
    clients = jax.tree.map(lambda a: a if isinstance(a, np.ndarray) and a.flags.writeable else np.array(a), state.clients)
    state, data = layouts.place(layout, state._replace(clients=Client()), data)
    return state._replace(clients=clients), data
