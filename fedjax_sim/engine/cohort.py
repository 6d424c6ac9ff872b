"""How the clients of a cohort are laid out: one after another, side by side in chunks, all at once,
over a mesh.

Work is dealt out in *units* of `chunk` clients. The cohort is sorted by steps, so that a unit's
clients are about equally long, and each unit is bounded by its own longest. Units go to the
least loaded device first. Uploads are added up client by client while they are produced; only small
reports are stacked. Nothing crosses devices inside the loop, so devices never wait for each other
before the final sums.

Where the stacked client states `[N, …]` live: on one device they are read and written in place. On
a mesh, client i lives on device i // (N/D); the cohort's states travel to the device that trains
them (`all_to_all`) and back (`all_gather`), so a random cohort crosses shards at the cost of M
states each way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, Shaped

from fedjax_sim.engine.layout import CLIENTS, Layout
from fedjax_sim.engine.mesh import (
    NOWHERE,
    collect,
    gather_rows,
    locate,
    over_mesh,
    own_rows,
    put,
    scatter_rows,
    take,
)
from fedjax_sim.local import VMAP_AXIS
from fedjax_sim.platform import target
from fedjax_sim.types import Array, Client, Count, Ctx, Env, Flag, Plan, Tree

UNROLLED = 16  # clients added up in straight-line code; more of them in a loop


class Slot(NamedTuple):
    """One place in the cohort, as ONE client's work order."""

    row: Count  # where its state lives in the stacked clients
    active: Flag  # takes part, and will report
    plan: Plan
    ctx: Ctx


class Totals(NamedTuple):
    """Running sums over the cohort."""

    net: Tree  # Σ weight·send[g]·net
    weight: Float[Array, " groups"]  # Σ weight·send[g]
    sums: Tree  # Σ Upload.sums
    executed: Count  # client steps that were computed, needed or not


class Work(NamedTuple):
    """What ONE client's round produced; see `round.one_client`."""

    client: Client  # to be written where ok
    ok: Flag  # took part, and all of it is finite; it counts for nothing otherwise
    net: Tree
    weights: Float[Array, " groups"]
    sums: Tree
    report: Tree  # small, stacked
    stacked: Tree  # the upload again, for methods that need all of them at once
    steps: Count


class Outcome(NamedTuple):
    """What the cohort's training produced."""

    totals: Totals
    reports: Tree  # [M, …]
    stacked: Tree  # [M, …] uploads, where asked for
    clients: Client  # [N, …]


def zeros(tree: Tree, lead: tuple[int, ...] = ()) -> Tree:
    """Zeros shaped like `tree`, with further leading axes."""
    return jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), tree)


def side_by_side(chunk: int, one: Callable) -> Callable:
    """A function of ONE client -> of `chunk` clients [chunk, …]; a single one goes without vmap, so
    nothing is masked."""
    if chunk > 1:
        return jax.vmap(one, axis_name=VMAP_AXIS)
    return lambda *args: jax.tree.map(lambda a: a[None], one(*jax.tree.map(lambda a: a[0], args)))


# ---- dealing out ---------------------------------------------------------------------------------
def deal(
    layout: Layout, steps: Int[Array, " participants"], capacity: int
) -> tuple[Int[Array, "devices capacity {layout.chunk}"], Int[Array, " devices"]]:
    """steps (0: nothing to do) -> (table of cohort positions, units of each device).

    Longest first; a unit is `chunk` neighbours in that order; each unit goes to the device with the
    least work so far. Empty places hold M.
    """
    size, chunk, devices = steps.shape[0], layout.chunk, layout.devices
    order = jnp.argsort(-steps, stable=True).astype(jnp.int32)
    order = jnp.where(steps[order] > 0, order, size)
    # [units, chunk]
    order = jnp.pad(order, (0, -size % chunk), constant_values=size).reshape(-1, chunk)
    if devices == 1:
        return order[None], jnp.sum(order[:, 0] < size)[None]
    bound = jnp.where(order[:, 0] < size, steps[jnp.minimum(order[:, 0], size - 1)], 0)

    def give(carry, unit):
        load, filled, table = carry
        clients, cost = unit
        device = jnp.argmin(jnp.where(filled < capacity, load, jnp.iinfo(jnp.int32).max))
        real = cost > 0
        table = table.at[device, jnp.where(real, filled[device], capacity)].set(
            clients, mode="drop"
        )
        return (
            load.at[device].add(cost),
            filled.at[device].add(real.astype(jnp.int32)),
            table,
        ), None

    start = (
        jnp.zeros(devices, jnp.int32),
        jnp.zeros(devices, jnp.int32),
        jnp.full((devices, capacity, chunk), size, jnp.int32),
    )
    (_, filled, table), _ = lax.scan(give, start, (order, bound.astype(jnp.int32)))
    return table, filled


