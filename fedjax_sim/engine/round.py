"""One round, for every method: `orders → train → aggregate → learn`, pure functions of a `Round` record.

round:  sample → peers → prepare → (observe → act) → plan → [receive → local]ᵢ → aggregate → (reward → learn)
        the bracket is mapped over the cohort by `cohort`, uploads are added up as they are produced
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
from fedjax_sim.engine import cohort as pass_over
from fedjax_sim.engine.cohort import Outcome, Slot, Work
from fedjax_sim.engine.layout import Layout, stay
from fedjax_sim.engine.mesh import copy_rows
from fedjax_sim.engine.numbers import numbers_of, with_numbers
from fedjax_sim.engine.participation import Participation
from fedjax_sim.hooks import Method, check_method
from fedjax_sim.local import steps_for
from fedjax_sim.local.optim import Schedule
from fedjax_sim.local.score import predict_net, score_client
from fedjax_sim.plans import full_plan
from fedjax_sim.tree import square_norm, subtract
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Numbers, State, Tree

# stages: every random draw of a round is keyed by (seed, round, stage[, client id])
SAMPLE, TRAIN, DROP, SLOW, ACT, LEARN, PERSONAL, SETUP, SERVER = range(9)


class Data(NamedTuple):
    """Everything the compiled program reads: an argument, never a constant."""

    fed: Federation
    counts: Array  # [N, C] training labels per client
    flat_rows: Array  # [R] evaluation rows of all clients, one after another
    flat_owner: Array  # [R] whose they are
    dropout: Array  # []  chance that a participant fails to report
    numbers: Numbers  # [] each: real settings by name, see `numbers`


class Orders(NamedTuple):
    """One round as it is announced."""

    slots: Slot  # [M]
    invited: Array  # [M] takes part
    reported: Array  # [M] will not fail to report
    observed: Tree  # [M, S] observations of the controller, () without one
    actions: Tree  # [M]
    info: Tree  # [M] what the agent wants back with the transition
    server: Tree  # the server's state of this round: prepared, where the method prepares
    rows: Tree  # Client [K, …]: the peers' rows, () without peers


@dataclasses.dataclass(frozen=True)
class Round:
    """Everything static about a round. What changes is a `State`, what is read is `Data`."""

    method: Method
    env: Env  # without its traced parts; `open_env` fills them in
    participation: Participation
    layout: Layout
    lr: Callable[[Array], Array]  # learning rate as a function of the rounds completed
    agent: Any = None  # of agents/, for methods with a controller
    evaluations: tuple[str, ...] = ("global", "personal")
    split: str = "test"  # rows on which clients are scored
    probe: bool = False  # record participants' scores before and after local training, and how far they went
    stored: str = "all"  # "all": a State holds the rows of all clients; "cohort": only the cohort's, in its order

    def __post_init__(self) -> None:
        check_method(self.method)

    @property
    def keeps_resident(self) -> bool:
        return "resident" in self.method.needs or "resident" in self.evaluations

    @property
    def num_stored(self) -> int:
        return self.env.num_clients if self.stored == "all" else self.participation.high

    def row_of(self, ids: Array) -> Array:
        """Where the rows of the cohort `ids` [M] are in a State's clients."""
        return ids if self.stored == "all" else jnp.arange(ids.shape[0], dtype=jnp.int32)


def seed_key(seed: int) -> np.ndarray:
    """[2] uint32, the raw PRNG key of a seed below 2^64; all of its bits count."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def stage_key(state: State, which: int) -> Array:
    return jax.random.fold_in(jax.random.fold_in(state.key, state.t), which)


def open_env(r: Round, data: Data) -> Env:
    """The environment with what the compiled program reads."""
    return with_numbers(dataclasses.replace(r.env, fed=data.fed, counts=data.counts), data.numbers)


def contexts(r: Round, env: Env, key: Array, ids: Array, t: Array, trained: Array | None = None) -> Ctx:
    """[B] contexts of the clients `ids` [B], with the run's epochs and the learning rate of round `trained` (default: t)."""
    size, dtype = ids.shape, env.dtype
    trained = t if trained is None else trained
    rate = r.lr.bound(env.numbers) if isinstance(r.lr, Schedule) else r.lr
    return Ctx(
        ids,
        jax.vmap(jax.random.fold_in, (None, 0))(key, ids),
        jnp.broadcast_to(t, size),
        jnp.broadcast_to(jnp.asarray(env.epochs, dtype), size),
        jnp.broadcast_to(rate(trained.astype(dtype)).astype(dtype), size),
    )


