"""Checkpoints: the whole State bit for bit, whole or absent, newest kept, refused when they do not
fit."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import same_bits, simulation, start

from fedjax_sim.errors import UserError
from fedjax_sim.runner import checkpoint
from fedjax_sim.runner.run_directory import saved_rounds
from fedjax_sim.types import Client, State


def example_state(rows: int = 10, seed: int = 0, put=jnp.asarray) -> State:
    """A State with every kind of leaf: scalars, integers, halves, not-a-numbers, a bank of rows, an
    empty tree."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    bank = draw(rows, 6, 4)
    bank[2, 1, 0], bank[3, 0, 0], bank[4, 0, 0] = np.nan, np.inf, -0.0
    return State(
        jnp.int32(7),
        jnp.asarray(rng.integers(0, 2**32, 2, np.uint32)),
        {"w": jnp.asarray(draw(3, 3)), "count": jnp.int32(5), "flag": jnp.asarray(True)},
        Client(
            dict(v=put(bank), n=put(rng.integers(0, 9, rows).astype(np.int32))),
            (),
            put(draw(rows, 5)),
            (),
        ),
        {"half": jnp.asarray(draw(4), jnp.bfloat16), "none": jnp.zeros((0, 3))},
    )


def blank(state: State) -> State:
    return jax.tree.map(lambda a: jax.device_put(jnp.zeros(a.shape, a.dtype), a.sharding), state)


def test_round_trip_is_exact(tmp_path):
    state = example_state()
    path = checkpoint.save(tmp_path / "c", state, "abc")
    assert path.name == "00000007"
    assert same_bits(state, checkpoint.load(path, blank(state), "abc"))


def test_leaves_are_named_by_their_paths(tmp_path):
    path = checkpoint.save(tmp_path, example_state(), "h")
    names = [r["name"] for r in json.loads((path / "meta.json").read_text())["leaves"]]
    assert names == [
        *(
            "t",
            "key",
            "server.count",
            "server.flag",
            "server.w",
            "clients.own.n",
            "clients.own.v",
            "clients.resident",
        ),
        *("agent.half", "agent.none"),
    ]
    stored = checkpoint._checkpointer().restore((path / "state").absolute())
    # nothing to store of an empty leaf
    assert sorted(stored) == sorted(set(names) - {"agent.none"})
    assert np.array_equal(stored["server.w"], example_state().server["w"])


