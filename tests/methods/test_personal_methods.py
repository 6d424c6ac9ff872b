"""The personalised methods: reductions to FedAvg, learning at their defaults, layouts, bad
options."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fixed_cohort import after_rounds, ctx_of, engine, rows
from tiny import CLASSES, N, assert_close, simulation, start

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.host_clients import on_host
from fedjax_sim.engine.host_clients import place as place_on_host
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.records import make_data
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.local import losses, optim
from fedjax_sim.local.score import predict_net
from fedjax_sim.methods import make_method
from fedjax_sim.types import Env, State


@pytest.mark.parametrize(
    ("name", "options", "personal"),
    [
        ("apfl", {"alpha": 0.0, "learn_alpha": False}, lambda own: own.net),
        ("fedphp", {"lam": 0.0, "mu": 0.0}, lambda own: own),
    ],
)
def test_without_its_mixture_is_fedavg(name, options, personal):
    """Uploads and the global model are FedAvg's, and the personal model is what the client
    trained."""
    want, ids, uploads = after_rounds(simulation("fedavg"))
    got, same, mine = after_rounds(simulation(name, **options))
    assert np.array_equal(ids, same)
    assert_close(uploads, mine, 1e-6)
    assert_close(want.server.net, got.server.net, 1e-6)
    assert_close(rows(personal(got.clients.own), ids), uploads, 1e-6)


@functools.cache
def skewed() -> Federation:
    """The tiny federation with two of three classes per client, which differ by a pattern; same
    shapes, so same programs."""
    fed, rng = tiny.federation(), np.random.default_rng(5)
    y = np.array(fed.y)
    for i in range(N):
        for split in fed.rows:
            own = fed.client_rows(i, split)
            y[own] = (i + np.arange(len(own)) % 2) % CLASSES
    x = rng.standard_normal((CLASSES, *fed.shape))[y] + 0.7 * rng.standard_normal(fed.x.shape)
    return dataclasses.replace(fed, x=x.astype(np.float32), y=y)


@pytest.mark.parametrize(
    "name", ["fedper", "fedrep", "fedbabu", "apfl", "perfedavg", "pfedme", "fedrod", "fedphp"]
)
def test_defaults_learn(name):
    """Ten rounds with default options: clients' own predictors lose much less than at the start,
    and nearly all is right."""
    sim = simulation(name)
    data = make_data(sim.stages, skewed())
    state, _ = start(sim)
    scores = lambda s: (sim.adapt if sim.method.adapts else sim.evaluate)(s, data)["personal"]
    total = lambda score, what: float(np.asarray(score[what[0]][what[1]]).sum())
    before = scores(state)
    for _ in range(10):
        state = sim.examine(state, data)[0]
    after = scores(state)
    assert total(after, ("loss", "total")) < 0.65 * total(before, ("loss", "total"))
    assert total(after, ("accuracy", "correct")) >= 0.85 * total(after, ("accuracy", "count"))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fedrep", {"head_epochs": -1.0}, "use 0 to 1e"),
        ("fedrep", {"head_epochs": INF}, "not a finite number"),
        ("fedbabu", {"ft_epochs": NAN}, "not a finite number"),
        ("apfl", {"alpha": 1.5}, "alpha=1.5 is not allowed; use 0 to 1"),
        ("apfl", {"alpha": NAN}, "not a finite number"),
        ("perfedavg", {"alpha": "fast"}, "'fast' is not a number; allowed: a number, or lr"),
        ("perfedavg", {"beta": "nan"}, "not a finite number"),
        ("pfedme", {"lam": -1.0}, "lam=-1 is not allowed; use 0 or more"),
        ("pfedme", {"lr_personal": INF}, "not a finite number"),
        ("pfedme", {"beta": NAN}, "not a finite number"),
        ("pfedme", {"inner_steps": 0}, "inner_steps=0 is not allowed; use 1 or more"),
        ("fedphp", {"lam": 1.1}, "lam=1.1 is not allowed; use 0 to 1"),
        ("fedphp", {"mu": NAN}, "not a finite number"),
    ],
)
def test_bad_options_are_sentences(name, options, says):
    with pytest.raises(UserError, match=rf"(?=.*{name}\.{next(iter(options))}).*{says}"):
        make_method(name, **options)


SEVEN = ("fedamp", "fedfomo", "fedpac", "fedala", "fedas", "pfedfda", "fedcp")


@functools.cache
def two_of_four() -> Federation:
    """Six clients with two of four classes each, 20 to 40 training rows: something to personalise,
    unlike in `tiny`."""
    rng = np.random.default_rng(11)
    patterns, y = rng.normal(size=(4, 6, 6, 1)), []
    rows: dict[str, list] = {"train": [], "val": [], "test": []}
    for k in range(N):
        for split, n in (("train", 20 + 4 * k), ("val", 10), ("test", 20)):
            rows[split].append(np.arange(len(y), len(y) + n))
            y += rng.choice((k % 4, (k + 1) % 4), n).tolist()
    x = (0.5 * patterns[y] + rng.normal(size=(len(y), 6, 6, 1))).astype(np.float32)
    return Federation.from_arrays(x, np.array(y), rows, classes=4, mean=0.0, std=1.0)


@pytest.mark.parametrize("name", SEVEN)
def test_default_options_learn(name):
    """Ten rounds: four of five test examples right (local training: 0.95), where a guess is right
    in one of four."""
    fed, method = two_of_four(), make_method(name)
    model = models.build("mlp", fed.shape, 4, hidden=(16,))
    model = method.extend(model)
    env = Env(model, losses.make_loss("ce", 4), optim.Sgd(0.9, 5e-4), N, 4, 10, 2.0, 2.0, rounds=10)
    who, lr = Participation(4, 4, tuple(range(N))), optim.schedule("constant", 0.05, 10)
    sim = simulate(
        method, env, fed, who, lr=lr, evaluations=("personal",), eval_every=10, capacity=1
    )
    state, data = start(sim)
    score = sim.adapt if method.adapts else sim.evaluate
    before = score(state, data)["personal"]
    after = score(sim.run(state, data, jnp.int32(10))[0], data)["personal"]
    rate = lambda s: float(np.sum(s["accuracy"]["correct"]) / np.sum(s["accuracy"]["count"]))
    assert rate(after) > max(0.8, rate(before)), (rate(before), rate(after))
    assert float(np.sum(after["loss"]["total"])) < float(np.sum(before["loss"]["total"]))


@pytest.mark.parametrize("name", ["fedamp", "fedfomo", "fedala", "fedas"])
def test_layouts_agree_after_round_one(name):
    """Two clients on each of two devices, from a state that has moved: peers' rows, loops of
    unequal length."""
    base, other = simulation(name), simulation(name, chunk=2, devices=2)
    ends = []
    for sim in (base, other):
        state, data = start(sim)
        for _ in range(3):
            state = sim.examine(state, data)[0]
        ends.append((state.server, jax.tree.map(lambda a: a[:N], state.clients)))
    assert_close(*ends, 2e-5)


@pytest.mark.parametrize("name", ["fedfomo", "fedpac"])
def test_rows_on_the_host(name):
    device = simulation(name)
    host = on_host(simulation(name, stored="cohort"))
    state, data = start(device)
    want, _, _ = device.run(state, data, jnp.int32(3))
    state = host.init(0, host.env.model.init(jax.random.key(0)))
    got, _, _ = host.run(*place_on_host(host.layout, state, host.data), jnp.int32(3))
    assert_close((want.server, want.clients), (got.server, got.clients), 2e-5)


@pytest.mark.parametrize("name", SEVEN)
def test_resnet_with_local_statistics_traces(name):
    """Every model: a round and the clients' predictors fit together, private BatchNorm statistics
    included."""
    for local in (True, False):
        sim = engine(make_method(name), (0, 1), model="resnet18", bn_local=local)
        net = jax.eval_shape(sim.env.model.init, jax.random.key(0))
        state = shapes_of(sim, net)
        after = jax.eval_shape(sim.round, state, sim.data)[0]

        def predictions(state, data, sim=sim):
            client, ctx = jax.tree.map(lambda a: a[0], state.clients), ctx_of(sim, state, data)
            predictor = sim.method.personal(sim.open(data), state.server, client, ctx)
            return (sim.method.predict or predict_net)(
                sim.open(data), predictor, data.fed.x[:3].reshape(3, *sim.env.model.shape)
            )

        assert jax.eval_shape(predictions, state, sim.data).shape == (3, tiny.CLASSES)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(
            lambda a: (a.shape, a.dtype), state
        )


def shapes_of(sim: Simulation, net):
    """A State of shapes; nothing is computed."""
    server, one = sim.shapes(net)
    rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((N, *a.shape), a.dtype), one)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return State(jax.ShapeDtypeStruct((), jnp.int32), key, server, rows, ())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedamp", {"sigma": 0.0}),
        ("fedamp", {"lam": "nan"}),
        ("fedamp", {"peers": -1}),
        ("fedfomo", {"models": 0}),
        ("fedpac", {"lam": -1.0}),
        ("fedpac", {"head_lr": "inf"}),
        ("fedala", {"share": 0.0}),
        ("fedala", {"threshold": "nan"}),
        ("fedala", {"tested": "often"}),
        ("fedas", {"align_batch": 0}),
        ("pfedfda", {"grid": 1}),
        ("fedcp", {"lam": "nan"}),
        ("fedcp", {"gate": "hard"}),
    ],
)
def test_bad_options_are_named(name, options):
    option = next(iter(options))
    of_numbers = rf"{name}.{option}(=.* is not allowed; use | .*is not a finite number; default)"
    with pytest.raises(UserError, match=rf"{option} of {name} .*; allowed: |{of_numbers}"):
        make_method(name, **options)
