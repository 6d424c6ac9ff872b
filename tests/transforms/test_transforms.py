"""Methods around methods: what is sent, what is kept, what the server makes of it, and what it
costs.

That a neutral transform is the plain run, for every method: `test_contract.py`.
"""

from __future__ import annotations

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from commands import SMALL, empty_folder, refused
from tiny import M, assert_close, same_bits, simulation, start, traced_once

import fedjax_sim as fs
from fedjax_sim.cli.main import main
from fedjax_sim.errors import UserError
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.transforms import transformed

__all__ = ["empty_folder"]  # used by every test


def one_round(name: str, *texts: str, rounds: int = 1, **more):
    """(state, log, ids, uploads) after some rounds of the method inside the transforms."""
    sim = simulation(name, around=lambda method: transformed(method, texts), **more)
    state, data = start(sim)
    for _ in range(rounds):
        state, log, ids, nets = sim.examine(state, data)
    return state, log, np.asarray(ids), nets


def lengths(nets, start_net) -> np.ndarray:
    """[M] ‖w_k − start‖."""
    apart = jax.tree.map(
        lambda a, b: np.asarray(a) - np.asarray(b), nets["params"], start_net["params"]
    )
    return np.sqrt(sum(np.square(a).reshape(M, -1).sum(1) for a in jax.tree.leaves(apart)))


def initial() -> dict:
    return simulation("fedavg").env.model.init(jax.random.key(0))


# ---- clipping ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_wide_clip_is_the_plain_run(name):
    plain, clipped = one_round(name), one_round(name, "clip:1e6")
    assert same_bits((plain[0].server, plain[3]), (clipped[0].server.inner, clipped[3]))


def test_an_update_is_no_longer_than_the_norm():
    plain, clipped = one_round("fedavg"), one_round("fedavg", "clip:0.05")
    free, cut = lengths(plain[3], initial()), lengths(clipped[3], initial())
    assert (free > 0.05).all()
    np.testing.assert_allclose(cut, 0.05, rtol=1e-4)
    turned = jax.tree.map(
        lambda a, b, s: (a - s) / 0.05 - (b - s) / free.reshape(-1, *[1] * (a.ndim - 1)),
        clipped[3]["params"],
        plain[3]["params"],
        initial()["params"],
    )
    assert all(np.abs(a).max() < 1e-4 for a in jax.tree.leaves(turned))  # the same direction


def test_what_is_payload_is_clipped_too_and_what_is_logged_is_not():
    """SCAFFOLD's control variates are sent; FedPolicy's report is not."""
    plain, clipped = one_round("scaffold"), one_round("scaffold", "clip:0.05")
    size = lambda state: math.sqrt(sum(np.square(a).sum() for a in jax.tree.leaves(state.control)))
    assert size(clipped[0].server.inner) <= M * 0.05 / 6 + 1e-6 < size(plain[0].server)
    named, same = (
        one_round("fedpolicy", agent="full"),
        one_round("fedpolicy", "clip:0.05", agent="full"),
    )
    for name in ("local_gain", "head_mismatch", "reward"):
        if name != "reward":  # the reward also knows the server's model
            np.testing.assert_array_equal(named[1][name], same[1][name])


def test_a_client_keeps_what_it_trained():
    plain, clipped = one_round("full"), one_round("full", "clip:0.05")
    assert same_bits(plain[0].clients.resident, clipped[0].clients.resident)
    assert not same_bits(plain[0].server.net, clipped[0].server.inner.net)


# ---- sparse uploads ------------------------------------------------------------------------------
def test_topk_sends_few_entries_and_remembers_the_rest():
    state, _, ids, nets = one_round("fedavg", "topk:0.1")
    plain = one_round("fedavg")[3]
    left = state.clients.own.mine
    for group, sub in initial()["params"].items():
        for leaf, start_leaf in sub.items():
            sent = np.asarray(nets["params"][group][leaf]) - np.asarray(start_leaf)
            whole = np.asarray(plain["params"][group][leaf]) - np.asarray(start_leaf)
            count = max(1, math.ceil(0.1 * start_leaf.size))
            for slot, client in enumerate(ids):
                assert np.count_nonzero(np.abs(sent[slot]) > 1e-9) <= count
                kept = np.asarray(left[group][leaf][client])
                np.testing.assert_allclose(sent[slot] + kept, whole[slot], atol=1e-6)
                smallest_sent = np.sort(np.abs(whole[slot]).ravel())[-count]
                assert np.abs(kept).max() <= smallest_sent + 1e-6
    absent = np.setdiff1d(np.arange(6), ids)
    assert all(not np.asarray(a)[absent].any() for a in jax.tree.leaves(left))


