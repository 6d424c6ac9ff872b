"""How the clients of a cohort are laid out: one after another, side by side in chunks, all at once, over a mesh.

Work is dealt out in *units* of `chunk` clients. The cohort is sorted by steps, so that a unit's lanes are about
equally long, and each unit is bounded by its own longest lane. Units go to the least loaded device first. Uploads are
added up client by client while they are produced; only small reports are stacked. Nothing crosses devices inside the
loop, so devices never wait for each other before the final sums.

Where the stacked client state `[N, …]` lives: on one device, in one place, rows read and written in place. On a mesh,
row i lives on device i // (N/D); the cohort's rows travel to the device that trains them (`psum_scatter`) and back
(`all_gather`), M rows at a time, so a random cohort crosses shards at the cost of M rows each way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from fedjax_sim.engine.layout import CLIENTS, Layout
from fedjax_sim.local import LANES
from fedjax_sim.types import Array, Client, Ctx, Env, Plan, Tree


class Slot(NamedTuple):
    """One place in the cohort, as ONE client's work order."""

    row: Array  # []  where its state lives in the stacked clients
    active: Array  # []  takes part, and will report
    plan: Plan
    ctx: Ctx


class Totals(NamedTuple):
    """Running sums over the cohort."""

    net: Tree  # Σ weight·send[g]·net
    weight: Array  # [G] Σ weight·send[g]
    sums: Tree  # Σ Upload.sums
    executed: Array  # []  lane-steps that were computed, needed or not


class Work(NamedTuple):
    """What ONE client's round produced; see `engine.one_client`."""

    client: Client
    net: Tree  # zeros where not ok: 0·nan is nan
    weights: Array  # [G]
    sums: Tree
    report: Tree  # small, stacked
    stacked: Tree  # the upload again, for methods that need all of them at once
    steps: Array  # []


# ---- dealing out ------------------------------------------------------------------------------------------------
def deal(layout: Layout, steps: Array, capacity: int) -> tuple[Array, Array]:
    """steps [M] (0: nothing to do) -> (table [D, capacity, chunk] of cohort positions, units [D]).

    Longest first; a unit is `chunk` neighbours in that order; each unit goes to the device with the least work so far.
    Empty places hold M.
    """
    size, chunk, devices = steps.shape[0], layout.chunk, layout.devices
    order = jnp.argsort(-steps, stable=True).astype(jnp.int32)
    order = jnp.where(steps[order] > 0, order, size)
    order = jnp.pad(order, (0, -size % chunk), constant_values=size).reshape(-1, chunk)  # [units, chunk]
    if devices == 1:
        return order[None], jnp.sum(order[:, 0] < size)[None]
    bound = jnp.where(order[:, 0] < size, steps[jnp.minimum(order[:, 0], size - 1)], 0)

    def give(carry, unit):
        load, held, table = carry
        lanes, cost = unit
        device = jnp.argmin(jnp.where(held < capacity, load, jnp.iinfo(jnp.int32).max))
        real = cost > 0
        table = table.at[device, jnp.where(real, held[device], capacity)].set(lanes, mode="drop")
        return (load.at[device].add(cost), held.at[device].add(real.astype(jnp.int32)), table), None

    start = (
        jnp.zeros(devices, jnp.int32),
        jnp.zeros(devices, jnp.int32),
        jnp.full((devices, capacity, chunk), size, jnp.int32),
    )
    (_, held, table), _ = lax.scan(give, start, (order, bound.astype(jnp.int32)))
    return table, held


# ---- one device's share -----------------------------------------------------------------------------------------
def _take(tree: Tree, index: Array) -> Tree:
    return jax.tree.map(lambda a: a.at[index].get(mode="clip"), tree)


def _put(tree: Tree, index: Array, rows: Tree) -> Tree:
    return jax.tree.map(lambda a, r: a.at[index].set(r.astype(a.dtype), mode="drop"), tree, rows)


def _add_client(totals: Totals, groups: Tree, work: Work) -> Totals:
    net = jax.tree.map(lambda g, a, b: a + work.weights[g].astype(a.dtype) * b, groups, totals.net, work.net)
    return totals._replace(net=net, weight=totals.weight + work.weights, sums=jax.tree.map(jnp.add, totals.sums, work.sums))