# ---- before training ----------------------------------------------------------------------------------------------
def sample(r: Round, state: State) -> tuple[Array, Array]:
    """(ids [M], takes part [M]) of the coming round."""
    return r.participation.sample(stage_key(state, SAMPLE), state.t)


def peer_ids(r: Round, env: Env, state: State) -> Array:
    """[K] whose stored rows the coming round reads."""
    if r.method.peers is None:
        return jnp.zeros(0, jnp.int32)
    return r.method.peers(env, state.server, sample(r, state)[0])


def orders(r: Round, env: Env, state: State, dropout: Array, rows: Tree = None) -> Orders:
    """Who takes part and what each is told: plans are made before the cohort is sorted by steps.

    rows: the peers' rows [K, …], where the State does not hold them.
    """
    method, control = r.method, r.method.control
    ids, invited = sample(r, state)
    server = state.server
    if method.peers is None:
        rows = ()
    else:
        rows = copy_rows(r.layout, state.clients, peer_ids(r, env, state)) if rows is None else rows
        env = dataclasses.replace(env, rows=rows)
        if method.prepare is not None:
            server = method.prepare(env, server, ids, rows)
    reported = r.participation.reports(stage_key(state, DROP), ids, dropout)
    ctx = contexts(r, env, stage_key(state, TRAIN), ids, state.t)
    observed: Tree = ()
    actions: Tree = ()
    info: Tree = ()
    if control is not None:
        observed, available = watch_cohort(r, env, server, state.clients, ctx)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(stage_key(state, ACT), ids)
        actions, info = jax.vmap(lambda o, k, a: r.agent.act(state.agent, o, k, a))(observed, keys, available)
        plan = jax.vmap(lambda a, c: control.plan(env, a, server, c))(actions, ctx)
    elif method.plan is not None:
        make = method.plan
        plan = jax.vmap(lambda c: make(env, server, c))(ctx)
    else:
        plan = jax.vmap(lambda c: full_plan(env, c.epochs))(ctx)
    active = invited & reported
    share = r.participation.share_of_work(stage_key(state, SLOW), ids).astype(env.dtype)
    ctx = ctx._replace(epochs=jnp.where(active, plan.epochs * share, 0))
    slots = Slot(r.row_of(ids), active, plan, ctx)
    return Orders(slots, invited, reported, observed, actions, info, server, rows)


def watch_cohort(r: Round, env: Env, server: Tree, clients: Client, ctx: Ctx) -> tuple[Array, Array | None]:
    """(observations [M, S], available actions [M, A] or None) of the controller."""
    control = r.method.control
    assert control is not None
    may = control.available

    def one(env: Env, server: Tree, client: Client, ctx: Ctx) -> tuple[Array, Array | None]:
        return control.observe(env, server, client, ctx), None if may is None else may(env, server, client, ctx)

    return pass_over.each_in_cohort(env, r.layout, one, server, clients, ctx, r.row_of(ctx.id))


