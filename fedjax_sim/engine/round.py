"""The engine: one round for every method, and T rounds as one program. It knows no method by name.

    round:  sample → (observe → act) → plan → [receive → local]ᵢ → aggregate → (reward → learn)
            the bracket is mapped over the cohort by `backends`, uploads are added up as they are produced

`simulate` turns a method and an environment into pure functions of (State, data): `init`, `run`, `evaluate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine import cohort
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.cohort import Slot, Work
from fedjax_sim.engine.evaluation import Data, client_split, flatten, make_scores
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.local import score as scoring
from fedjax_sim.local import steps_for
from fedjax_sim.local.losses import init_confusion
from fedjax_sim.plans import full_plan
from fedjax_sim.tree import square_norm
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Method, State, Tree

# stages: every random draw of a round is keyed by (seed, round, stage[, client id])
SAMPLE, TRAIN, DROP, SLOW, ACT, LEARN, PERSONAL, SETUP, SERVER = range(9)


class Orders(NamedTuple):
    """One round as it is announced."""

    slots: Slot  # [M]
    invited: Array  # [M] takes part
    reported: Array  # [M] will not fail to report
    observed: Tree  # [M, S] observations of the controller, () without one
    actions: Tree  # [M]
    info: Tree  # [M] what the agent wants back with the transition


class Outcome(NamedTuple):
    """What the cohort's training produced; see `cohort.client_pass`."""

    totals: Any
    reports: Tree  # [M, …]
    stacked: Tree  # [M, …] uploads, where asked for
    clients: Client  # [N, …]


