"""What the best decisions of one round would have been worth: a counterfactual oracle for
redistribution.

Every participant is trained from each candidate start (full, backbone, head), with the same
minibatches. Then uploads are exchanged one by one: for each participant in turn, every pair (what
it took, what it sends) is tried against the others as they stand, and the one with the lowest
objective is kept, until a sweep changes nothing (coordinate descent over the cohort).

    objective = (1 − w) · loss of the average on the server's validation rows
                + w · mean loss of the trained models on their clients' validation rows
                + price · share of whole models that participants take and send

It sees what no controller sees, so it bounds what one that looks a single round ahead can get
(w = 0 for the global model, w = 1 for the clients' own); it is greedy over rounds, and no bound for
one that plans. `branches` asks how much of a round's gain is left some rounds later. Built from the
engine's stages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_sim.engine import round as stages
from fedjax_sim.engine.cohort import Outcome
from fedjax_sim.engine.records import Data, Round, RoundPlan
from fedjax_sim.engine.simulation import Simulation
from fedjax_sim.local.score import mean_loss
from fedjax_sim.methods.fedpolicy.actions import block_masks
from fedjax_sim.types import Array, Env, State, Tree

SWEEPS = 3  # at most


class Tried(NamedTuple):
    """What the participants' training gave, from C starts."""

    takes: Array  # [C, M, G]
    outcomes: Outcome  # leaves [C, …]; `stacked` [C, M, …]
    weights: Array  # [M] of the average, without the sends
    own: Array  # [C, M] loss on the client's validation rows


def options(env: Env) -> tuple[np.ndarray, np.ndarray]:
    """(start [K], sends [K, G]) of the pairs; pair 0 takes and sends everything."""
    with jax.ensure_compile_time_eval():
        masks = np.asarray(block_masks(env))
    sends = np.concatenate([masks, np.zeros((1, env.num_groups))])
    pairs = list(itertools.product(range(len(masks)), range(len(sends))))
    return np.array([c for c, _ in pairs]), np.stack([sends[s] for _, s in pairs])


def try_all(r: Round, env: Env, state: State, round_plan: RoundPlan) -> Tried:
    """The participants, trained from every start; a newcomer has nothing of its own to keep."""
    slots = round_plan.slots
    joined = state.clients.own.joined[slots.ctx.id]

    def one(mask: Array) -> tuple:
        take = jnp.where(joined[:, None], mask, 1.0)
        given = round_plan._replace(slots=slots._replace(plan=slots.plan._replace(take=take)))
        done = stages.train(r, env, state, given)
        rows, size = env.fed.rows["val"], env.fed.size["val"]
        loss = lambda net, i: mean_loss(env, net, rows[i], size[i])
        return take, done, jax.vmap(loss)(done.stacked, slots.ctx.id)

    takes, outcomes, own = lax.map(one, block_masks(env))
    return Tried(takes, outcomes, outcomes.reports["weight"][0], own)


def average(env: Env, tried: Tried, old: Tree, start: Array, sends: Array) -> tuple[Tree, Array]:
    """(the server's net, the weights [G] behind it) if participant i, trained from start[i], sends
    sends[i] [G]."""
    weights = tried.weights[:, None] * sends  # [M, G]
    total = weights.sum(0)
    share = weights / jnp.where(total > 0, total, 1)
    members = jnp.arange(start.shape[0])

    def mean(g: int, nets: Array, before: Array) -> Array:
        chosen = nets[start, members]
        return jnp.where(total[g] > 0, jnp.tensordot(share[:, g], chosen, 1), before)

    return jax.tree.map(mean, env.group_of(old), tried.outcomes.stacked, old), total


def objective(
    env: Env, tried: Tried, old: Tree, weight: Array, price: float = 0.0
) -> Callable[[Array], Array]:
    """choice [M] of pairs -> what is made as small as possible."""
    start, sends = (jnp.asarray(a) for a in options(env))
    rows = env.fed.server_rows["val"]
    floats = jnp.asarray(env.group_floats(old), env.dtype)

    def value(choice: Array) -> Array:
        members = jnp.arange(choice.shape[0])
        net = average(env, tried, old, start[choice], sends[choice])[0]
        common = mean_loss(env, net, rows, jnp.int32(rows.shape[0]))
        own = tried.own[start[choice], members].mean()
        if not price:
            return (1 - weight) * common + weight * own
        moved = (tried.takes[start[choice], members] + sends[choice]) @ floats  # [M]
        sent = jnp.where(tried.weights > 0, moved, 0).sum() / (2 * floats.sum())
        traffic = sent / jnp.maximum((tried.weights > 0).sum(), 1)
        return (1 - weight) * common + weight * own + price * traffic

    return value


