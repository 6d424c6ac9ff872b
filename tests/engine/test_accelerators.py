"""What an accelerator would run gives the CPU's values, and is written down as its compiler wants
it.

`platform.lowering_for` traces the accelerators' forms; a CPU can compile and run them all the same.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import M, N, arrays, assert_close

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.participation import sample_distinct
from fedjax_sim.local.batches import LEAST_BLOCK, MOST_BLOCKS, turns
from fedjax_sim.models.layers import ON_DEVICE, conv_relu_pool
from fedjax_sim.platform import lowering_for

UNEQUAL = ("fedavg", "scaffold", "fedala", "fedas", "qbandit", "fedpolicy")  # clients of any size
EQUAL = ("fedavg", "ditto", "fedpam", "pfedrlla")
SMALL = {"pfedrlla": {"side": 4, "embedding": 6}}


def even_federation() -> Federation:
    """Everybody has two and a half minibatches."""
    rng = np.random.default_rng(3)
    size, total = 10, N * 16 + 20
    y = rng.integers(0, tiny.CLASSES, total)
    x = (rng.standard_normal((total, 4, 4, 1)) + y[:, None, None, None]).astype(np.float32)
    cut = np.split(rng.permutation(total), np.cumsum([size] * N + [3] * N + [3] * N + [8]))
    rows = {"train": cut[:N], "val": cut[N : 2 * N], "test": cut[2 * N : 3 * N]}
    return Federation.from_arrays(
        x,
        y,
        rows,
        test=cut[3 * N + 1],
        server_val=cut[3 * N],
        classes=tiny.CLASSES,
        mean=0.0,
        std=1.0,
        name="even",
    )


def fresh(name: str, chunk: int, fed=tiny.federation, **more):
    """A simulation that is traced anew: traces are remembered by function, and do not know for
    which device they were."""
    keep, tiny.federation = tiny.federation, fed
    try:
        return tiny.simulation.__wrapped__(name, chunk=chunk, **more)
    finally:
        tiny.federation = keep


def two_rounds(name: str, chunk: int, platform: str, fed=tiny.federation, change=lambda data: data):
    """(State, logs) after two rounds as `platform` would compute them, by this machine."""
    with lowering_for(platform):
        sim = fresh(name, chunk, fed, **SMALL.get(name, {}))
        state = sim.init(0, sim.env.model.init(jax.random.key(0)))
        one, data, logs = jax.jit(lambda s, d: sim.round(s, d)), change(sim.data), []
        for _ in range(2):
            state, log = one(state, data)
            logs.append(log)
    return jax.device_get((state, jax.tree.map(lambda *rounds: np.stack(rounds), *logs)))


@pytest.mark.parametrize(
    "name, fed, platform, chunk",
    [(name, tiny.federation, *(("tpu", M), ("cuda", 3))[i % 2]) for i, name in enumerate(UNEQUAL)]
    + [(name, even_federation, *(("cuda", M), ("tpu", 3))[i % 2]) for i, name in enumerate(EQUAL)],
)
def test_the_accelerators_round_is_the_cpus(name, fed, platform, chunk):
    """All at once and in chunks: State and log after two rounds."""
    want, got = two_rounds(name, 1, "cpu", fed), two_rounds(name, chunk, platform, fed)
    assert_close(want[0]._replace(agent=()), got[0]._replace(agent=()), 2e-4)
    for key in ("participants", "diverged", "taken", "sent", "steps_needed", "train_loss"):
        np.testing.assert_allclose(want[1][key], got[1][key], rtol=1e-4, err_msg=key)


@pytest.mark.parametrize("platform, chunk", [("tpu", M), ("cuda", 1)])
def test_a_diverged_client_counts_for_nothing(platform, chunk):
    """Its weight is 0, its own state stays, and nobody else notices."""
    clean = two_rounds("ditto", chunk, platform)
    victim = int(
        np.asarray(
            tiny.simulation("ditto").plan_round(*tiny.start(tiny.simulation("ditto"))).slots.ctx.id
        )[0]
    )

    def poison(data):
        x = np.array(data.fed.x)
        x[data.fed.client_rows(victim)] = np.nan
        return data._replace(fed=dataclasses.replace(data.fed, x=x))

    state, logs = two_rounds("ditto", chunk, platform, change=poison)
    assert logs["diverged"][0] == 1 and logs["diverged_id"][0] == victim
    assert all(np.isfinite(a).all() for a in arrays((state.server, state.clients)))
    before = tiny.start(tiny.simulation("ditto"))[0]
    own = lambda state: [a[victim] for a in arrays(state.clients.own)]
    assert all(np.array_equal(a, b) for a, b in zip(own(before), own(state), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(own(before), own(clean[0]), strict=True))


# ---- the program ---------------------------------------------------------------------------------
def computations(text: str) -> dict[str, str]:
    """Optimised HLO -> its computations by name."""
    return {
        m[1]: m[2]
        for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }


def compiled(name: str, platform: str, chunk: int = M, fed=tiny.federation):
    with lowering_for(platform):
        sim = fresh(name, chunk, fed)
        state = sim.init(0, sim.env.model.init(jax.random.key(0)))
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), (state, sim.data)
        )
        return sim, jax.jit(lambda s, d: sim.round(s, d), donate_argnums=0).lower(*shapes).compile()


def loops(text: str) -> tuple[int, int]:
    """(loops with a known number of turns, loops without) of a program."""
    lines = [line for line in text.splitlines() if re.search(r" while\(", line)]
    known = sum("known_trip_count" in line for line in lines)
    return known, len(lines) - known


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_nothing_in_a_loop_is_as_large_as_the_pool(platform):
    """But the pool itself, which is handed through and gathered from."""
    sim, program = compiled("fedavg", platform, chunk=2)
    rows, width = sim.data.fed.x.shape
    parts = computations(program.as_text())
    bodies = {m for part in parts.values() for m in re.findall(r"body=%?([\w.\-]+)", part)}
    pool, seen, todo = rf"\[{rows},{width}\]|\[{rows},4,4,1\]", set(), list(bodies)
    while todo:  # what bodies call is inside of them too
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += re.findall(
                r"(?:calls|to_apply|body|condition|branch_computations)=\{?%?([\w.\-]+)",
                parts.get(name, ""),
            )
    lines = [
        line
        for name in seen
        for line in parts.get(name, "").splitlines()
        if re.match(rf"\s*(ROOT )?%?[\w.\-]+ = \S*({pool})", line)
    ]
    assert lines, "the pool is not found in the program"
    for line in lines:
        assert re.search(r"(parameter|get-tuple-element|bitcast)\(", line), line


def test_loops_of_equal_clients_have_a_known_number_of_turns():
    for name, chunk in (("fedavg", 2), ("ditto", M), ("fedpolicy", M)):
        known, unknown = loops(compiled(name, "cuda", chunk, even_federation)[1].as_text())
        assert known >= 1 and unknown == 0, (name, chunk)


def test_the_number_of_blocks_does_not_grow_with_steps():
    env = tiny.simulation("fedavg").env
    with lowering_for("cuda"):
        for most in (3, LEAST_BLOCK, 9, 100, 10_000):
            plan = turns(env, jnp.int32(most), most)
            assert int(plan.blocks) <= MOST_BLOCKS and most <= int(plan.total) < most + plan.length
            assert turns(env, jnp.int32(most), most, exact=True)[:2] == (1, most)
    assert turns(env, jnp.int32(7), 100)[:2] == (7, 1)  # a CPU stops after the last step


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_the_state_is_given_away_whole(platform):
    """Every byte of the old State is a byte of the new one: no second copy of [N, P]."""
    _, program = compiled("ditto", platform)
    state = tiny.start(tiny.simulation("ditto"))[0]
    size = sum(np.asarray(a).nbytes for a in jax.tree.leaves(state))
    # round number and key may be written anew
    assert program.memory_analysis().alias_size_in_bytes >= size - 64


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_devices_form_of_a_convolution_has_the_same_values(platform):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w, b = (jnp.asarray(rng.standard_normal(s)) for s in ((3, 9, 9, 2), (3, 3, 2, 5), (5,)))
        value = lambda *a, conv: jnp.sin(conv_relu_pool(*a, pad=1, conv=conv)).sum()
        grads = lambda conv: jax.value_and_grad(lambda *a: value(*a, conv=conv), (0, 1, 2))(x, w, b)
        want = grads("patches")
        with lowering_for(platform):
            got = grads("auto")
        assert ON_DEVICE[{"cuda": "gpu"}.get(platform, platform)] in ("lax", "select")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), want, got)


def test_sampling_without_replacement_is_a_shuffle():
    """The same numbers as exchanging places one after another."""
    for few, many in ((5, 40), (8, 8), (60, 70), (1, 9)):
        key = jax.random.key(few)
        other = np.asarray(jax.random.randint(key, (few,), jnp.arange(few), many, jnp.int32))
        places = np.arange(many)
        for i, j in enumerate(other):
            places[[i, j]] = places[[j, i]]
        assert sample_distinct(key, few, many).tolist() == places[:few].tolist()