# ---- local training -----------------------------------------------------------------------------------------------
def one_client(r: Round, env: Env, server: Tree, client: Client, slot: Slot) -> Work:
    """ONE client's round: receive, train, and a guard that gives a diverged upload the weight 0."""
    method, ctx = r.method, slot.ctx
    taking, net = method.receive(env, server, client._replace(spent=jnp.zeros(2, jnp.int32)), slot.plan, ctx)
    if env.bn_local:
        net = {**net, "batch_stats": client.batch_stats}
    after, up = method.local(env, net, server, taking, ctx)
    spent, after = after.spent, after._replace(spent=())
    kept = (after.own, after.confusion, up.held)
    finite = jnp.isfinite(square_norm([a for a in jax.tree.leaves((up.net, up.sums, up.weight, kept)) if is_float(a)]))
    ok = slot.active & finite
    held = up.net if up.held is None else up.held
    if jax.tree.leaves(client.resident):
        after = after._replace(resident=held)
    if env.bn_local:
        after = after._replace(batch_stats=held["batch_stats"])
    after = jax.tree.map(lambda a, b: jnp.where(ok, a, b), after, client)
    clean = lambda tree: jax.tree.map(lambda a: jnp.where(ok, a, 0), tree)
    weight = jnp.where(ok, up.weight, 0).astype(env.dtype)
    steps = jnp.where(slot.active, spent, 0)
    report = dict(
        method=up.report,
        ok=ok,
        diverged=slot.active & ~finite,
        weight=weight,
        steps=steps[0],
        loss=jnp.asarray(up.loss, env.dtype),
        accuracy=jnp.asarray(up.accuracy, env.dtype),
    )
    if r.probe:
        hits = lambda net: score_client(env, lambda x: predict_net(env, net, x), ctx, r.split).correct
        report |= dict(before=hits(net), after=hits(held), probed=env.fed.size[r.split][ctx.id])
        if method.global_model is not None:
            report["gaps"] = group_gaps(env, held, method.global_model(env, server))
    sent = clean(up.net)
    stacked = sent if "stack" in method.needs else ()
    return Work(after, sent, weight * (slot.plan.send > 0), clean(up.sums), report, stacked, spent[1])


def group_gaps(env: Env, a: Tree, b: Tree) -> Array:
    """[G] distance of two nets, parameter group by parameter group."""
    apart = subtract(a["params"], b["params"])
    return jnp.sqrt(jnp.stack([square_norm(apart[g]) for g in env.model.groups]))


def is_float(a: Array) -> bool:
    return jnp.issubdtype(jnp.asarray(a).dtype, jnp.inexact)


def train(r: Round, env: Env, state: State, orders: Orders) -> Outcome:
    """The cohort's local training: the hot path."""
    slots = orders.slots
    env = dataclasses.replace(env, rows=orders.rows)
    steps = jax.vmap(lambda i, e: steps_for(env, env.fed.size["train"][i], e))(slots.ctx.id, slots.ctx.epochs)
    steps = jnp.where(slots.active, jnp.maximum(steps, 1), 0)  # a client without data still reports
    task = lambda env, server, client, slot: one_client(r, env, server, client, slot)
    return pass_over.client_pass(env, r.layout, task, orders.server, state.clients, slots, steps)


# ---- after training -----------------------------------------------------------------------------------------------
def aggregate(r: Round, env: Env, state: State, orders: Orders, outcome: Outcome) -> tuple[Tree, Cohort, dict]:
    """The server's new state, what it saw, and the log of the round."""
    slots, totals, reports = orders.slots, outcome.totals, outcome.reports
    scale = 1 / jnp.where(totals.weight > 0, totals.weight, 1)
    mean = jax.tree.map(lambda g, a: a * scale[g].astype(a.dtype), env.group_of(totals.net), totals.net)
    cohort = Cohort(
        mean=mean,
        weight=totals.weight,
        sums=totals.sums,
        count=reports["ok"].sum(),
        ids=slots.ctx.id,
        ok=reports["ok"],
        weights=reports["weight"],
        reports=reports["method"],
        plan=slots.plan,
        t=state.t,
        key=stage_key(state, SERVER),
        nets=outcome.stacked,
    )
    combine = lambda: r.method.aggregate(dataclasses.replace(env, rows=orders.rows), orders.server, cohort)
    # nobody reported: as if the round had not been, preparation included. A conditional, not a selection: what a server only
    # hands on, such as a large encoder, is not copied
    typed = lambda: jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), combine(), state.server)
    server = lax.cond(cohort.count > 0, typed, lambda: state.server)
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
    if r.probe:
        log |= dict(
            probe_ids=jnp.where(cohort.ok, cohort.ids, -1),
            probe_before=reports["before"],
            probe_after=reports["after"],
            probe_count=reports["probed"],
        )
    if "gaps" in reports:  # how far the participants went from the model that the round started from
        far = jnp.where(cohort.ok[:, None], reports["gaps"], 0).sum(0) / jnp.maximum(cohort.count, 1)
        log |= {f"layer_dist_{name}": far[g] for g, name in enumerate(env.model.groups)}
    if r.method.log:
        log |= r.method.log(env, state.server, server, cohort)
    return server, cohort, log