def test_what_is_left_is_sent_later():
    """Error feedback: with a learning rate of 0 a client sends, the next time, from what it
    remembers alone."""
    sim = simulation("fedavg", around=lambda method: transformed(method, ["topk:0.1"]))
    state, data = start(sim)
    state, _, ids, _ = sim.examine(state, data)
    numbers = data.numbers._replace(lr=jax.tree.map(jnp.zeros_like, data.numbers.lr))
    before = state.clients.own.mine
    after, _, again, _ = sim.examine(state, data._replace(numbers=numbers))
    for k in set(np.asarray(ids).tolist()) & set(np.asarray(again).tolist()):
        size = lambda tree: sum(float(jnp.square(a[k]).sum()) for a in jax.tree.leaves(tree))
        assert size(after.clients.own.mine) < size(before)


def test_order_matters():
    """The first one listed is nearest to the method."""
    clip_first, topk_first = (
        one_round("fedavg", "clip:0.05", "topk:0.1"),
        one_round("fedavg", "topk:0.1", "clip:0.05"),
    )
    assert (lengths(clip_first[3], initial()) < 0.049).all()  # cut short, then thinned out
    # thinned out, then cut
    np.testing.assert_allclose(lengths(topk_first[3], initial()), 0.05, rtol=1e-3)
    assert transformed(fs.FedAvg(), ["clip:0.05", "topk:0.1"]) == fs.TopK(
        0.1, fs.Clip(0.05, fs.FedAvg())
    )


def test_resume_is_exact_and_another_norm_is_no_other_program():
    sim = traced_once(
        simulation("fedprox", around=lambda method: fs.TopK(0.2, fs.Clip(0.5, method)))
    )
    data = start(sim)[1]
    whole = sim.run(start(sim)[0], data, jnp.int32(4))[0]
    half = sim.run(start(sim)[0], data, jnp.int32(2))[0]
    assert same_bits(whole, sim.run(half, data, jnp.int32(2))[0])
    other = data.numbers._replace(method=jax.tree.map(lambda a: a / 4, data.numbers.method))
    tighter = sim.run(start(sim)[0], data._replace(numbers=other), jnp.int32(4))[0]
    assert not same_bits(whole.server, tighter.server)


def test_on_a_mesh():
    texts = lambda method: transformed(method, ["topk:0.3", "fedavgm"])
    one, two = simulation("fedprox", around=texts), simulation("fedprox", around=texts, devices=2)
    want, got = one.examine(*start(one)), two.examine(*start(two))
    assert_close(want[0].server, got[0].server)
    assert_close(want[3], got[3])


def test_the_bits_of_a_sparse_upload():
    sim = simulation("scaffold", around=lambda method: transformed(method, ["topk:0.1"]))
    net = initial()
    wire, plain = sim.method.wire(sim.env, net), sim.method.inner.wire(sim.env, net)
    assert (wire.down, wire.beside_down, wire.beside_up) == (
        plain.down,
        plain.beside_down,
        plain.beside_up,
    )
    group = [a.size for a in jax.tree.leaves(net["params"]["fc1"])]  # 16x5 and 5
    assert wire.up[0] == sum(
        max(1, math.ceil(n / 10)) * (32 + math.ceil(math.log2(n))) for n in group
    )
    assert fs.TopK(1.0, fs.FedAvg()).wire(sim.env, net) == fs.FedAvg().wire(sim.env, net)


# ---- the server's step ---------------------------------------------------------------------------
def flat(net) -> np.ndarray:
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(net["params"])]).astype(np.float64)


def test_a_step_of_one_is_the_plain_run():
    plain, stepped = (
        one_round("fedavg", rounds=2),
        one_round("fedavg", "server_optimizer", rounds=2),
    )
    assert_close(plain[0].server, stepped[0].server.inner, 1e-5)