# ---- one device's share --------------------------------------------------------------------------
def add_client(totals: Totals, groups: Tree, work: Work) -> Totals:
    """Running sums with ONE more client."""
    clean = lambda b: jnp.where(work.ok, b, 0)  # 0·nan is nan
    net = jax.tree.map(
        lambda g, a, b: a + work.weights[g].astype(a.dtype) * clean(b), groups, totals.net, work.net
    )
    sums = jax.tree.map(lambda a, b: a + clean(b), totals.sums, work.sums)
    return totals._replace(net=net, weight=totals.weight + work.weights, sums=sums)


def add_chunk(totals: Totals, groups: Tree, work: Work) -> Totals:
    """Running sums with `chunk` more clients at once, `work` [chunk, …]: one reduction per array,
    for accelerators."""

    def reduce(weights: Shaped[Array, " chunk"], b: Array) -> Array:
        wide = lambda a: a.reshape(-1, *[1] * (b.ndim - 1))
        return jnp.where(wide(work.ok), wide(weights.astype(b.dtype)) * b, 0).sum(0)

    net = jax.tree.map(
        lambda g, a, b: a + reduce(work.weights[:, g], b), groups, totals.net, work.net
    )
    one = jnp.ones(work.ok.shape)
    sums = jax.tree.map(lambda a, b: a + reduce(one, b), totals.sums, work.sums)
    return totals._replace(net=net, weight=totals.weight + work.weights.sum(0), sums=sums)


def no_totals(shape: Work) -> Totals:
    return Totals(zeros(shape.net), zeros(shape.weights), zeros(shape.sums), jnp.int32(0))


def work_through(
    env: Env,
    one: Callable,
    slots: Slot,
    stored: Client,
    place_of: Callable,
    table: Int[Array, "units chunk"],
    units: Count | int,
) -> Outcome:
    """All units of one device, in order.

    `one(env, client, slot) -> Work` is written for ONE client. The state of cohort position i is
    row `place_of(i)` of `stored`, and is written back as soon as it is trained.
    """
    size, chunk = slots.row.shape[0], table.shape[1]
    env = dataclasses.replace(env, vmap_width=chunk)
    many = side_by_side(chunk, lambda client, slot: one(env, client, slot))
    first = jnp.zeros(chunk, jnp.int32)
    shape = jax.eval_shape(
        lambda c, s: jax.tree.map(lambda a: a[0], many(c, s)),
        take(stored, first),
        take(slots, first),
    )
    groups = env.group_of(shape.net)

    def unit(u: Count, carry: tuple) -> tuple:
        totals, reports, stacked, stored = carry
        where = table[u]  # [chunk] cohort positions
        slot = take(slots, where)
        slot = slot._replace(active=slot.active & (where < size))
        places = place_of(where)
        work = many(take(stored, places), slot)
        totals = add_up(totals, groups, work)
        # a diverged client keeps what it had
        stored = put(stored, jnp.where(work.ok, places, NOWHERE), work.client)
        return totals, put(reports, where, work.report), put(stacked, where, work.stacked), stored

    start = (no_totals(shape), zeros(shape.report, (size,)), zeros(shape.stacked, (size,)), stored)
    return Outcome(*lax.fori_loop(0, units, unit, start))


