"""The evaluation `resident`: every client with what it holds, as its method predicts, nothing sent
for the occasion."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from tiny import N, federation, simulation, start

from fedjax_sim.engine.simulation import simulate
from fedjax_sim.transforms import transformed


def client(tree, k: int):
    return jax.tree.map(lambda a: np.asarray(a[k]), tree)


def after_two_rounds(sim):
    """Four of six clients take part in a round: what some of them hold is older than the server's
    model."""
    state, data = start(sim)
    for _ in range(2):
        state = sim.examine(state, data)[0]
    return state, data


def losses(predict) -> np.ndarray:
    """[N] summed cross-entropy of predict(k, x) on the clients' test rows."""
    fed = federation()
    rows = [fed.client_rows(k, "test") for k in range(N)]
    each = lambda k: optax.softmax_cross_entropy_with_integer_labels(
        predict(k, fed.x[rows[k]]), np.asarray(fed.y)[rows[k]]
    )
    return np.array([float(each(k).sum()) for k in range(N)])


def plain(model, net, x):
    return model.head(net, model.features(net, x, train=False)[0])


def fedpam(model, resident, own, x):
    z, head = model.features(resident, x, train=False)[0], resident["params"][model.head_group]
    return z @ own.T @ head["kernel"] + head["bias"]


def fedrod(model, resident, own, x):
    head = {**resident, "params": {**resident["params"], model.head_group: own}}
    z = model.features(resident, x, train=False)[0]
    return model.head(resident, z) + model.head(head, z)


def fedcp(model, resident, own, x):
    from fedjax_sim.methods.fedcp import gates

    z, mine = (
        model.features(resident, x, train=False)[0],
        {**resident, "params": {**resident["params"], model.head_group: own}},
    )
    v = own["kernel"].sum(1)
    r, s = gates(resident["params"]["policy"], z, v / np.linalg.norm(v), None)
    return model.head(mine, r * z) + model.head(resident, s * z)


HOW = {
    "fedavg": lambda model, resident, own, x: plain(model, resident, x),
    "fedpac": lambda model, resident, own, x: plain(model, resident, x),
    "ditto": lambda model, resident, own, x: plain(model, own, x),
    "fedphp": lambda model, resident, own, x: plain(model, own, x),
    "apfl": lambda model, resident, own, x: plain(model, own.net, x),
    "fedpam": fedpam,
    "fedrod": fedrod,
    "fedcp": fedcp,
}


@pytest.mark.parametrize("name", HOW)
def test_what_is_held_is_used_as_the_method_predicts(name):
    sim = simulation(name)
    state, data = after_two_rounds(sim)
    clients, model = state.clients, sim.env.model
    want = losses(
        lambda k, x: HOW[name](model, client(clients.resident, k), client(clients.own, k), x)
    )
    found = sim.evaluate(state, data)
    np.testing.assert_allclose(found["resident"]["loss"]["total"], want, rtol=1e-4, atol=1e-5)
    if name in (
        "fedpam",
        "fedrod",
        "fedcp",
    ):  # some hold an old model: not the evaluation `personal`
        assert not np.allclose(found["personal"]["loss"]["total"], want, rtol=1e-3)


@pytest.mark.parametrize("name", ["fedbabu", "fedavg_ft"])
def test_fine_tuned_copies_are_looked_at(name):
    """Where a method fine-tunes at evaluation, so do its clients with what they hold; not in every
    evaluation."""
    sim = simulation(name)
    state, data = after_two_rounds(sim)
    assert "resident" not in sim.evaluate(state, data)
    found = sim.adapt(state, data)
    kept = losses(lambda k, x: plain(sim.env.model, client(state.clients.resident, k), x))
    assert not np.allclose(found["resident"]["loss"]["total"], kept, rtol=1e-2)
    assert not np.allclose(
        found["resident"]["loss"]["total"], found["personal"]["loss"]["total"], rtol=1e-2
    )


def test_a_transform_changes_nothing():
    sim = simulation("fedpam")
    around = simulation("fedpam", around=lambda inner: transformed(inner, ["clip:1000000"]))
    one, two = (
        s.evaluate(*after_two_rounds(s))["resident"]["loss"]["total"] for s in (sim, around)
    )
    np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize("name", ["fedpam", "ditto"])
def test_the_probe_predicts_as_the_method_does(name):
    """After local training a participant's probe is its `resident` score."""
    base = simulation(name)
    r = base.stages
    sim = simulate(
        base.method,
        dataclasses.replace(base.env, even=False, full=False),
        federation(),
        r.participation,
        r.layout,
        lr=r.lr,
        evaluations=("resident",),
        probe=True,
    )
    state, data = start(sim)
    for _ in range(2):
        state, log, _, _ = sim.examine(state, data)
    ids = np.asarray(log["probe_ids"])
    resident = sim.evaluate(state, data)["resident"]["accuracy"]["correct"]
    np.testing.assert_array_equal(np.asarray(log["probe_after_correct"]), np.asarray(resident)[ids])
