"""The configuration of a run identifies its data, method, model, weights and cohorts; others are
refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_runs import HALF, ONE, refused

import fedjax_sim as fs
from fedjax_sim.api import resume, run
from fedjax_sim.cli.main import main
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.methods.fedprox import FedProx
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.runner.weights import save_net

jax.devices()


@pytest.fixture
def cut(tmp_path):
    return run(
        "fedavg", tiny.federation(), out=tmp_path / "run", rounds=4, eval_every=2, **HALF
    ).out


# ---- what a run is made of -----------------------------------------------------------------------
def other_federation():
    fed = tiny.federation()
    x = np.array(fed.x)
    x[0, 0, 0, 0] += 1
    return dataclasses.replace(fed, x=x)


def test_given_data_are_recorded_and_must_be_given_again(cut, capsys):
    stored = flat_config(json.loads((cut / "config.json").read_text()))
    assert (
        stored["dataset"] == "tiny" and stored["data"] == "arrays" and stored["partition"] == "own"
    )
    assert stored["data_fingerprint"] == tiny.federation().fingerprint() and stored["own_data"]
    assert main(["resume", str(cut), "--rounds", "6", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert "data given from Python (arrays)" in err and "fed=…" in err and err.count("\n") == 1
    refused(lambda: resume(cut, 6, fed=other_federation()), "the data are not those of the run")


@pytest.mark.parametrize(
    "more",
    [
        dict(dataset="digits"),
        dict(clients=6),
        dict(partition="iid"),
        dict(norm="none"),
        dict(val_fraction=0.1),
    ],
)
def test_words_for_data_beside_fed_are_refused(more):
    refused(
        lambda: run("fedavg", tiny.federation(), rounds=1, **HALF, **more),
        f"{next(iter(more))}=",
        "fed=",
    )


def test_a_changed_data_file_is_refused_and_a_moved_one_is_not(tmp_path):
    rng = np.random.default_rng(0)
    arrays = dict(
        x_train=rng.integers(0, 255, (60, 4, 4, 1), np.uint8),
        y_train=np.arange(60) % 3,
        x_test=rng.integers(0, 255, (9, 4, 4, 1), np.uint8),
        y_test=np.arange(9) % 3,
    )
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "mine.npz", **arrays)
    options = dict(partition="iid", clients=4, server_val=0, rounds=1, **HALF)
    a = run("fedavg", dataset=str(tmp_path / "a" / "mine.npz"), out=tmp_path / "run", **options)
    b = prepare(Experiment.of("fedavg", dataset=str(tmp_path / "b" / "mine.npz"), **options))
    assert a.setup.hash == b.hash and not a.setup.found.custom_data
    arrays["x_train"][0] ^= 1
    np.savez(tmp_path / "a" / "mine.npz", **arrays)
    refused(lambda: resume(tmp_path / "run", 2), "the data are not those of the run", "mine.npz")


class OwnProx(FedProx):
    """A method without a name of its own."""


def test_a_method_with_a_name_is_a_run_by_that_name(tmp_path):
    """Given as an object: the same configuration, so that it is resumed and exported without it."""
    import fedjax_sim as fs
    from agents import SAC

    fed = tiny.federation()
    setup = run(fs.FedProx(mu=5.0), fed, rounds=1, out=tmp_path / "run", **HALF).setup
    method = setup.experiment.method
    assert (method.name, method.options) == ("fedprox", {"mu": 5.0})
    assert setup.found.custom_method == ""
    named = run("fedprox", fed, rounds=2, mu=5.0, **HALF)
    assert setup.hash == named.setup.hash
    assert tiny.same_bits(resume(tmp_path / "run", 2, fed=fed).state, named.state)
    of = lambda method: (
        prepare(Experiment.of("fedavg", **HALF), fed=fed, method=method).experiment.method.options
    )
    assert of(fs.FedPolicy()) == {}
    assert of(fs.FedPolicy(agent=SAC(lr=0.01, capacity=None), lam=0.5)) == {
        "lam": 0.5,
        "agent": "sac",
        "agent.lr": 0.01,
    }
    assert of(fs.FedPolicy(agent="full")) == {"agent": "full"}


def test_method_objects_keep_their_own_options(tmp_path):
    fed = tiny.federation()
    whole = run(OwnProx(mu=5.0), fed, rounds=3, out=tmp_path / "whole", **HALF)
    run(OwnProx(mu=5.0), fed, rounds=2, out=tmp_path / "cut", **HALF)
    refused(
        lambda: resume(tmp_path / "cut", 3, fed=fed),
        "a method given as an object (OwnProx)",
        "method=…",
    )
    refused(
        lambda: resume(tmp_path / "cut", 3, fed=fed, method=OwnProx(mu=1.0)), "mu=5.0", "mu=1.0"
    )
    rest = resume(tmp_path / "cut", 3, fed=fed, method=OwnProx(mu=5.0))
    assert tiny.same_bits(rest.state, whole.state)
    named = run("fedprox", fed, rounds=3, mu=5.0, **HALF)  # the option by its name
    assert tiny.same_bits(
        named.state.server, whole.state.server
    ) and named.setup.experiment.method.options == {"mu": 5.0}
    assert not tiny.same_bits(
        run("fedprox", fed, rounds=3, **HALF).state.server, whole.state.server
    )


def test_unknown_keywords_are_a_sentence():
    refused(
        lambda: run("fedprox", tiny.federation(), muh=1.0, **HALF),
        "option of a run or of method 'fedprox' 'muh'",
        "'mu'",
    )
    refused(lambda: run("fedavg", tiny.federation(), roundz=1, **HALF), "did you mean 'rounds'")
    refused(
        lambda: run(FedProx(), tiny.federation(), mu=1.0, **HALF), "'mu' is not an option of a run"
    )
    refused(lambda: run("fedavg", tiny.federation(), own_data=True, **HALF), "'own_data'")


def test_user_models_are_recorded_by_their_shapes(tmp_path):
    fed, build = tiny.federation(), lambda n: fs.build("mlp", (4, 4, 1), 3, hidden=(n,))
    options = {k: v for k, v in HALF.items() if not k.startswith("model")}
    run("fedavg", fed, model=build(5), rounds=1, out=tmp_path / "run", **options)
    refused(
        lambda: resume(tmp_path / "run", 2, fed=fed), "a model given as an object (mlp)", "model=…"
    )
    refused(
        lambda: resume(tmp_path / "run", 2, fed=fed, model=build(6)),
        "the model is not that of the run",
    )
    assert resume(tmp_path / "run", 2, fed=fed, model=build(5)).summary["rounds"] == 2
    small = fs.build("mlp", (3, 3, 1), 3, hidden=(5,))
    refused(lambda: run("fedavg", fed, model=small, rounds=1, **options), "is for images (3, 3, 1)")


# ---- the hash ------------------------------------------------------------------------------------
def test_the_hash_knows_values_not_how_or_where_they_are_written():
    same = [
        Experiment.of("fedprox", options={"mu": mu}).hash() for mu in (0.1, "0.10", "0.1", "1e-1")
    ]
    assert len(set(same)) == 1 != Experiment.of("fedprox", options={"mu": 0.2}).hash()
    hidden = [Experiment.of(model_options={"hidden": h}).hash() for h in ("64", 64, (64,), [64])]
    assert (
        len(set(hidden)) == 1
        and Experiment.of(model_options={"hidden": "64x32"}).hash() not in hidden
    )
    assert (
        Experiment.of(epochs=1).hash()
        == Experiment.of(epochs=1.0).hash()
        != Experiment.of(epochs=2).hash()
    )
    assert Experiment.of(data_dir="/a", init="x.npz").hash() == Experiment.of().hash()
    assert (
        Experiment.of(dataset="/a/mine.npz").hash()
        == Experiment.of(dataset="b/mine.npz").hash()
        != Experiment.of(dataset="its.npz").hash()
    )
    assert Experiment.of(cohorts=((0, 1),)).hash() != Experiment.of(cohorts=((1, 0),)).hash()


def test_resume_does_not_need_the_initial_weights(tmp_path):
    fed, setup = (
        tiny.federation(),
        prepare(Experiment.of("fedavg", rounds=1, **HALF), fed=tiny.federation()),
    )
    net = jax.tree.map(lambda a: a + 0.1, setup.net)
    save_net(tmp_path / "net.npz", net)
    whole = run("fedavg", fed, init=str(tmp_path / "net.npz"), rounds=2, **HALF)
    first = run(
        "fedavg", fed, init=str(tmp_path / "net.npz"), rounds=1, out=tmp_path / "run", **HALF
    )
    given = prepare(Experiment.of("fedavg", rounds=1, **HALF), fed=fed, net=net)
    assert first.setup.hash == given.hash != setup.hash  # the content counts, not its place
    (tmp_path / "net.npz").unlink()
    assert tiny.same_bits(resume(tmp_path / "run", 2, fed=fed).state, whole.state)


def test_weights_are_checked(tmp_path):
    fed, setup = (
        tiny.federation(),
        prepare(Experiment.of("fedavg", rounds=1, **HALF), fed=tiny.federation()),
    )
    start = lambda net: prepare(Experiment.of("fedavg", rounds=1, **HALF), fed=fed, net=net)
    bad = jax.tree.map(np.array, setup.net)
    bad["params"]["fc"]["bias"][1] = np.nan
    refused(lambda: start(bad), "net", "'params/fc/bias' has numbers that are not finite")
    save_net(tmp_path / "bad.npz", bad)
    init = lambda name: prepare(
        Experiment.of("fedavg", rounds=1, init=str(tmp_path / name), **HALF), fed=fed
    )
    refused(lambda: init("bad.npz"), "not finite")
    (tmp_path / "empty.npz").touch()
    refused(lambda: init("empty.npz"), "cannot be read as .npz")
    refused(
        lambda: start({"params": {"fc": setup.net["params"]["fc"]}}), "'params/fc1/bias' is missing"
    )
    refused(lambda: start({**setup.net, "more": np.zeros(1)}), "the model has no 'more'")
    refused(lambda: start({"params": "weights"}), "net")


def test_precision_of_models():
    refused(
        lambda: fs.build("mlp", (4, 4, 1), 3, dtype=jnp.float64), "float64 needs JAX's 64-bit mode"
    )
    half = fs.build("mlp", (4, 4, 1), 3, dtype=jnp.bfloat16, hidden=(5,))
    refused(
        lambda: prepare(Experiment.of("fedavg"), fed=tiny.federation(), model=half),
        "bfloat16 weights but the run is float32",
    )


@pytest.mark.parametrize(
    "cohorts, more, message",
    [
        ([[0, 9]], {}, "cohort 0 names client 9; allowed: 0 to 5"),
        ([[0, 1], [-1, 2]], {}, "cohort 1 names client -1"),
        ([[0, 1], [2, 2]], {}, "cohort 1 names client 2 twice"),
        ([[0, 1], [2]], {}, "cohort 1 has 1 clients and cohort 0 has 2"),
        ([[]], {}, "cohort 0 has 0 clients"),
        ([[0, 1], [2, 3], [4, 5]], dict(unseen=1), "kept out of training"),
        (
            [[0, 1]],
            dict(participation="3/6"),
            "participation '3/6' does not fit cohorts of 2 clients",
        ),
        ([[0.5, 1]], {}, "cohorts must list the ids"),
        (7, {}, "cohorts must list the ids"),
    ],
)
def test_cohorts_are_checked(cohorts, more, message):
    refused(
        lambda: run("fedavg", tiny.federation(), cohorts=cohorts, rounds=1, **ONE, **more), message
    )


def test_cohorts_are_kept_and_resumed(tmp_path):
    fed, cohorts = tiny.federation(), [[0, 1], [2, 3], [4, 5]]
    whole = run("fedavg", fed, cohorts=cohorts, rounds=5, **ONE)
    first = run("fedavg", fed, cohorts=np.array(cohorts), rounds=2, out=tmp_path / "run", **ONE)
    assert first.setup.participation.high == 2 and first.setup.hash == whole.setup.hash
    assert tiny.same_bits(resume(tmp_path / "run", 5, fed=fed).state, whole.state)