def learn(
    r: Round, env: Env, state: State, orders: Orders, server: Tree, clients: Client, cohort: Cohort
) -> tuple[Tree, dict]:
    """The controller's reward and update; transitions exist only after aggregation."""
    control = r.method.control
    if control is None:
        return state.agent, {}
    from agents.types import Transition

    ctx = orders.slots.ctx
    env = dataclasses.replace(env, rows=orders.rows)
    reward = jax.vmap(lambda n, a, c: control.reward(env, state.server, server, n, a, c))(
        cohort.reports, orders.actions, ctx
    )
    if control.combine is not None:
        reward = control.combine(env, state.server, server, reward, cohort)
    after, may = watch_cohort(r, env, server, clients, ctx)
    done = jnp.broadcast_to((state.t + 1 >= env.rounds) if env.rounds else False, reward.shape)
    transition = Transition(orders.observed, orders.actions, reward, after, done, cohort.ok, orders.info, may, ctx.id)
    update = lambda agent: r.agent.update(agent, transition, stage_key(state, LEARN))
    losses_like = jax.eval_shape(update, state.agent)[1]
    nothing = lambda agent: (agent, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), losses_like))
    # a conditional, not a selection: the agent's memory is written in place
    agent, losses = lax.cond(cohort.count > 0, update, nothing, state.agent)
    log = {f"agent_{name}": value for name, value in losses.items()}
    log["reward"] = jnp.where(cohort.ok, reward, 0).sum() / jnp.maximum(cohort.count, 1)
    if control.log is not None:
        log |= control.log(env, orders.actions, orders.slots.active, ctx)
    plan = orders.slots.plan  # client by client: `runner.recorder` puts them into clients.npz
    log |= dict(
        acted_ids=jnp.where(cohort.ok, cohort.ids, -1),
        acted_actions=orders.actions,
        acted_rewards=jnp.where(cohort.ok, reward, jnp.nan),
        acted_takes=plan.take,
        acted_epochs=ctx.epochs,
    )
    return agent, log


def one_round(r: Round, env: Env, state: State, dropout: Array, rows: Tree = None) -> tuple[State, dict, Outcome, Array]:
    """(the next State, the log, what training produced, ids [M]); rows as in `orders`."""
    told = orders(r, env, state, dropout, rows)
    outcome = train(r, env, state, told)
    server, cohort, log = aggregate(r, env, state, told, outcome)
    agent, more = learn(r, env, state, told, server, outcome.clients, cohort)
    server = stay(r.layout, server)
    return State(state.t + 1, state.key, server, outcome.clients, agent), log | more, outcome, cohort.ids


def make_data(r: Round, fed: Federation) -> Data:
    """What the compiled program reads, on the host."""
    rows, size = np.asarray(fed.rows[r.split]), np.asarray(fed.size[r.split])
    real = np.arange(rows.shape[1]) < size[:, None]
    return Data(
        fed,
        fed.label_counts().astype(r.env.dtype),
        rows[real].astype(np.int32),
        np.nonzero(real)[0].astype(np.int32),
        np.asarray(r.participation.dropout, r.env.dtype),
        numbers_of(r.method, r.env, r.lr),
    )