@pytest.mark.parametrize(
    "text", ["fedavgm:lr=0.5", "fedadam:lr=0.1,tau=0.01", "fedyogi:lr=0.1", "fedadagrad:lr=0.1"]
)
def test_rules_by_hand(text):
    """Two rounds from the mean updates, in NumPy."""
    sim = simulation("fedavg", around=lambda method: transformed(method, [text]))
    rule = sim.method
    state, data = start(sim)
    w, m, v = flat(state.server.inner.net), 0.0, 0.0
    for t in (1, 2):
        weights = np.asarray(data.fed.size["train"])
        state, _, ids, nets = sim.examine(state, data)
        share = weights[np.asarray(ids)] / weights[np.asarray(ids)].sum()
        sent = np.stack([flat(jax.tree.map(lambda a, i=i: a[i], nets)) for i in range(M)])
        g = w - share @ sent
        b1, b2 = rule.beta1, rule.beta2
        if rule.rule == "momentum":
            m = b1 * m + g
            u = m
        elif rule.rule == "adagrad":
            v = v + g**2
            u = np.where(v > 0, g / np.sqrt(v + rule.tau), 0)
        else:
            start_v = 1e-6 if rule.rule == "yogi" and t == 1 else v
            m = b1 * (1e-6 if rule.rule == "yogi" and t == 1 else m) + (1 - b1) * g
            v = (
                b2 * v + (1 - b2) * g**2
                if rule.rule == "adam"
                else start_v - (1 - b2) * np.sign(start_v - g**2) * g**2
            )
            u = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + rule.tau)
        w = w - rule.lr * u
        np.testing.assert_allclose(flat(state.server.inner.net), w, atol=2e-5)


def test_nobody_reported_moves_nothing():
    sim = simulation("fedavg", around=lambda method: transformed(method, ["topk:0.3", "fedavgm"]))
    state, data = start(sim)
    state = sim.examine(state, data)[0]
    after = sim.examine(state, data._replace(dropout=np.float32(1.0)))[0]
    assert same_bits((state.server, state.clients), (after.server, after.clients))


# ---- messages ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "texts", "says"),
    [
        ("fedavg", ["clap:1"], r"unknown transform 'clap' .did you mean 'clip'"),
        (
            "fedavg",
            ["clip:norn=1"],
            r"unknown option of transform 'clip' 'norn' .did you mean 'norm'",
        ),
        ("fedavg", ["clip:0"], r"clip.norm=0 is not allowed; use a number above 0"),
        ("fedavg", ["clip:1,2"], "has more values than options; allowed: norm"),
        ("fedavg", ["topk:2"], r"topk.share=2 is not allowed; use a number above 0 to 1"),
        ("local", ["fedadam"], "steps from a common model, and method 'local' has none"),
        (
            "fedamp",
            ["clip:1"],
            "method 'fedamp' refuses transform 'clip': its clients read each other's stored models",
        ),
    ],
)
def test_mistakes_are_sentences(method, texts, says):
    with pytest.raises(UserError, match=says):
        transformed(fs.make_method(method), texts)


def test_the_command(capsys):
    argv = [
        "run",
        "fedprox",
        *SMALL,
        "--rounds",
        "2",
        "--transform",
        "clip:0.5",
        "--transform",
        "topk:0.1",
        "--out",
        "o",
    ]
    assert main(argv) == 0
    config = flat_config(json.loads(pathlib.Path("o/config.json").read_text()))
    assert config["transforms"] == ["clip:0.5", "topk:0.1"] and config["method"] == "fedprox"
    whole = fs.resume("o", 3)
    assert whole.setup.simulation.method == fs.TopK(0.1, fs.Clip(0.5, fs.FedProx()))
    assert whole.rounds[0]["bytes_up"] < whole.rounds[0]["bytes_down"] / 4
    capsys.readouterr()
    assert "did you mean 'clip'" in refused(capsys, "run", "fedavg", *SMALL, "--transform", "clap")
    assert main(["list", "transforms"]) == 0 and "fedadam" in capsys.readouterr().out


def test_given_as_an_object_it_is_the_run_by_its_words():
    more = dict(model="mlp", rounds=1, epochs=1, participation="1", devices="1", chunk="1")
    one = fs.run(fs.TopK(0.1, fs.Clip(0.5, fs.FedProx(0.1))), tiny.federation(), **more)
    two = fs.run(
        "fedprox", tiny.federation(), mu=0.1, transforms=["clip:norm=0.5", "topk:share=0.1"], **more
    )
    assert one.setup.hash == two.setup.hash and same_bits(one.state, two.state)