def search(value: Callable[[Array], Array], members: int, choices: int) -> Array:
    """[M] the choice at which no single exchange helps, from all zeros: coordinate descent."""
    every = jnp.arange(choices, dtype=jnp.int32)

    def visit(i: Array, choice: Array) -> Array:
        losses = lax.map(lambda k: value(choice.at[i].set(k)), every)
        losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
        best = jnp.argmin(losses).astype(jnp.int32)
        return choice.at[i].set(jnp.where(losses[best] < losses[choice[i]], best, choice[i]))

    def sweep(carry: tuple) -> tuple:
        choice, _, count = carry
        after = lax.fori_loop(0, members, visit, choice)
        return after, (after != choice).any(), count + 1

    start = jnp.zeros(members, jnp.int32), jnp.ones((), bool), jnp.int32(0)
    return lax.while_loop(lambda c: c[1] & (c[2] < SWEEPS), sweep, start)[0]


def brute_force(value: Callable[[Array], Array], members: int, choices: int) -> tuple:
    """(the best choice, its value) of all choices^members; for small problems."""
    grid = jnp.array(list(itertools.product(range(choices), repeat=members)), jnp.int32)
    losses = lax.map(value, grid)
    return grid[jnp.argmin(losses)], losses.min()


def carried_out(
    env: Env, state: State, round_plan: RoundPlan, tried: Tried, choice: Array
) -> tuple:
    """(the plans, the Outcome) as if the engine had trained what was chosen."""
    start, sends = (jnp.asarray(a) for a in options(env))
    start, sends = start[choice], sends[choice]
    members, ids = jnp.arange(choice.shape[0]), round_plan.slots.ctx.id
    pick = lambda tree: jax.tree.map(lambda a: a[start, members], tree)
    net, total = average(env, tried, state.server.net, start, sends)
    summed = jax.tree.map(lambda g, a: a * total[g], env.group_of(net), net)
    done = tried.outcomes
    clients = jax.tree.map(
        lambda old, new: old.at[ids].set(new[start, ids]), state.clients, done.clients
    )
    first = jax.tree.map(lambda a: a[0], done.totals)  # its `sums` are for the log alone
    outcome = Outcome(
        first._replace(net=summed, weight=total), pick(done.reports), pick(done.stacked), clients
    )
    plan = round_plan.slots.plan._replace(take=tried.takes[start, members], send=sends)
    return round_plan._replace(slots=round_plan.slots._replace(plan=plan)), outcome


def oracle_round(sim: Simulation, state: State, data: Data, weight: Any) -> tuple[State, dict]:
    """(the next State, the log) of a round with the oracle's choice; weight: w of the objective."""
    return decided(sim.stages, sim.open(data), state, sim.plan_round(state, data), weight)


def decided(
    r: Round, env: Env, state: State, round_plan: RoundPlan, weight: Any, price: float = 0.0
) -> tuple[State, dict]:
    """(the next State, the log) of a planned round with the oracle's choice."""
    r = dataclasses.replace(r, stacks=True)
    tried = try_all(r, env, state, round_plan)
    value = objective(env, tried, state.server.net, weight, price)
    choice = search(value, round_plan.slots.ctx.id.shape[0], len(options(env)[0]))
    round_plan, outcome = carried_out(env, state, round_plan, tried, choice)
    server, _, log = stages.aggregate(r, env, state, round_plan, outcome)
    log |= dict(choice=choice, observed=round_plan.observed)
    log |= dict(take=round_plan.slots.plan.take, send=round_plan.slots.plan.send)
    log |= dict(joined=state.clients.own.joined[round_plan.slots.ctx.id], weight=tried.weights)
    return State(state.t + 1, state.key, server, outcome.clients, state.agent), log


def branches(sim: Simulation, state: State, data: Data, horizon: int) -> Array:
    """[horizon] accuracy of the global model, oracle minus `full`, if both continue with `full`
    after the first round."""

    def follow(state: State) -> Array:
        def one(state: State, _: Any) -> tuple:
            found = sim.evaluate.__wrapped__(state, data)["global"]["accuracy"]  # type: ignore[attr-defined]
            return sim.round(state, data)[0], found["correct"] / found["count"]

        return lax.scan(one, state, None, horizon)[1]

    return follow(oracle_round(sim, state, data, 0.0)[0]) - follow(sim.round(state, data)[0])