def work_through(
    env: Env, one: Callable, slots: Slot, bank: Client, place_of: Callable, table: Array, units: Array, in_place: bool
) -> tuple[Totals, Tree, Tree, Client]:
    """All units of one device, in order.

    `one(env, client, slot) -> Work` is written for ONE client. `bank` holds client rows; the row of cohort position i
    is `place_of(i)`. With in_place the rows are written back as soon as they are trained, otherwise after the loop
    (methods that read other clients' rows must see the round's start).
    Returns (totals, reports [M, …], stacked [M, …], bank).
    """
    size, chunk = slots.row.shape[0], table.shape[1]
    env = dataclasses.replace(env, lanes=chunk)
    first = jax.tree.map(lambda a: a[0], slots)
    if chunk == 1:
        many = lambda client, slot: jax.tree.map(lambda a: a[None], one(env, *jax.tree.map(lambda a: a[0], (client, slot))))
    else:
        many = jax.vmap(lambda client, slot: one(env, client, slot), axis_name=LANES)
    shape = jax.eval_shape(
        lambda c, s: jax.tree.map(
            lambda a: a[0], many(*jax.tree.map(lambda a: jnp.broadcast_to(a[None], (chunk, *a.shape)), (c, s)))
        ),
        _take(bank, 0),
        first,
    )
    zeros = lambda tree, lead=(): jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), tree)
    groups = env.group_of(shape.net)

    def unit(u: Array, carry):
        totals, reports, stacked, bank, later = carry
        where = table[u]  # [chunk] cohort positions
        slot = _take(slots, where)
        slot = slot._replace(active=slot.active & (where < size))
        rows = place_of(where)
        work = many(_take(bank, rows), slot)
        for lane in range(chunk) if chunk <= 16 else ():
            totals = _add_client(totals, groups, jax.tree.map(lambda a: a[lane], work._replace(client=(), stacked=())))
        if chunk > 16:
            small = work._replace(client=(), stacked=())
            totals = lax.fori_loop(
                0, chunk, lambda lane, t: _add_client(t, groups, jax.tree.map(lambda a: a[lane], small)), totals
            )
        totals = totals._replace(executed=totals.executed + work.steps.max() * chunk)
        target = jnp.where(where < size, rows, jnp.iinfo(jnp.int32).max)
        if in_place:
            bank = _put(bank, target, work.client)
        else:
            later = _put(later, where, work.client)
        return totals, _put(reports, where, work.report), _put(stacked, where, work.stacked), bank, later

    start = (
        Totals(zeros(shape.net), jnp.zeros(env.num_groups, shape.weights.dtype), zeros(shape.sums), jnp.int32(0)),
        zeros(shape.report, (size,)),
        zeros(shape.stacked, (size,)),
        bank,
        () if in_place else _take(bank, place_of(jnp.arange(size))),
    )
    totals, reports, stacked, bank, later = lax.fori_loop(0, units, unit, start)
    if not in_place:
        position = jnp.arange(size)
        trained = (
            jnp.zeros(size, bool)
            .at[table.reshape(-1)]
            .set(jnp.repeat(jnp.arange(table.shape[0]) < units, chunk), mode="drop")
        )
        bank = _put(bank, jnp.where(trained, place_of(position), jnp.iinfo(jnp.int32).max), later)
    return totals, reports, stacked, bank


# ---- the whole cohort -------------------------------------------------------------------------------------------
def _as_one(op: Callable[[Array], Array], tree: Tree, after: Tree = (), rows: bool = True) -> Tree:
    """A collective on a whole tree as one operation per dtype, one after the other.

    Few large messages instead of many small ones; and a fixed order, without which collectives that do not depend on
    each other may meet the wrong partner on another process. rows: keep the leading axis (gathers, scatters).
    """
    leaves, structure = jax.tree.flatten(tree)
    plain = [a.astype(jnp.int32) if a.dtype == bool else a for a in leaves]
    out: list[Any] = [None] * len(leaves)
    for dtype in sorted({str(a.dtype) for a in plain}):
        which = [i for i, a in enumerate(plain) if str(a.dtype) == dtype]
        flat = [plain[i].reshape(*plain[i].shape[: 1 if rows else 0], -1) for i in which]
        joined = op(lax.optimization_barrier((jnp.concatenate(flat, -1), after))[0])
        after = joined
        cuts = np.cumsum([a.shape[-1] for a in flat])[:-1].tolist()
        for i, part in zip(which, jnp.split(joined, cuts, -1), strict=True):
            shape = (part.shape[0], *leaves[i].shape[1:]) if rows else leaves[i].shape
            out[i] = part.reshape(shape).astype(leaves[i].dtype)
    return jax.tree.unflatten(structure, out)