def add_up(totals: Totals, groups: Tree, work: Work) -> Totals:
    """Running sums with a chunk, `work` [chunk, …]; on a CPU client by client: there a sum over the
    stack is slow."""
    small, chunk = work._replace(client=Client(), stacked=(), report=()), work.ok.shape[0]
    slot_of = lambda i: jax.tree.map(lambda a: a[i], small)
    if target() != "cpu":
        totals = add_chunk(totals, groups, small)
    elif chunk <= UNROLLED:
        for i in range(chunk):
            totals = add_client(totals, groups, slot_of(i))
    else:
        totals = lax.fori_loop(0, chunk, lambda i, t: add_client(t, groups, slot_of(i)), totals)
    return totals._replace(executed=totals.executed + work.steps.max() * chunk)


def at_once(env: Env, one: Callable, slots: Slot, stored: Client) -> Outcome:
    """The whole cohort side by side on one device, in the order it was drawn: nothing is sorted,
    dealt out or looped."""
    env = dataclasses.replace(env, vmap_width=slots.row.shape[0])
    work = side_by_side(env.vmap_width, lambda client, slot: one(env, client, slot))(
        take(stored, slots.row), slots
    )
    shape = jax.eval_shape(lambda w: jax.tree.map(lambda a: a[0], w), work)
    totals = add_up(no_totals(shape), env.group_of(shape.net), work)
    return Outcome(
        totals,
        work.report,
        work.stacked,
        put(stored, jnp.where(work.ok, slots.row, NOWHERE), work.client),
    )


# ---- the whole cohort ----------------------------------------------------------------------------
def client_pass(
    env: Env,
    layout: Layout,
    one: Callable,
    server: Tree,
    clients: Client,
    slots: Slot,
    steps: Int[Array, " participants"],
) -> Outcome:
    """Train the cohort. `one(env, server, client, slot) -> Work` for ONE client; see
    `work_through`."""
    if target() != "cpu" and layout.mesh is None and layout.chunk >= slots.row.shape[0]:
        return at_once(
            env, lambda env, client, slot: one(env, server, client, slot), slots, clients
        )
    units = -(-slots.row.shape[0] // layout.chunk)
    stateful = bool(jax.tree.leaves(clients))
    capacity = -(-units // layout.devices)
    equal = env.even and env.same_epochs
    if layout.devices > 1 and not stateful and not equal:
        capacity = min(units, 2 * capacity)  # room to balance very unequal clients
    # an accelerator gets a static number of units: on one device, and on a mesh if all devices have
    # equally many
    counted = target() != "cpu" and (equal or layout.devices == 1)

    def share(everywhere: tuple, shard: Client) -> tuple[tuple, Client]:
        env, server, slots, steps = everywhere
        task = lambda env, client, slot: one(env, server, client, slot)
        # every device computes the whole table: cheaper than messages
        tables, units = deal(layout, steps, capacity)
        me = 0 if layout.mesh is None else lax.axis_index(CLIENTS)
        table, count = tables[me], capacity if counted else units[me]
        if layout.mesh is None or not stateful:
            home = lambda i: slots.row.at[i].get(mode="clip")
            done = work_through(env, task, slots, shard, home, table, count)
            return collect(layout, done[:3]), done.clients
        size, mine = slots.row.shape[0], table.reshape(-1)  # my cohort positions, M = empty
        wanted = tables.reshape(-1)  # everybody's positions, device by device
        place, here = locate(shard, slots.row.at[wanted].get(mode="clip"))
        here &= wanted < size
        # the clients this device trains, from wherever they live: [capacity·chunk, …]
        moved = scatter_rows(own_rows(shard, place, here))
        place_of = (
            jnp.full(size + 1, mine.shape[0], jnp.int32)
            .at[mine]
            .set(jnp.arange(mine.shape[0], dtype=jnp.int32))
        )
        done = work_through(env, task, slots, moved, lambda i: place_of[i], table, count)
        summed = collect(layout, done[:3])
        back = gather_rows(layout, done.clients, after=summed)
        return summed, put(shard, jnp.where(here, place, NOWHERE), back)

    (totals, reports, stacked), clients = over_mesh(
        layout, share, (env, server, slots, steps), clients
    )
    return Outcome(totals, reports, stacked, clients)


def each_client(
    env: Env, layout: Layout, fn: Callable, server: Tree, clients: Client, ctxs: Ctx
) -> tuple[Tree, Client]:
    """`fn(env, server, client, ctx) -> (result, client)` for all N clients, each on the device
    where its row lives.

    fn may return None for the client: states are then only read (a loop that writes states which
    are read elsewhere would copy all of them). Returns (results [N, …], clients).
    """
    total, chunk = ctxs.id.shape[0], layout.chunk
    padded = layout.padded(total)
    if padded > total:
        more = lambda a: jnp.concatenate(
            [a, jnp.broadcast_to(a[:1], (padded - total, *a.shape[1:]))]
        )
        ctxs = jax.tree.map(more, ctxs)

    def share(everywhere: tuple, split: tuple) -> tuple[Tree, Client]:
        (env, server), (shard, ctxs) = everywhere, split
        env = dataclasses.replace(env, vmap_width=chunk)
        size = ctxs.id.shape[0]
        many = side_by_side(chunk, lambda client, ctx: fn(env, server, client, ctx))
        first = jnp.zeros(chunk, jnp.int32)
        result, client = jax.eval_shape(many, take(shard, first), take(ctxs, first))
        writes = client is not None
        results = jax.tree.map(lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype), result)

        def unit(u: Count, carry: tuple) -> tuple:
            results, clients = carry
            where = u * chunk + jnp.arange(chunk)
            result, client = many(take(clients if writes else shard, where), take(ctxs, where))
            return put(results, where, result), put(clients, where, client) if writes else ()

        results, clients = lax.fori_loop(
            0, -(-size // chunk), unit, (results, shard if writes else ())
        )
        return gather_rows(layout, results), clients if writes else shard

    results, clients = over_mesh(layout, share, (env, server), (clients, ctxs))
    return jax.tree.map(lambda a: a[:total], results), clients


def in_chunks(width: int, one: Callable, index: Int[Array, " participants"]) -> Tree:
    """`one(i)` for every i of index, `width` of them side by side; [M, …]."""
    size = index.shape[0]
    if width == 1:
        return lax.map(one, index)
    many = jax.vmap(one, axis_name=VMAP_AXIS)
    if size <= width:
        return many(index)
    chunks = jnp.pad(index, (0, -size % width), mode="edge").reshape(-1, width)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:size], lax.map(many, chunks))


