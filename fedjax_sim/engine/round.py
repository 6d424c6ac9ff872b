"""One round, for every method: `plan_round → train → aggregate → learn`, pure functions of a
`Round` record.

round:  sample → peers → prepare → (observe → act) → plan → [receive → local]ᵢ → aggregate → (reward
→ learn)
        the bracket is mapped over the cohort by `cohort`, uploads are added up as they are produced
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Shaped

from fedjax_sim.engine import cohort as pass_over
from fedjax_sim.engine.cohort import Outcome, Slot, Work
from fedjax_sim.engine.keys import ACT, DROP, LEARN, SAMPLE, SERVER, SLOW, TRAIN, stage_key
from fedjax_sim.engine.layout import stay
from fedjax_sim.engine.mesh import copy_clients
from fedjax_sim.engine.records import Known, Round, RoundPlan, in_its_precision
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Controlled, Peers, Personal, Selects, Stats
from fedjax_sim.local import steps_for
from fedjax_sim.local.optim import Schedule
from fedjax_sim.local.score import primary, score_client
from fedjax_sim.local.sgd import as_stored
from fedjax_sim.platform import exact, target
from fedjax_sim.tree import finite, norm, square_norm, subtract
from fedjax_sim.types import (
    Array,
    Client,
    Cohort,
    Count,
    Ctx,
    Env,
    Flag,
    Key,
    Plan,
    Scalar,
    State,
    Tree,
)


def contexts(
    r: Round,
    env: Env,
    key: Key,
    ids: Int[Array, " some_clients"],
    t: Count,
    trained: Count | None = None,
) -> Ctx:
    """Contexts of the clients `ids`, with the run's epochs and the learning rate of round
    `trained` (default: t)."""
    size, dtype = ids.shape, env.dtype
    trained = t if trained is None else trained
    rate = env.lr if isinstance(env.lr, Schedule) else r.lr
    return Ctx(
        ids,
        jax.vmap(jax.random.fold_in, (None, 0))(key, ids),
        jnp.broadcast_to(t, size),
        jnp.broadcast_to(jnp.asarray(env.epochs, dtype), size),
        jnp.broadcast_to(rate(trained.astype(dtype)).astype(dtype), size),
    )


# ---- before training -----------------------------------------------------------------------------
def sample(
    r: Round, env: Env, state: State
) -> tuple[Int[Array, " participants"], Bool[Array, " participants"]]:
    """(ids, takes part) of the coming round."""
    key = stage_key(state, SAMPLE)
    ids, invited = r.participation.sample(key, state.t)
    chooser = env.method.ask(Selects)
    if chooser is None or r.participation.schedule:
        return ids, invited
    stats = Stats(env.fed.size["train"], r.participation.eligible(env.num_clients))
    return (
        chooser.select(env, state.server, state.t, jax.random.fold_in(key, 1), stats).astype(
            ids.dtype
        ),
        invited,
    )


@in_its_precision
def peer_ids(r: Round, env: Env, state: State) -> Int[Array, " peers"]:
    """Whose state the coming round reads."""
    method = env.method.ask(Peers)
    return (
        jnp.zeros(0, jnp.int32)
        if method is None
        else method.peer_ids(env, state.server, sample(r, env, state)[0])
    )


@in_its_precision
def plan_round(r: Round, env: Env, state: State, dropout: Scalar, peers: Tree = None) -> RoundPlan:
    """Who takes part and what each client is to do; the cohort is sorted by steps after this.

    peers: their client states [K, …], where the State does not hold them.
    """
    method, reader, control = env.method, env.method.ask(Peers), env.method.ask(Controlled)
    ids, invited = sample(r, env, state)
    server = state.server
    if reader is None:
        peers = ()
    else:
        if peers is None:
            peers = copy_clients(r.layout, state.clients, peer_ids(r, env, state))
        env = dataclasses.replace(env, peers=peers)
        server = exact(reader.prepare)(env, server, ids, peers)
    reported = r.participation.reports(stage_key(state, DROP), ids, dropout)
    ctx = contexts(r, env, stage_key(state, TRAIN), ids, state.t)
    observed: Tree = ()
    actions: Tree = ()
    imposed: Tree = ()
    info: Tree = ()
    if control is not None:
        observed, available, forced = watch_cohort(r, env, server, state.clients, ctx)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(stage_key(state, ACT), ids)
        agent = control.make_agent(env)
        actions, info = jax.vmap(lambda o, k, a: agent.act(state.agent, o, k, a))(
            observed, keys, available
        )
        if forced is not None:
            imposed, instead = forced
            actions = jax.vmap(jnp.where)(imposed, instead.astype(actions.dtype), actions)
            imposed = imposed.any(1) if imposed.ndim > 1 else imposed
        make = lambda a, c: control.plan_of(env, a, server, c)
    else:
        make = lambda _, c: method.plan(env, server, c)
    plan, known = plans(r, make, actions, ctx)
    active = invited & reported
    share = r.participation.share_of_work(stage_key(state, SLOW), ids).astype(env.dtype)
    ctx = ctx._replace(epochs=jnp.where(active, plan.epochs * share, 0))
    slots = Slot(r.row_of(ids), active, plan, ctx)
    return RoundPlan(
        slots, invited, reported, observed, actions, imposed, info, server, peers, known
    )


def plans(r: Round, make: Callable, actions: Tree, ctx: Ctx) -> tuple[Plan, Known]:
    """(the plans [M] that `make(action, ctx)` gives each client, whether all of them leave the
    run's epochs as they are)."""
    kept = []

    def one(action: Tree, ctx: Ctx) -> Plan:
        plan = make(action, ctx)
        kept.append(plan.epochs is ctx.epochs)
        return plan

    planned = jax.vmap(one)(actions, ctx)
    no_stragglers = r.participation.slow[0] <= 0
    return planned, Known(all(kept) and no_stragglers and r.env.epochs == r.env.max_epochs)


def watch_cohort(r: Round, env: Env, server: Tree, clients: Client, ctx: Ctx) -> tuple:
    """(observations [M, S], available actions [M, A] or None, imposed actions ([M], [M, …]) or
    None) of the controller."""

    def one(env: Env, server: Tree, client: Client, ctx: Ctx) -> tuple:
        control = env.method
        return tuple(
            ask(env, server, client, ctx)
            for ask in (control.observe, control.available, control.imposed)
        )

    return pass_over.each_in_cohort(env, r.layout, one, server, clients, ctx, r.row_of(ctx.id))


# ---- local training ------------------------------------------------------------------------------
@in_its_precision
def one_client(r: Round, env: Env, server: Tree, client: Client, slot: Slot) -> Work:
    """ONE client's round: receive, train, and a look whether all of it is finite; `cohort` counts
    only those that are ok."""
    method, ctx = env.method, slot.ctx
    taking, net = method.receive(
        env, server, client._replace(spent=jnp.zeros(2, jnp.int32)), slot.plan, ctx
    )
    if env.bn_local:
        net = {**net, "batch_stats": client.batch_stats}
    after, up = method.local(env, net, server, taking, ctx)
    after = as_stored(after, client)
    spent, after = after.spent, after._replace(spent=())
    kept = (after.own, after.confusion, after.optimizer, up.resident)
    length, began = norm(subtract(up.net["params"], net["params"])), norm(net["params"])
    # the second term is always true where all is finite; it makes the write of the client's row
    # wait until the old one has been read
    sound = finite((up.net, up.sums, up.weight, kept)) & ~jnp.isnan(length + began)
    ok = slot.active & sound
    resident = up.net if up.resident is None else up.resident
    if jax.tree.leaves(client.resident):
        after = after._replace(resident=resident)
    if env.bn_local:
        after = after._replace(batch_stats=resident["batch_stats"])
    weight = jnp.where(ok, up.weight, 0).astype(env.dtype)
    steps = jnp.where(slot.active, spent, 0)
    report = dict(
        method=up.report,
        ok=ok,
        diverged=slot.active & ~sound,
        weight=weight,
        length=length,
        began=began,
        steps=steps[0],
        loss=jnp.asarray(up.loss, env.dtype),
        accuracy=jnp.asarray(up.accuracy, env.dtype),
    )
    if r.probe:
        report |= dict(
            before=probe(r, env, server, taking, net, ctx),
            after=probe(r, env, server, after, resident, ctx),
        )
        if method.has_global_model:
            report["gaps"] = group_gaps(env, resident, method.global_model(env, server))
    stacked = jax.tree.map(lambda a: jnp.where(ok, a, 0), up.net) if r.keeps_uploads else ()
    weights = weight * slot.plan.send.astype(weight.dtype)
    return Work(after, ok, up.net, weights, up.sums, report, stacked, spent[1])


def probe(
    r: Round, env: Env, server: Tree, client: Client, net: Tree, ctx: Ctx
) -> dict[str, Array]:
    """Sums of the primary metric of ONE client with `net`, as its method predicts; where that would
    train, plainly."""
    own = env.method.ask(Personal)
    own = own if own is not None and not own.adapts else Personal()
    predictor = own.resident(env, server, client._replace(resident=net), ctx)
    metric = primary(env)
    return score_client(env, lambda x: own.predict(env, predictor, x), ctx, r.split, (metric,))[
        metric.name
    ]


EXPLODES, EXPLODES_ALONE = 10.0, 100.0  # times the model it started from


def exploding_updates(
    length: Float[Array, " participants"],
    began: Float[Array, " participants"],
    ok: Bool[Array, " participants"],
    ids: Int[Array, " participants"],
) -> dict[str, Shaped[Array, ""]]:
    """For the log: finite updates that explode. length, began: norms of the updates and of the
    models at the start.

    An update explodes that is 10 times as long as the model it started from and as the median
    update of its round, or 100 times as long as that model: healthy ones are shorter than the
    model, however unequal the clients are.
    """
    count = ok.sum()
    middle = jnp.sort(jnp.where(ok, length, jnp.inf))[jnp.maximum(count - 1, 0) // 2]
    middle = jnp.where(count > 0, middle, 0)
    more = (length > EXPLODES * jnp.maximum(middle, began)) | (length > EXPLODES_ALONE * began)
    flagged, largest = ok & more & (began > 0), jnp.argmax(jnp.where(ok, length, -1))
    return dict(
        exploding=flagged.sum(),
        exploding_id=jnp.where(flagged.any(), ids[jnp.argmax(jnp.where(flagged, length, -1))], -1),
        update_norm=middle,
        update_norm_max=jnp.where(count > 0, length[largest], 0),
    )


def group_gaps(env: Env, a: Tree, b: Tree) -> Float[Array, " groups"]:
    """Distance of two nets, parameter group by parameter group."""
    apart = subtract(a["params"], b["params"])
    return jnp.sqrt(jnp.stack([square_norm(apart[g]) for g in env.model.groups]))


@in_its_precision
def train(r: Round, env: Env, state: State, round_plan: RoundPlan) -> Outcome:
    """The cohort's local training: the hot path."""
    slots = round_plan.slots
    env = dataclasses.replace(env, peers=round_plan.peers, same_epochs=round_plan.known.same_epochs)
    steps = jax.vmap(lambda i, e: steps_for(env, env.fed.size["train"][i], e))(
        slots.ctx.id, slots.ctx.epochs
    )
    steps = jnp.where(slots.active, jnp.maximum(steps, 1), 0)  # a client without data still reports
    task = lambda env, server, client, slot: one_client(r, env, server, client, slot)
    return pass_over.client_pass(
        env, r.layout, task, round_plan.server, state.clients, slots, steps
    )


# ---- after training ------------------------------------------------------------------------------
@in_its_precision
def aggregate(
    r: Round, env: Env, state: State, round_plan: RoundPlan, outcome: Outcome
) -> tuple[Tree, Cohort, dict]:
    """The server's new state, what it saw, and the log of the round."""
    slots, totals, reports = round_plan.slots, outcome.totals, outcome.reports
    scale = 1 / jnp.where(totals.weight > 0, totals.weight, 1)
    mean = jax.tree.map(
        lambda g, a: a * scale[g].astype(a.dtype), env.group_of(totals.net), totals.net
    )
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
        losses=jnp.where(reports["ok"], reports["loss"], 0),
    )
    # what the server adds up is never rounded to the operands of fast products
    combine = lambda: exact(env.method.aggregate)(
        dataclasses.replace(env, peers=round_plan.peers), round_plan.server, cohort
    )
    typed = lambda: jax.tree.map(
        lambda new, old: jnp.asarray(new, old.dtype), combine(), state.server
    )
    # if no client reported, the server keeps its old state, preparation included
    server = either(cohort.count > 0, typed, state.server)
    log = round_log(r, env, state, round_plan, outcome, cohort)
    return server, cohort, log | env.method.log(env, state.server, server, cohort)


def round_log(
    r: Round, env: Env, state: State, round_plan: RoundPlan, outcome: Outcome, cohort: Cohort
) -> dict:
    """Counts and means that are logged for every method."""
    slots, reports = round_plan.slots, outcome.reports
    average = jnp.where(cohort.ok, jnp.stack([reports["loss"], reports["accuracy"]]), 0).sum(
        1
    ) / jnp.maximum(cohort.count, 1)
    invited, failed, totals = round_plan.invited, reports["diverged"], outcome.totals
    log = dict(
        round=state.t + 1,
        participants=invited.sum(),
        dropped=(invited & ~round_plan.reported).sum(),
        diverged=failed.sum(),
        down=invited.sum(),
        up=cohort.count,
        diverged_id=jnp.where(failed.any(), cohort.ids[failed.argmax()], -1),
        taken=(invited[:, None] & (slots.plan.take > 0)).sum(0),
        sent=(cohort.ok[:, None] & (slots.plan.send > 0)).sum(0),
        steps_needed=jnp.where(slots.active, reports["steps"], 0).sum(),
        steps_executed=totals.executed,
        train_loss=average[0],
        train_accuracy=average[1],
        **exploding_updates(reports["length"], reports["began"], cohort.ok, cohort.ids),
    )
    if r.probe:
        log["probe_ids"] = jnp.where(cohort.ok, cohort.ids, -1)
        log |= {
            f"probe_{when}_{name}": sums
            for when in ("before", "after")
            for name, sums in reports[when].items()
        }
    if (
        "gaps" in reports
    ):  # how far the participants went from the model that the round started from
        far = jnp.where(cohort.ok[:, None], reports["gaps"], 0).sum(0) / jnp.maximum(
            cohort.count, 1
        )
        log |= {f"layer_dist_{name}": far[g] for g, name in enumerate(env.model.groups)}
    return log


def either(yes: Flag, make: Callable[[], Tree], old: Tree) -> Tree:
    """`make()` if yes, else `old`.

    On a CPU a conditional, not a selection: what is only handed on, such as a large encoder, is not
    copied. On accelerators a selection of what differs: a GPU asks the host which branch to take,
    and a TPU lays out a branch's arguments anew.
    """
    if target() == "cpu":
        return lax.cond(yes, make, lambda: old)
    return jax.tree.map(
        lambda new, old: old if new is old else jnp.where(yes, new, old), make(), old
    )


@in_its_precision
def learn(
    r: Round,
    env: Env,
    state: State,
    round_plan: RoundPlan,
    server: Tree,
    clients: Client,
    cohort: Cohort,
) -> tuple[Tree, dict]:
    """The controller's reward and update; transitions exist only after aggregation."""
    control = env.method.ask(Controlled)
    if control is None:
        return state.agent, {}
    from agents.types import Transition

    ctx = round_plan.slots.ctx
    env = dataclasses.replace(env, peers=round_plan.peers)
    reward = jax.vmap(lambda n, a, c: control.reward_of(env, state.server, server, n, a, c))(
        cohort.reports, round_plan.actions, ctx
    )
    reward = control.combine(env, state.server, server, reward, cohort)
    # as the next round would see them
    after, may, _ = watch_cohort(r, env, server, clients, ctx._replace(t=ctx.t + 1))
    done = jnp.broadcast_to((state.t + 1 >= env.rounds) if env.rounds else False, reward.shape)
    teaches = (
        cohort.ok if isinstance(round_plan.imposed, tuple) else cohort.ok & ~round_plan.imposed
    )
    transition = Transition(
        round_plan.observed,
        round_plan.actions,
        reward,
        after,
        done,
        teaches,
        round_plan.info,
        may,
        ctx.id,
    )
    learner = control.make_agent(env)
    update = lambda agent: learner.update(agent, transition, stage_key(state, LEARN))
    losses_like = jax.eval_shape(update, state.agent)[1]
    nothing = lambda agent: (agent, pass_over.zeros(losses_like))
    # a conditional, not a selection: the agent's memory is written in place
    agent, losses = lax.cond(cohort.count > 0, update, nothing, state.agent)
    log = {f"agent_{name}": value for name, value in losses.items()}
    log["reward"] = jnp.where(cohort.ok, reward, 0).sum() / jnp.maximum(cohort.count, 1)
    log |= control.log_actions(env, round_plan.actions, round_plan.slots.active, ctx)
    plan = round_plan.slots.plan  # client by client: `runner.recorder` puts them into clients.npz
    log |= dict(
        acted_ids=jnp.where(cohort.ok, cohort.ids, -1),
        acted_actions=round_plan.actions,
        acted_rewards=jnp.where(cohort.ok, reward, jnp.nan),
        acted_takes=plan.take,
        acted_sends=plan.send,
        acted_epochs=ctx.epochs,
    )
    return agent, log


def one_round(
    r: Round, env: Env, state: State, dropout: Scalar, peers: Tree = None
) -> tuple[State, dict, Outcome, Int[Array, " participants"]]:
    """(the next State, the log, what training produced, ids); peers as in `plan_round`."""
    try:
        round_plan = plan_round(r, env, state, dropout, peers)
        outcome = train(r, env, state, round_plan)
        server, cohort, log = aggregate(r, env, state, round_plan, outcome)
        agent, more = learn(r, env, state, round_plan, server, outcome.clients, cohort)
    except jax.errors.ConcretizationTypeError as problem:
        raise UserError(
            f"method '{r.method.name}' decides by a value that is not known while its round is"
            " compiled; annotate that field as float, not Real"
            f" ({', '.join(r.method.numbers)}): {str(problem).splitlines()[0]}"
        ) from problem
    server = stay(r.layout, server)
    return (
        State(state.t + 1, state.key, server, outcome.clients, agent),
        log | more,
        outcome,
        cohort.ids,
    )