def test_two_leaves_of_one_name_are_refused(tmp_path):
    state = example_state()._replace(server={"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})
    with pytest.raises(UserError, match=r"both called 'server\.a\.b'"):
        checkpoint.save(tmp_path, state, "h")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["scaffold", "random"])
def test_a_method_s_whole_state(tmp_path, name):
    """After rounds, with client banks, resident models and server state; the restored State
    continues to the same bits."""
    sim = simulation(name)
    state, data = start(sim)
    state, *_ = sim.run(state, data, jnp.int32(2))
    path = checkpoint.save(tmp_path, state, "h")
    back = checkpoint.load(path, start(sim)[0], "h")
    assert same_bits(state, back)
    assert same_bits(sim.run(state, data, jnp.int32(2)), sim.run(back, data, jnp.int32(2)))


def test_large_banks_are_written_in_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK", 3 * 6 * 4 * 4 + 5)  # three rows of the bank at a time
    state = example_state()
    path = checkpoint.save(tmp_path, state, "h")
    files = sorted(p.name for p in (path / "rows").iterdir())
    assert files == [f"clients.own.v-{first:08d}" for first in (0, 3, 6, 9)]  # 10 rows
    assert [r["large"] for r in json.loads((path / "meta.json").read_text())["leaves"]].count(
        True
    ) == 1
    assert same_bits(state, checkpoint.load(path, blank(state), "h"))


def test_rows_come_back_onto_a_mesh(tmp_path, monkeypatch):
    """Saved from two devices, loaded onto two devices and onto one: rows land where they live."""
    monkeypatch.setattr(checkpoint, "BLOCK", 100)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = lambda state: jax.tree.map(
        jax.device_put,
        state,
        state._replace(
            t=whole,
            key=whole,
            server=jax.tree.map(lambda _: whole, state.server),
            clients=jax.tree.map(lambda _: rows, state.clients),
            agent=jax.tree.map(lambda _: whole, state.agent),
        ),
    )
    state = placed(example_state())
    path = checkpoint.save(tmp_path, state, "h")
    back = checkpoint.load(path, placed(jax.tree.map(jnp.zeros_like, example_state())), "h")
    assert same_bits(state, back)
    for old, new in zip(jax.tree.leaves(state.clients), jax.tree.leaves(back.clients), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
        assert {s.data.shape[0] for s in new.addressable_shards} == {5}
    assert same_bits(state, checkpoint.load(path, blank(example_state()), "h"))


def test_newest_are_kept_and_partial_ones_ignored(tmp_path):
    (tmp_path / ".00000001.partial" / "state").mkdir(parents=True)
    (tmp_path / ".00000009.partial").mkdir()
    (tmp_path / "00000008").mkdir()  # without meta.json: not complete
    for round_ in (1, 2, 3, 4):
        checkpoint.save(tmp_path, example_state()._replace(t=jnp.int32(round_)), "h", keep=2)
    assert saved_rounds(tmp_path) == [3, 4]
    assert checkpoint.latest(tmp_path).name == "00000004"
    assert not list(tmp_path.glob(".*"))  # what a killed run left is cleared


def test_a_save_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    """Atomic: everything but the last rename happened, and the folder still offers the previous
    checkpoint."""
    checkpoint.save(tmp_path, example_state()._replace(t=jnp.int32(1)), "h")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", killed)
    monkeypatch.setattr(
        checkpoint, "write_json", lambda path, data: path.write_text(json.dumps(data))
    )
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, example_state()._replace(t=jnp.int32(2)), "h")
    assert saved_rounds(tmp_path) == [1]


def refused(path: pathlib.Path, state: State, config_hash: str = "h") -> str:
    with pytest.raises(UserError) as caught:
        checkpoint.load(path, state, config_hash)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_is_refused(tmp_path):
    state = example_state()
    path = checkpoint.save(tmp_path, state, "h")
    assert "belongs to configuration h" in refused(path, blank(state), "other")
    assert "'clients.own.n' is int32[10] there and int32[12] here" in refused(
        path, example_state(rows=12)
    )
    assert "this run's state has no 'agent.half'" in refused(path, state._replace(agent=()))
    more = state._replace(server={**state.server, "extra": jnp.zeros(2)})
    assert "it has no 'server.extra'" in refused(path, more)
    renamed = state._replace(
        server={"v": state.server["w"], **{k: state.server[k] for k in ("count", "flag")}}
    )
    # same shapes in the same order, another name
    assert "it has no 'server.v'" in refused(path, renamed)
    other = state._replace(server={**state.server, "w": jnp.zeros((3, 3), jnp.bfloat16)})
    assert "'server.w' is float32[3, 3] there and bfloat16[3, 3] here" in refused(path, other)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "format": meta["format"] + 1}))
    assert f"in format {meta['format'] + 1}; this is version" in refused(path, blank(state))


def test_wrong_values_are_noticed(tmp_path, monkeypatch):
    """Readable but different values: the checksum of every leaf is compared, for whole leaves and
    for rows."""
    monkeypatch.setattr(checkpoint, "BLOCK", 500)
    state = example_state()
    path = checkpoint.save(tmp_path, state, "h")
    meta = json.loads((path / "meta.json").read_text())
    for i, leaf in enumerate(meta["leaves"]):
        if 0 in leaf["shape"]:
            continue
        changed = json.loads(json.dumps(meta))
        changed["leaves"][i]["crc"] ^= 1
        (path / "meta.json").write_text(json.dumps(changed))
        assert "is damaged" in refused(path, blank(state)), i
    (path / "meta.json").write_text(json.dumps(meta))
    assert same_bits(state, checkpoint.load(path, blank(state), "h"))
    next((path / "rows").iterdir()).rename(path / "rows" / "gone")
    assert "is damaged" in refused(path, blank(state))
