"""One round's uploads are the same whatever the layout: loop, chunks, all at once, over a mesh; and
it lowers for accelerators. Archetypes: stateless, stateful, resident models, controlled by an
agent."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import M, N, close, same_bits, simulation, start

from fedjax_sim.engine.cohort import deal
from fedjax_sim.engine.layout import Layout, make_layout
from fedjax_sim.engine.loop_backend import ClientFailure, LoopBackend
from fedjax_sim.platform import lowering_for

ARCHETYPES = ["fedavg", "scaffold", "random", "fedpolicy"]


@pytest.mark.parametrize("name", ARCHETYPES)
def test_layouts_agree(name):
    """Chunks, full vmap and meshes of 2 and 8 devices: uploads, server and client states to
    1e-5."""
    base = simulation(name)
    want = base.examine(*start(base))
    for chunk, devices in ((2, 1), (M, 1), (1, 2), (2, 2), (1, 8)):
        sim = simulation(name, chunk=chunk, devices=devices)
        got = sim.examine(*start(sim))
        assert np.array_equal(want[2], got[2])
        assert close(want[3], got[3]), (chunk, devices)
        assert close(want[0].server, got[0].server)
        rows = jax.tree.map(lambda a: a[:N], got[0].clients)
        assert close(want[0].clients, rows)
        assert close(want[0].agent, got[0].agent)


def test_loop_backend_agrees():
    sim = simulation("scaffold")
    want = sim.examine(*start(sim))[0]
    got, _ = LoopBackend(sim).step(*start(sim))
    assert close(want, got)


def test_loop_backend_names_the_failing_client():
    sim = simulation("fedavg")
    state, data = start(sim)
    ids = np.asarray(sim.examine(state, data)[2])
    fed = data.fed
    x = np.array(fed.x)
    x[fed.client_rows(int(ids[2]))] = np.nan
    bad = data._replace(fed=__import__("dataclasses").replace(fed, x=x))
    with pytest.raises(ClientFailure, match=rf"round 1, client {ids[2]}, stage local"):
        LoopBackend(sim).step(state, bad)


def test_upload_does_not_depend_on_mesh_neighbours():
    """Inside shard_map a gradient must not be summed over devices: other data on one client, same
    upload elsewhere."""
    sim = simulation("fedavg", devices=2)
    state, data = start(sim)
    _, _, ids, nets = sim.examine(state, data)
    fed = data.fed
    x = np.array(fed.x)
    x[fed.client_rows(int(ids[0]))] += 1
    data2 = start(
        sim, data=sim.data._replace(fed=__import__("dataclasses").replace(sim.data.fed, x=x))
    )[1]
    _, _, _, nets2 = sim.examine(state, data2)
    rest = lambda tree: jax.tree.map(lambda a: a[1:], tree)
    assert same_bits(rest(nets), rest(nets2)) and not same_bits(nets, nets2)


def test_state_is_sharded_over_the_mesh():
    sim = simulation("scaffold", devices=2)
    state, data = start(sim)
    after = sim.examine(state, data)[0]
    for leaf in jax.tree.leaves(after.clients):
        assert len(leaf.sharding.device_set) == 2
        assert {s.data.shape[0] for s in leaf.addressable_shards} == {leaf.shape[0] // 2}


@pytest.mark.parametrize("chunk, devices", [(1, 1), (3, 1), (1, 2), (2, 3), (4, 2)])
def test_dealing_covers_every_active_client_once(chunk, devices):
    steps = jnp.array([5, 0, 9, 9, 1, 0, 30, 2, 4, 4, 7])
    layout = Layout(chunk) if devices == 1 else make_layout(chunk, devices)
    units = -(-len(steps) // chunk)
    table, count = deal(layout, steps, min(units, 2 * -(-units // devices)))
    dealt = [
        int(i)
        for d in range(devices)
        for u in range(int(count[d]))
        for i in np.asarray(table[d, u])
        if i < len(steps)
    ]
    assert sorted(dealt) == [i for i, s in enumerate(np.asarray(steps)) if s > 0]
    if devices == 2 and chunk == 1:  # 71 steps, longest first to the least loaded
        load = [
            sum(int(steps[i]) for i in np.asarray(table[d, : int(count[d])]).reshape(-1))
            for d in range(2)
        ]
        assert sorted(load) == [35, 36]


def exported(sim, platform: str) -> str:
    """The round as `jax.export` writes it down for a platform this machine need not have."""
    state, data = start(sim)
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), (state, data)
    )
    with lowering_for(platform):
        fresh = jax.jit(lambda s, d: sim.round(s, d))  # traces are remembered by function
        return jax.export.export(fresh, platforms=(platform,))(*abstract).mlir_module()


@pytest.mark.parametrize("name", [*ARCHETYPES, "neighbourhood"])
def test_round_lowers_for_accelerators(name):
    """jax.export needs no hardware; the chunked round is the one an accelerator would run."""
    sim = simulation(name, chunk=2)
    for platform in ("cuda", "tpu"):
        assert "func.func public @main" in exported(sim, platform)


def test_accelerators_get_their_own_branches():
    """On a CPU minibatches are gathered behind a conditional and maps are cut into blocks;
    elsewhere neither is done."""
    sim = simulation("fedavg", model="cnn6")
    cpu, cuda = exported(sim, "cpu"), exported(sim, "cuda")
    assert cpu.count("stablehlo.case") > cuda.count("stablehlo.case")
    assert cpu.count("stablehlo.dot_general") != cuda.count("stablehlo.dot_general")


def test_ragged_clients_cost_what_they_hold():
    """One client: executed = needed. Side by side: at most the longest of each sorted chunk."""
    for chunk in (1, 2):
        sim = simulation("fedavg", chunk=chunk)
        log = sim.examine(*start(sim))[1]
        needed, executed = int(log["steps_needed"]), int(log["steps_executed"])
        assert (
            executed == needed
            if chunk == 1
            else needed < executed < M * max(2 * -(-n // tiny.BATCH) for n in tiny.SIZES)
        )


# ---- a method that reads other clients' models ---------------------------------------------------
def test_peers_are_read_as_they_were_at_the_start_of_the_round():
    """Mixing equals NumPy; a client that trained earlier in the same round is still mixed with its
    old model."""
    base = simulation("neighbourhood")
    state, data = start(base)
    state = base.examine(*base_twice(base, state, data))[0]  # residents differ now
    want = base.examine(state, data)
    round_plan = base.plan_round(state, data)
    env = dataclasses.replace(base.open(data), peers=round_plan.peers)
    ids = np.asarray(round_plan.slots.ctx.id)
    for slot in range(M):
        one = jax.tree.map(lambda a: a[slot], round_plan.slots)
        k, next_k = ids[slot], ids[(slot + 1) % M]
        mine, other = (
            jax.tree.map(lambda a: np.asarray(a[j]), state.clients.resident) for j in (k, next_k)
        )
        mixed = jax.tree.map(
            lambda g, a, b: (0.5 * a + 0.5 * b) if g == env.num_groups - 1 else 0.75 * a + 0.25 * b,
            env.group_of(mine),
            mine,
            other,
        )
        row = jax.tree.map(lambda a: a[k], state.clients)
        net = base.method.receive(env, round_plan.server, row, one.plan, one.ctx)[1]
        assert close(mixed, net, 1e-6)
    for chunk, devices in ((2, 1), (1, 2), (2, 2)):
        sim = simulation("neighbourhood", chunk=chunk, devices=devices)
        there = start(sim)
        where = jax.tree.map(lambda a: a.sharding, there[0])
        moved = jax.device_put(jax.tree.map(np.asarray, state), where) if devices > 1 else state
        got = sim.examine(moved, there[1])
        assert close(want[3], got[3]) and close(
            want[0].clients, jax.tree.map(lambda a: a[:N], got[0].clients)
        )


def test_peers_of_rows_on_the_host():
    """`--state-on host`: the same rounds, the K peers' rows brought along."""
    from fedjax_sim.engine.host_clients import on_host, place

    base = simulation("neighbourhood")
    state, data = start(base)
    host = on_host(simulation("neighbourhood", stored="cohort"))
    there, inputs = place(
        host.layout, host.init(0, host.env.model.init(jax.random.key(0))), host.data
    )
    for _ in range(3):
        state = base.examine(state, data)[0]
        there = host.round(there, inputs)[0]
    assert close(state.clients, there.clients) and close(state.server, there.server)


def base_twice(sim, state, data):
    return sim.examine(state, data)[0], data