def each_in_cohort(
    env: Env,
    layout: Layout,
    fn: Callable,
    server: Tree,
    clients: Client,
    ctx: Ctx,
    row: Int[Array, " participants"],
) -> Tree:
    """`fn(env, server, client, ctx) -> small tree` for the cohort, each where its row lives:
    results travel, client states do not.

    ctx: [M, …]; row: [M] where each one's state is in `clients`. Returns [M, …].
    """
    everyone = jnp.arange(ctx.id.shape[0])
    # a CPU is faster one by one
    width = 1 if target() == "cpu" else min(layout.chunk, everyone.shape[0])
    env = dataclasses.replace(env, vmap_width=width)
    if layout.mesh is None or not jax.tree.leaves(clients):
        return in_chunks(
            width, lambda i: fn(env, server, take(clients, row[i]), take(ctx, i)), everyone
        )

    def share(everywhere: tuple, shard: Client) -> tuple[Tree, tuple]:
        env, server, ctx, row = everywhere
        place, here = locate(shard, row)
        read = lambda i: fn(env, server, take(shard, place[i]), take(ctx, i))
        if width > 1:
            results = in_chunks(width, read, everyone)
            wide = lambda a: here.reshape(-1, *[1] * (a.ndim - 1))
            return (
                collect(
                    layout,
                    jax.tree.map(lambda a: jnp.where(wide(a), a, 0).astype(a.dtype), results),
                ),
                (),
            )
        shape = jax.eval_shape(read, everyone[0])
        results = lax.map(lambda i: lax.cond(here[i], read, lambda i: zeros(shape), i), everyone)
        return collect(layout, results), ()

    return over_mesh(layout, share, (env, server, ctx, row), clients)[0]
