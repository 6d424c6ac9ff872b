"""The loop backend: one client after another from Python, each stage checked, failures named.

Slow on purpose. Keys are functions of client ids, so a round that fails in a compiled run fails
here too, with a name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.engine import round as stages
from fedjax_sim.engine.cohort import Outcome, Totals, Work, add_client, no_totals
from fedjax_sim.engine.mesh import put, take
from fedjax_sim.engine.records import RoundPlan, open_env
from fedjax_sim.engine.simulation import Simulation, drive
from fedjax_sim.errors import UserError
from fedjax_sim.types import State, Tree


class ClientFailure(UserError):
    """A client produced something unusable; says who, when, and in which stage."""


def first_bad(tree: Tree) -> str | None:
    """Path of the first leaf with a value that is not finite."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating) and not bool(
            jnp.isfinite(leaf).all()
        ):
            return jax.tree_util.keystr(path)
    return None


class LoopBackend:
    """`run` of a Simulation, client by client: the stages compiled one by one, the cohort a Python
    loop."""

    def __init__(self, sim: Simulation):
        r = sim.stages
        self.env = sim.env
        self.plan_round = jax.jit(lambda s, d: stages.plan_round(r, open_env(r, d), s, d.dropout))
        self.aggregate = jax.jit(
            lambda s, d, o, out: stages.aggregate(r, open_env(r, d), s, o, out)
        )
        self.learn = jax.jit(lambda s, d, *rest: stages.learn(r, open_env(r, d), s, *rest))
        self.run = drive(self.step, sim.evaluate, sim.eval_every)

        # ONE client's stages; env with the peers
        here = lambda d, o: dataclasses.replace(open_env(r, d), peers=o.peers)

        def receive(d: Any, o: RoundPlan, client: Any, slot: Any) -> Tree:
            env = here(d, o)
            return env.method.receive(env, o.server, client, slot.plan, slot.ctx)[1]

        def local(d: Any, o: RoundPlan, net: Tree, client: Any, slot: Any) -> Tree:
            env = here(d, o)
            return env.method.local(env, net, o.server, client, slot.ctx)[1].net

        self.task = jax.jit(
            lambda d, o, c, slot: stages.one_client(r, here(d, o), o.server, c, slot)
        )
        self.receive, self.local = jax.jit(receive), jax.jit(local)

    def step(self, state: State, data: Any) -> tuple[State, dict]:
        round_plan = self.plan_round(state, data)
        outcome = self.train(state, data, round_plan)
        server, cohort, log = self.aggregate(state, data, round_plan, outcome)
        agent, more = self.learn(state, data, round_plan, server, outcome.clients, cohort)
        return State(state.t + 1, state.key, server, outcome.clients, agent), log | more

    def train(self, state: State, data: Any, round_plan: RoundPlan) -> Outcome:
        slots, clients = round_plan.slots, state.clients
        totals: Totals | None = None
        reports: list[Tree] = []
        nets: list[Tree] = []
        for i in range(slots.row.shape[0]):
            slot = take(slots, i)
            client = take(state.clients, slot.row)
            who = f"round {int(state.t) + 1}, client {int(slot.ctx.id)}"
            work = self.call("local", who, self.task, data, round_plan, client, slot)
            if bool(slot.active):
                self.check(who, data, round_plan, client, slot, work)
                clients = put(clients, slot.row, work.client)
            totals = totals or no_totals(work)
            totals = add_client(totals, self.env.group_of(work.net), work)
            totals = totals._replace(executed=totals.executed + work.steps)
            reports.append(work.report)
            nets.append(work.stacked)
        assert totals is not None
        stack = lambda trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
        return Outcome(totals, stack(reports), stack(nets), clients)

    def call(self, stage: str, who: str, fn: Any, *args: Any) -> Any:
        try:
            return fn(*args)
        except UserError:
            raise
        except Exception as problem:
            raise ClientFailure(
                f"{who}, stage {stage}: {type(problem).__name__}: {problem}"
            ) from problem

    def check(
        self, who: str, data: Any, round_plan: RoundPlan, client: Any, slot: Any, work: Work
    ) -> None:
        if not bool(work.report["diverged"]):
            return
        start = self.call("receive", who, self.receive, data, round_plan, client, slot)
        bad = first_bad(start)
        if bad:
            raise ClientFailure(f"{who}, stage receive: values of {bad} are not finite")
        bad = first_bad(self.call("local", who, self.local, data, round_plan, start, client, slot))
        raise ClientFailure(f"{who}, stage local: values of {bad or 'the upload'} are not finite")
