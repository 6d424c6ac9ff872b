"""The loop backend: one client after another from Python, each stage checked, failures named.

Slow on purpose. Keys are functions of client ids, so a round that fails in a compiled run fails here too, with a name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.engine.cohort import Totals, Work
from fedjax_sim.engine.round import Outcome, Simulation
from fedjax_sim.errors import UserError
from fedjax_sim.types import State, Tree


class ClientFailure(UserError):
    """A client produced something unusable; says who, when, and in which stage."""


def first_bad(tree: Tree) -> str | None:
    """Path of the first leaf with a value that is not finite."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all()):
            return jax.tree_util.keystr(path)
    return None


class LoopRunner:
    """`run` of a Simulation, client by client."""

    def __init__(self, sim: Simulation, eval_every: int):
        method, parts = sim.method, sim.parts
        self.sim, self.eval_every = sim, eval_every
        self.orders, self.aggregate = jax.jit(parts.orders), jax.jit(parts.aggregate)
        self.learn, self.evaluate = jax.jit(parts.learn), jax.jit(parts.evaluate)
        self.receive = jax.jit(lambda s, d, c, slot: method.receive(parts.open(d), s.server, c, slot.plan, slot.ctx)[1])
        self.local = jax.jit(lambda s, d, n, c, slot: method.local(parts.open(d), n, s.server, c, slot.ctx)[1].net)
        self.task = jax.jit(lambda s, d, c, slot: parts.task(parts.open(d), s.server, s.clients, c, slot))

    def train(self, state: State, data: Any, orders: Any) -> Outcome:
        slots, clients = orders.slots, state.clients
        totals: Totals | None = None
        reports: list[Tree] = []
        nets: list[Tree] = []
        groups = None
        for i in range(slots.row.shape[0]):
            slot = jax.tree.map(lambda a: a[i], slots)
            client = jax.tree.map(lambda a: a[slot.row], state.clients)
            who = f"round {int(state.t) + 1}, client {int(slot.ctx.id)}"
            work = self.call("local", who, self.task, state, data, client, slot)
            if bool(slot.active):
                self.check(who, state, data, client, slot, work)
                clients = jax.tree.map(lambda full, a: full.at[slot.row].set(a), clients, work.client)
            groups = groups or self.sim.env.group_of(work.net)
            totals = self.add(totals, groups, work)
            reports.append(work.report)
            nets.append(work.stacked)
        stack = lambda trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
        return Outcome(totals, stack(reports), stack(nets) if jax.tree.leaves(nets[0]) else (), clients)

    def call(self, stage: str, who: str, fn: Any, *args: Any) -> Any:
        try:
            return fn(*args)
        except UserError:
            raise
        except Exception as problem:
            raise ClientFailure(f"{who}, stage {stage}: {type(problem).__name__}: {problem}") from problem

    def check(self, who: str, state: State, data: Any, client: Any, slot: Any, work: Work) -> None:
        if not bool(work.report["diverged"]):
            return
        start = self.call("receive", who, self.receive, state, data, client, slot)
        bad = first_bad(start)
        if bad:
            raise ClientFailure(f"{who}, stage receive: values of {bad} are not finite")
        bad = first_bad(self.call("local", who, self.local, state, data, start, client, slot))
        raise ClientFailure(f"{who}, stage local: values of {bad or 'the upload'} are not finite")

    def add(self, totals: Totals | None, groups: Tree, work: Work) -> Totals:
        if totals is None:
            totals = Totals(
                jax.tree.map(jnp.zeros_like, work.net),
                jnp.zeros_like(work.weights),
                jax.tree.map(jnp.zeros_like, work.sums),
                jnp.int32(0),
            )
        net = jax.tree.map(lambda g, a, b: a + work.weights[g] * b, groups, totals.net, work.net)
        return Totals(
            net, totals.weight + work.weights, jax.tree.map(jnp.add, totals.sums, work.sums), totals.executed + work.steps
        )

    def round(self, state: State, data: Any) -> tuple[State, dict]:
        orders = self.orders(state, data)
        outcome = self.train(state, data, orders)
        server, cohort, log = self.aggregate(state, data, orders, outcome)
        agent, more = self.learn(state, data, server, outcome.clients, orders, cohort)
        return State(state.t + 1, state.key, server, outcome.clients, agent), log | more

    def __call__(self, state: State, data: Any, rounds: Any) -> tuple[State, dict, dict]:
        """Same results as `Simulation.run`: logs and evaluations padded to its capacity."""
        logs, scores = [], []
        for left in range(int(rounds), 0, -1):
            state, log = self.round(state, data)
            logs.append(log)
            if int(state.t) % self.eval_every == 0 or left == 1:
                scores.append({**self.evaluate(state, data), "round": state.t})
        stack = lambda rows: jax.tree.map(lambda *a: np.stack([np.asarray(x) for x in a]), *rows)
        return state, stack(logs), stack(scores)