def _collect(tree: Tree) -> Tree:
    """Sum over the mesh (each device filled its own places, the others hold zeros)."""
    return _as_one(lambda a: lax.psum(a, CLIENTS), tree, rows=False)


def _gather(tree: Tree, after: Tree = ()) -> Tree:
    """All devices' rows, one after another, on every device."""
    return _as_one(lambda a: lax.all_gather(a, CLIENTS, tiled=True), tree, after)


def client_pass(
    env: Env, layout: Layout, one: Callable, server: Tree, clients: Client, slots: Slot, steps: Array, reads_bank: bool
) -> tuple[Totals, Tree, Tree, Client]:
    """Train the cohort. `one(env, server, bank, client, slot) -> Work` for ONE client; see `work_through`."""
    units = -(-slots.row.shape[0] // layout.chunk)
    stateful = bool(jax.tree.leaves(clients))
    capacity = -(-units // layout.devices)
    if layout.devices > 1 and not stateful:
        capacity = min(units, 2 * capacity)  # room to balance very unequal clients
    if layout.mesh is None:
        table, count = deal(layout, steps, capacity)
        task = lambda env, client, slot: one(env, server, clients, client, slot)
        return work_through(
            env,
            task,
            slots,
            clients,
            lambda i: slots.row.at[i].get(mode="clip"),
            table[0],
            count[0],
            in_place=not reads_bank,
        )

    def share(server, fed, counts, shard, slots, steps):
        here = dataclasses.replace(env, fed=fed, counts=counts)
        me = lax.axis_index(CLIENTS)
        tables, units = deal(layout, steps, capacity)  # every device deals for all: cheaper than telling each other
        table, count = tables[me], units[me]
        everyone = _gather(shard) if reads_bank else shard
        task = lambda env, client, slot: one(env, server, everyone, client, slot)
        size, mine = slots.row.shape[0], table.reshape(-1)  # my cohort positions, M = empty
        if not stateful:
            totals, reports, stacked, _ = work_through(here, task, slots, shard, lambda i: i, table, count, True)
            return *_collect((totals, reports, stacked)), shard
        rows_here = jax.tree.leaves(shard)[0].shape[0]
        wanted = tables.reshape(-1)  # everybody's positions, device by device
        home = slots.row.at[wanted].get(mode="clip") - me * rows_here
        local = (wanted < size) & (home >= 0) & (home < rows_here)

        # the rows I train, from wherever they live: [capacity·chunk, …]
        found = jax.tree.map(
            lambda a: jnp.where(local.reshape(-1, *[1] * (a.ndim - 1)), a.at[home].get(mode="clip"), 0).astype(a.dtype),
            shard,
        )
        moved = _as_one(lambda a: lax.psum_scatter(a, CLIENTS, tiled=True), found)
        place_of = jnp.full(size + 1, mine.shape[0], jnp.int32).at[mine].set(jnp.arange(mine.shape[0], dtype=jnp.int32))
        totals, reports, stacked, moved = work_through(here, task, slots, moved, lambda i: place_of[i], table, count, True)
        summed = _collect((totals, reports, stacked))
        shard = _put(shard, jnp.where(local, home, jnp.iinfo(jnp.int32).max), _gather(moved, after=summed))
        return *summed, shard

    everywhere, split = PartitionSpec(), PartitionSpec(CLIENTS)
    return jax.shard_map(
        share,
        mesh=layout.mesh,
        in_specs=(everywhere, everywhere, everywhere, split, everywhere, everywhere),
        out_specs=(everywhere, everywhere, everywhere, split),
        # gradients are taken inside: without replication typing JAX inserts no sum over devices
        # into them, and method code may start loops from plain constants
        check_vma=False,
    )(server, env.fed, env.counts, clients, slots, steps)


def each_client(env: Env, layout: Layout, fn: Callable, server: Tree, clients: Client, ctxs: Ctx) -> tuple[Tree, Client]:
    """`fn(env, server, client, ctx) -> (result, client)` for all N clients, each on the device where its row lives.

    fn may return None for the client: rows are then only read (a loop that writes what somebody else still reads would
    copy all of them). Returns (results [N, …], clients).
    """
    total, chunk = ctxs.id.shape[0], layout.chunk
    padded = layout.padded(total)
    ctxs = jax.tree.map(
        lambda a: jnp.concatenate([a, jnp.broadcast_to(a[:1], (padded - total, *a.shape[1:]))]) if padded > total else a,
        ctxs,
    )

    def share(server, fed, counts, shard, ctxs):
        here = dataclasses.replace(env, fed=fed, counts=counts, lanes=chunk)
        size = ctxs.id.shape[0]
        call = lambda client, ctx: fn(here, server, client, ctx)
        if chunk == 1:
            many = lambda c, x: jax.tree.map(lambda a: a[None], call(*jax.tree.map(lambda a: a[0], (c, x))))
        else:
            many = jax.vmap(call, axis_name=LANES)
        blank = jax.eval_shape(many, _take(shard, jnp.zeros(chunk, jnp.int32)), _take(ctxs, jnp.zeros(chunk, jnp.int32)))
        results = jax.tree.map(lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype), blank[0])

        writes = blank[1] is not None

        def unit(u, carry):
            results, rows = carry
            where = u * chunk + jnp.arange(chunk)
            result, client = many(_take(rows if writes else shard, where), _take(ctxs, where))
            return _put(results, where, result), _put(rows, where, client) if writes else ()

        results, rows = lax.fori_loop(0, -(-size // chunk), unit, (results, shard if writes else ()))
        shard = rows if writes else shard
        return (results if layout.mesh is None else _gather(results)), shard

    if layout.mesh is None:
        return share(server, env.fed, env.counts, clients, ctxs)
    everywhere, split = PartitionSpec(), PartitionSpec(CLIENTS)
    results, clients = jax.shard_map(
        share,
        mesh=layout.mesh,
        in_specs=(everywhere, everywhere, everywhere, split, split),
        out_specs=(everywhere, split),
        check_vma=False,
    )(server, env.fed, env.counts, clients, ctxs)
    return jax.tree.map(lambda a: a[:total], results), clients


def each_in_cohort(env: Env, layout: Layout, fn: Callable, server: Tree, clients: Client, ctx: Ctx, row: Array) -> Tree:
    """`fn(env, server, client, ctx) -> small tree` for the cohort, each where its row lives: results travel, rows do not.

    ctx: [M, …]; row: [M] where each one's state is in `clients`. Returns [M, …].
    """
    pick = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    everyone = jnp.arange(ctx.id.shape[0])
    if layout.mesh is None or not jax.tree.leaves(clients):
        return lax.map(lambda i: fn(env, server, pick(clients, row[i]), pick(ctx, i)), everyone)

    def share(server, fed, counts, shard, ctx, row):
        here = dataclasses.replace(env, fed=fed, counts=counts)
        rows_here = jax.tree.leaves(shard)[0].shape[0]
        home = row - lax.axis_index(CLIENTS) * rows_here
        read = lambda i: fn(here, server, _take(shard, home[i]), pick(ctx, i))
        shape = jax.eval_shape(read, everyone[0])
        absent = lambda i: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape)
        return _collect(lax.map(lambda i: lax.cond((home[i] >= 0) & (home[i] < rows_here), read, absent, i), everyone))

    everywhere, split = PartitionSpec(), PartitionSpec(CLIENTS)
    return jax.shard_map(
        share,
        mesh=layout.mesh,
        in_specs=(everywhere, everywhere, everywhere, split, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )(server, env.fed, env.counts, clients, ctx, row)


def split_rows(layout: Layout, fn: Callable, net: Tree, fed: Tree, rows: Array) -> Tree:
    """`fn(net, fed, rows [R']) -> tree of [R', …]` with the rows shared out over the devices."""
    if layout.mesh is None:
        return fn(net, fed, rows)
    size = rows.shape[0]
    padded = jnp.pad(rows, (0, -size % layout.devices))
    everywhere, split = PartitionSpec(), PartitionSpec(CLIENTS)
    out = jax.shard_map(
        lambda *share: _gather(fn(*share)),
        mesh=layout.mesh,
        in_specs=(everywhere, everywhere, split),
        out_specs=everywhere,
        check_vma=False,
    )(net, fed, padded)
    return jax.tree.map(lambda a: a[:size], out)