class Parts(NamedTuple):
    """A round's stages as functions of (state, data, …): what one fused program does, apart."""

    orders: Callable  # (state, data) -> Orders
    train: Callable  # (state, data, orders) -> Outcome
    aggregate: Callable  # (state, data, orders, outcome) -> (server, cohort, log)
    learn: Callable  # (state, data, server, clients, orders, cohort) -> (agent, log)
    evaluate: Callable  # (state, data) -> dict
    open: Callable  # (data) -> Env with its traced parts
    task: Callable  # (env, server, bank, client, slot) -> Work                                   ONE client
    ids: Callable  # (state) -> [M] the cohort of the coming round
    setup: Callable  # (state, data, who [B]) -> clients [B, …]: before round 1; state holds the rows of `who`
    score: Callable  # (state, data, who [B]) -> dict of [B]: evaluations that read the rows of `who`
    adapt: Callable  # (state, data, who [B]) -> dict of [B]: those that fine-tune


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Pure functions of one set-up. `run` and `evaluate` are compiled once each."""

    env: Env
    method: Method
    layout: Layout
    init: Callable  # (seed, net) -> State
    run: Callable  # (state, data, rounds) -> (state, logs [≤ cap rounds], evaluations [≤ cap blocks])
    evaluate: Callable  # (state, data) -> dict
    adapt: Callable  # (state, data) -> dict: the expensive personal evaluation, for methods that fine-tune
    round: Callable  # (state, data) -> (state, log): one round, not compiled
    examine: Callable  # (state, data) -> (state, log, ids [M], nets [M, …]): one round with all its uploads
    parts: Parts  # the stages of a round one by one, for profiling and debugging
    data: Data
    capacity: int  # most evaluation blocks in one call of `run`
    client_split: str  # the split on which client accuracies are measured


def one_client(method: Method, env: Env, server: Tree, bank: Client, client: Client, slot: Slot, probe: str = "") -> Work:
    """ONE client's round: receive, train, and a guard that gives a diverged upload the weight 0.

    probe names a split on which the net is scored before and after local training, for the record only.
    """
    env = dataclasses.replace(env, bank=bank.resident) if "bank" in method.needs else env
    ctx = slot.ctx
    held, net = method.receive(env, server, client, slot.plan, ctx)
    if env.bn_local:
        net = {**net, "batch_stats": client.batch_stats}
    after, up = method.local(env, net, server, held, ctx)
    finite = jnp.isfinite(square_norm((up.net, up.sums, up.weight)))
    ok = slot.active & finite
    if jax.tree.leaves(client.resident):
        after = after._replace(resident=up.net)
    if env.bn_local:
        after = after._replace(batch_stats=up.net["batch_stats"])
    after = jax.tree.map(lambda a, b: jnp.where(ok, a, b), after, client)
    clean = lambda tree: jax.tree.map(lambda a: jnp.where(ok, a, 0), tree)
    weight = jnp.where(ok, up.weight, 0).astype(env.dtype)
    steps = steps_for(env, env.fed.size["train"][ctx.id], ctx.epochs)
    report = dict(
        method=up.report,
        ok=ok,
        diverged=slot.active & ~finite,
        weight=weight,
        steps=steps,
        loss=jnp.asarray(up.loss, env.dtype),
        accuracy=jnp.asarray(up.accuracy, env.dtype),
    )
    if probe:
        score = lambda net: scoring.score_client(env, lambda x: scoring.predict_net(env, net, x), ctx, probe).correct
        report |= dict(before=score(net), after=score(up.net), probed=env.fed.size[probe][ctx.id])
    net = clean(up.net)
    return Work(
        after, net, weight * (slot.plan.send > 0), clean(up.sums), report, net if "stack" in method.needs else (), steps
    )


def simulate(
    method: Method,
    env: Env,
    fed: Federation,
    participation: Participation,
    layout: Layout | None = None,
    *,
    lr: Callable[[Array], Array],
    evaluations: tuple[str, ...] = ("global", "personal"),
    eval_every: int = 1,
    capacity: int = 32,
    probe: bool = False,
    bank: str = "all",
) -> Simulation:
    """Compose a method, a federation and a layout into compiled functions; see `Simulation`.

    bank: "all": a State holds the rows of all clients; "cohort": only the cohort's, in its order, and somebody else
    (`host_bank`) keeps the others, brings and fetches them.
    """
    layout = layout or Layout()
    control, split = method.control, client_split(fed)
    controller = control.agent(dataclasses.replace(env, fed=fed)) if control else None
    keep_resident = "resident" in method.needs or "bank" in method.needs or "resident" in evaluations
    rows, owner = flatten(fed, split)
    data = Data(fed, rows, owner, np.asarray(participation.dropout, env.dtype))
    everyone = jnp.arange(env.num_clients, dtype=jnp.int32)
    stored = env.num_clients if bank == "all" else participation.high

    def stage(key: Array, t: Array, which: int) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, t), which)

    def contexts(key: Array, ids: Array, t: Array, epochs: Array | float) -> Ctx:
        size = ids.shape
        return Ctx(
            ids,
            jax.vmap(jax.random.fold_in, (None, 0))(key, ids),
            jnp.broadcast_to(t, size),
            jnp.broadcast_to(jnp.asarray(epochs, env.dtype), size),
            jnp.broadcast_to(lr(t.astype(env.dtype)).astype(env.dtype), size),
        )

    def open_(data: Data) -> Env:
        fed = data.fed
        real = jnp.arange(fed.rows["train"].shape[1]) < fed.size["train"][:, None]
        counts = (
            jnp.zeros((env.num_clients, fed.classes), env.dtype)
            .at[everyone[:, None], fed.y[fed.rows["train"]]]
            .add(real.astype(env.dtype))
        )
        return dataclasses.replace(env, fed=fed, counts=counts)

    # ---- the start --------------------------------------------------------------------------------------------
    def set_up(here: Env, state: State, who: Array) -> Client:
        if method.setup is None:
            return state.clients
        ctxs = contexts(stage(state.key, state.t, SETUP), who, state.t, env.epochs)
        setup = lambda env, server, client, ctx: ((), method.setup(env, server, client, ctx))
        return cohort.each_client(here, layout, setup, state.server, state.clients, ctxs)[1]

    def init(seed: int, net: Tree) -> State:
        key = jax.random.key_data(jax.random.key(seed))

        def build(key: Array, net: Tree, data: Data) -> State:
            here = open_(data)
            server, own = method.init(here, net)
            one = Client(
                own,
                init_confusion(fed.classes, env.dtype) if env.track_confusion else (),
                net if keep_resident else (),
                net["batch_stats"] if env.bn_local else (),
            )
            clients = jax.tree.map(lambda a: jnp.broadcast_to(a, (layout.padded(stored), *jnp.shape(a))), one)
            agent = controller.init(stage(key, jnp.int32(0), SETUP)) if controller else ()
            state = State(jnp.int32(0), key, server, clients, agent)
            return state._replace(clients=set_up(here, state, everyone)) if bank == "all" else state

        # the run donates its state: the caller's net and key must not be among its buffers
        key, net, inputs = layouts.everywhere(layout, (np.array(key), jax.tree.map(jnp.copy, net), data))
        if layout.mesh is None:
            return jax.jit(build)(key, net, inputs)
        where = layouts.shardings(layout, jax.eval_shape(build, key, net, inputs))
        return jax.jit(build, out_shardings=where)(key, net, inputs)  # client rows are born where they live

    # ---- one round --------------------------------------------------------------------------------------------
    def over_cohort(here: Env, server: Tree, clients: Client, ctx: Ctx, fn: Callable) -> Tree:
        """A small function of ONE client's stored state, for the cohort: one row in memory at a time."""
        return cohort.each_in_cohort(here, layout, fn, server, clients, ctx, rows_of(ctx.id))

    def rows_of(ids: Array) -> Array:
        return ids if bank == "all" else jnp.arange(ids.shape[0], dtype=jnp.int32)

    def give_orders(here: Env, state: State, dropout: Array) -> Orders:
        """Who takes part and what each is told: plans are made before the cohort is sorted by steps."""
        key, t = state.key, state.t
        ids, invited = participation.sample(stage(key, t, SAMPLE), t)
        reported = participation.reports(stage(key, t, DROP), ids, dropout)
        ctx = contexts(stage(key, t, TRAIN), ids, t, env.epochs)
        observed: Tree = ()
        actions: Tree = ()
        info: Tree = ()
        if control and controller:
            observed = over_cohort(here, state.server, state.clients, ctx, control.observe)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(stage(key, t, ACT), ids)
            actions, info = jax.vmap(lambda o, k: controller.act(state.agent, o, k))(observed, keys)
            plan = jax.vmap(lambda a, c: control.plan(here, a, state.server, c))(actions, ctx)
        else:
            plan = jax.vmap(lambda c: method.plan(here, c) if method.plan else full_plan(here, c.epochs))(ctx)
        active = invited & reported
        share = participation.share_of_work(stage(key, t, SLOW), ids).astype(env.dtype)
        ctx = ctx._replace(epochs=jnp.where(active, plan.epochs * share, 0))
        return Orders(Slot(rows_of(ids), active, plan, ctx), invited, reported, observed, actions, info)

    def task(method: Method) -> Callable:
        return lambda env, server, bank, client, slot: one_client(
            method, env, server, bank, client, slot, split if probe else ""
        )

    def train(here: Env, state: State, slots: Slot, method: Method = method) -> Outcome:
        """The cohort's local training: the hot path."""
        steps = jax.vmap(lambda i, e: steps_for(here, here.fed.size["train"][i], e))(slots.ctx.id, slots.ctx.epochs)
        steps = jnp.where(slots.active, jnp.maximum(steps, 1), 0)  # a client without data still reports
        return Outcome(
            *cohort.client_pass(
                here, layout, task(method), state.server, state.clients, slots, steps, "bank" in method.needs
            )
        )

    def aggregate(here: Env, state: State, orders: Orders, outcome: Outcome) -> tuple[Tree, Cohort, dict]:
        """The server's new state, what it saw, and the log of the round."""
        slots, totals, reports = orders.slots, outcome.totals, outcome.reports
        scale = 1 / jnp.where(totals.weight > 0, totals.weight, 1)
        mean = jax.tree.map(lambda g, a: a * scale[g].astype(a.dtype), here.group_of(totals.net), totals.net)
        cohort = Cohort(
            mean,
            totals.weight,
            totals.sums,
            reports["ok"].sum(),
            slots.ctx.id,
            reports["ok"],
            reports["weight"],
            reports["method"],
            outcome.stacked,
            stage(state.key, state.t, SERVER),
        )
        server = method.aggregate(here, state.server, cohort)
        server = jax.tree.map(lambda new, old: jnp.where(cohort.count > 0, new, old), server, state.server)
        average = lambda v: jnp.where(cohort.ok, v, 0).sum() / jnp.maximum(cohort.count, 1)
        invited, failed = orders.invited, reports["diverged"]
        log = dict(
            round=state.t + 1,
            participants=invited.sum(),
            dropped=(invited & ~orders.reported).sum(),
            diverged=failed.sum(),
            down=invited.sum(),
            up=cohort.count,
            diverged_id=jnp.where(failed.any(), cohort.ids[failed.argmax()], -1),
            taken=invited.astype(jnp.int32) @ (slots.plan.take > 0).astype(jnp.int32),
            sent=cohort.ok.astype(jnp.int32) @ (slots.plan.send > 0).astype(jnp.int32),
            steps_needed=jnp.where(slots.active, reports["steps"], 0).sum(),
            steps_executed=totals.executed,
            train_loss=average(reports["loss"]),
            train_accuracy=average(reports["accuracy"]),
        )
        if probe:
            log |= dict(
                probe_ids=jnp.where(cohort.ok, cohort.ids, -1),
                probe_before=reports["before"],
                probe_after=reports["after"],
                probe_count=reports["probed"],
            )
        if method.log:
            log |= method.log(here, state.server, server, cohort)
        return server, cohort, log

    def learn(here: Env, state: State, server: Tree, clients: Client, orders: Orders, cohort: Cohort) -> tuple[Tree, dict]:
        """The controller's reward and update; transitions exist only after aggregation."""
        if not (control and controller):
            return state.agent, {}
        from agents.types import Transition

        ctx = orders.slots.ctx
        reward = jax.vmap(lambda r, a, c: control.reward(here, state.server, server, r, a, c))(
            cohort.reports, orders.actions, ctx
        )
        if control.combine:
            reward = control.combine(here, reward, cohort)
        after = over_cohort(here, server, clients, ctx, control.observe)
        done = jnp.broadcast_to((state.t + 1 >= env.rounds) if env.rounds else False, reward.shape)
        transition = Transition(orders.observed, orders.actions, reward, after, done, cohort.ok, orders.info)
        update = lambda agent: controller.update(agent, transition, stage(state.key, state.t, LEARN))
        losses_like = jax.eval_shape(update, state.agent)[1]
        nothing = lambda agent: (agent, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), losses_like))
        # a conditional, not a selection: the agent's memory is written in place
        agent, losses = lax.cond(cohort.count > 0, update, nothing, state.agent)
        log = {f"agent_{name}": value for name, value in losses.items()}
        log["reward"] = jnp.where(cohort.ok, reward, 0).sum() / jnp.maximum(cohort.count, 1)
        if control.log:
            log |= control.log(here, orders.actions, orders.slots.active)
        return agent, log

    def one_round(here: Env, state: State, dropout: Array, method: Method = method) -> tuple[State, dict, Outcome, Array]:
        orders = give_orders(here, state, dropout)
        outcome = train(here, state, orders.slots, method)
        server, cohort, log = aggregate(here, state, orders, outcome)
        agent, more = learn(here, state, server, outcome.clients, orders, cohort)
        return State(state.t + 1, state.key, server, outcome.clients, agent), log | more, outcome, cohort.ids

    # ---- evaluation: see `scoring` ------------------------------------------------------------------------------
    def of_clients(state: State, who: Array) -> Ctx:
        return contexts(stage(state.key, state.t, PERSONAL), who, state.t, env.epochs)

    scores = make_scores(method, env, fed, layout, evaluations, of_clients, lambda state: stage(state.key, state.t, SERVER))

    def evaluate_(here: Env, state: State, data: Data) -> dict[str, Tree]:
        out = scores.server(here, state, data)
        return out | scores.stored(here, state, everyone) if bank == "all" else out

    def adapt(state: State, data: Data, who: Array = everyone) -> dict[str, Tree]:
        return scores.stored(open_(data), state, who, True)

    # ---- many rounds ------------------------------------------------------------------------------------------
    def run(state: State, data: Data, rounds: Array) -> tuple[State, dict, dict]:
        """`rounds` ≤ capacity·eval_every rounds, an evaluation after every eval_every-th and after the last."""
        here = open_(data)
        blank = lambda tree, lead: jax.tree.map(lambda a: jnp.zeros((lead, *a.shape), a.dtype), tree)
        log_shape = jax.eval_shape(lambda s: one_round(here, s, data.dropout)[1], state)
        eval_shape = jax.eval_shape(lambda s: evaluate_(here, s, data), state)
        write = lambda buffer, i, value: jax.tree.map(lambda b, v: b.at[i].set(v), buffer, value)
        first = state.t

        def round_(_, carry):
            state, logs = carry
            place = state.t - first
            state, log = one_round(here, state, data.dropout)[:2]
            return state, write(logs, place, log)

        def block(i, carry):
            state, logs, scores = carry
            left = rounds - (state.t - first)
            now = jnp.minimum(eval_every - state.t % eval_every, left)
            state, logs = lax.fori_loop(0, now, round_, (state, logs))
            return state, logs, write(scores, i, {**evaluate_(here, state, data), "round": state.t})

        blocks = (first + rounds + eval_every - 1) // eval_every - first // eval_every
        return lax.fori_loop(
            0,
            blocks,
            block,
            (
                state,
                blank(log_shape, capacity * eval_every),
                blank({**eval_shape, "round": jax.ShapeDtypeStruct((), jnp.int32)}, capacity),
            ),
        )

    def examine(state: State, data: Data) -> tuple[State, dict, Array, Tree]:
        stacking = method._replace(needs=method.needs | {"stack"})
        state, log, outcome, ids = one_round(open_(data), state, data.dropout, stacking)
        return state, log, ids, outcome.stacked

    parts = Parts(
        lambda s, d: give_orders(open_(d), s, d.dropout),
        lambda s, d, o: train(open_(d), s, o.slots),
        lambda s, d, o, out: aggregate(open_(d), s, o, out),
        lambda s, d, server, clients, o, cohort: learn(open_(d), s, server, clients, o, cohort),
        lambda s, d: evaluate_(open_(d), s, d),
        open_,
        task(method),
        lambda s: participation.sample(stage(s.key, s.t, SAMPLE), s.t)[0],
        lambda s, d, who: set_up(open_(d), s, who),
        lambda s, d, who: scores.stored(open_(d), s, who),
        adapt,
    )
    return Simulation(
        env,
        method,
        layout,
        init,
        jax.jit(run, donate_argnums=0),
        jax.jit(lambda s, d: evaluate_(open_(d), s, d)),
        jax.jit(adapt),
        lambda s, d: one_round(open_(d), s, d.dropout)[:2],
        jax.jit(examine),
        parts,
        data,
        capacity,
        split,
    )
