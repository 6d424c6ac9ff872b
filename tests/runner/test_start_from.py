"""`start_from`: named parts of another run's newest checkpoint are the start of a new one, bit for
bit."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import tiny

from fedjax_sim.api import resume, run
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.runner import checkpoint
from fedjax_sim.runner.many import run_seeds
from fedjax_sim.runner.prepare import prepare

OPTIONS = dict(
    model="mlp",
    model_options={"hidden": (5,)},
    devices="1",
    chunk="1",
    batch_size=4,
    lr=0.05,
    epochs=1.0,
    participation="0.5",
    loss="ce",
)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Three rounds of a controlled method: a server, an agent with a learner and a memory, and
    resident models."""
    out = tmp_path_factory.mktemp("first") / "run"
    return run("fedpolicy", tiny.federation(), out=out, rounds=3, **OPTIONS)


def fresh(text: str | None, method: str = "fedpolicy", **more):
    return prepare(
        Experiment.of(method, rounds=2, seed=9, start_from=text, **{**OPTIONS, **more}),
        fed=tiny.federation(),
    )


def refused(text: str, **more) -> str:
    with pytest.raises(UserError) as caught:
        fresh(text, **more).first_state()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_named_parts_and_nothing_else(first):
    """The agent and one layer come over bit for bit; every other leaf is the fresh run's own."""
    state = fresh(f"{first.out}:agent,server.net.params.fc1").first_state()
    plain = fresh(None).first_state()
    chosen = 0
    for name, old, new, own in zip(
        checkpoint.leaf_names(state),
        *map(jax.tree.leaves, (first.state, state, plain)),
        strict=True,
    ):
        taken = name.startswith(("agent.", "server.net.params.fc1."))
        chosen += taken
        assert np.array_equal(np.asarray(new), np.asarray(old if taken else own)), name
    assert chosen > 10 and int(state.t) == 0
    assert not tiny.same_bits(plain.agent, first.state.agent)


def test_the_run_goes_on_from_them_and_resume_needs_them_no_more(first, tmp_path):
    source = tmp_path / "moved"
    shutil.copytree(first.out, source)
    options = dict(OPTIONS, seed=9, start_from=f"{source}:agent,server")
    whole = run("fedpolicy", tiny.federation(), out=tmp_path / "whole", rounds=4, **options)
    run("fedpolicy", tiny.federation(), out=tmp_path / "cut", rounds=2, **options)
    text = (tmp_path / "cut" / "config.json").read_text()
    stored = json.loads(text)
    assert (
        flat_config(stored)["started_with"].startswith("agent,server@") and str(source) not in text
    )
    shutil.rmtree(source)
    rest = resume(tmp_path / "cut", 4, fed=tiny.federation())
    assert tiny.same_bits(rest.state.server, whole.state.server)
    assert rest.setup.hash == whole.setup.hash == stored["config_hash"]
    assert (tmp_path / "cut" / "rounds.csv").read_text() != (first.out / "rounds.csv").read_text()


def test_the_hash_knows_the_content_not_the_place(first, tmp_path):
    other = tmp_path / "elsewhere"
    shutil.copytree(first.out, other)
    here, there = fresh(f"{first.out}:server,agent"), fresh(f"{other}:agent,server")
    assert here.hash == there.hash != fresh(None).hash
    assert fresh(f"{first.out}:server").hash != here.hash
    longer = resume(other, 4, fed=tiny.federation())  # the same run, one round later: other content
    assert longer.summary["rounds"] == 4
    assert fresh(f"{other}:agent,server").hash != here.hash


def test_every_seed_starts_from_them(first):
    for mode in ("loop", "vmap"):
        results = run_seeds(fresh(f"{first.out}:server"), 2, None, mode)
        assert [r.summary["rounds"] for r in results] == [2, 2]
        assert {r.setup.found.started_with for r in results} == {
            fresh(f"{first.out}:server").found.started_with
        }


def test_rows_of_clients_come_block_by_block(first, tmp_path, monkeypatch):
    """Client rows written in blocks, into the device's and into the host's buffers."""
    monkeypatch.setattr(checkpoint, "BLOCK", 1)
    path = checkpoint.save(tmp_path / "run" / "checkpoints", first.state, "h")
    assert any((path / "rows").iterdir())
    for where in ("device", "host"):
        state = fresh(f"{tmp_path / 'run'}:clients.resident", state_on=where).first_state()
        assert tiny.same_bits(state.clients.resident, first.state.clients.resident)
        assert not tiny.same_bits(state.server, first.state.server)


def test_what_does_not_fit_is_one_sentence(first, tmp_path):
    assert "use RUN:PART,PART" in refused(str(first.out)) and "use RUN:PART,PART" in refused(
        f"{first.out}:,"
    )
    assert "there is no run directory" in refused(f"{tmp_path / 'nowhere'}:agent")
    assert "holds no complete checkpoint" in refused(f"{tmp_path}:agent")
    assert "has no part 'agnt'; allowed: agent, clients, server" in refused(f"{first.out}:agnt")
    assert "has no part 'server.nets'; allowed: server.acc, server.net" in refused(
        f"{first.out}:server.nets"
    )
    assert "has no part 't'" in refused(f"{first.out}:t") and "has no part 'agen'" in refused(
        f"{first.out}:agen"
    )
    wider = refused(f"{first.out}:server.net", model_options={"hidden": (6,)})
    assert "'server.net.params.fc.kernel' is float32[5, 3] there and float32[6, 3] here" in wider
    assert "this run's state has no 'agent." in refused(f"{first.out}:agent", method="fedavg")


def test_a_mistake_leaves_no_directory(first, tmp_path):
    with pytest.raises(UserError, match="this run's state has no"):
        run(
            "fedavg",
            tiny.federation(),
            out=tmp_path / "new",
            rounds=1,
            **OPTIONS,
            start_from=f"{first.out}:agent",
        )
    assert not (tmp_path / "new").exists()
