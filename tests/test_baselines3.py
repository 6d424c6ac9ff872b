"""FedAS, pFedFDA, FedCP, and what all seven of these baselines promise: closed forms, layouts, learning."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import N, assert_close, federation, same_bits, simulation, start

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.host_rows import on_host
from fedjax_sim.engine.host_rows import place as place_on_host
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.local import descend, losses, optim, stream
from fedjax_sim.local.score import predict_net
from fedjax_sim.methods import fedas as fedas_file
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedas import alignment, fisher_trace
from fedjax_sim.methods.fedcp import context, gates
from fedjax_sim.methods.fedprox import pull
from fedjax_sim.methods.local_only import LocalOnly
from fedjax_sim.methods.pfedfda import Gaussians, fit, lda, surface
from fedjax_sim.types import Ctx, Env, State

SEVEN = ("fedamp", "fedfomo", "fedpac", "fedala", "fedas", "pfedfda", "fedcp")


def engine(method: Method, cohort: tuple[int, ...], model: str = "mlp", chunk: int = 1, **env_options) -> Simulation:
    """The tiny federation with one fixed cohort."""
    options = {"hidden": (5,)} if model == "mlp" else {}
    net_of = models.build(model, federation().shape, tiny.CLASSES, **options)
    net_of = method.extend(net_of)
    loss = losses.make_loss("ce", tiny.CLASSES)
    env = Env(net_of, loss, optim.Sgd(0.9, 5e-4), N, len(cohort), tiny.BATCH, 2.0, 2.0, rounds=8, **env_options)
    who = Participation(len(cohort), len(cohort), tuple(range(N)), schedule=(cohort,))
    lr = optim.schedule("constant", 0.05, 8)
    return simulate(method, env, federation(), who, Layout(chunk), lr=lr, evaluations=())


def scattered(state, scale: float):
    """Every client holds a model of its own, `scale` apart from the others'."""
    draws = itertools.count()
    move = lambda a: a + scale * jax.random.normal(jax.random.key(next(draws)), a.shape)
    return state._replace(clients=state.clients._replace(resident=jax.tree.map(move, state.clients.resident)))


@functools.cache
def alone(cohort: tuple[int, ...], strength: float = 0.0) -> Simulation:
    """Local training, with a proximal pull to where each client starts."""
    return engine(Pulled(strength=strength), cohort)


class Pulled(LocalOnly):
    strength: float = 0.0

    def local(self, env, net, server, client, ctx):
        client, done = descend(env, net, client, ctx, adjust=pull(self.strength, net["params"]))
        return client, self.upload(env, ctx, done)


# ---- FedAS --------------------------------------------------------------------------------------------------------
def test_fedas_with_equal_traces_averages_uniformly(monkeypatch):
    cohort = (0, 3, 4, 5)
    sim = engine(make_method("fedas"), cohort)
    state, data = start(sim)
    after, _, _, nets = sim.examine(state, data)
    mean = lambda nets, w: jax.tree.map(lambda a: jnp.tensordot(w, a, 1) / w.sum(), nets)
    env = sim.open(data)
    ctx = lambda k: sim.orders(state, data).slots.ctx._asdict() | {"id": jnp.int32(cohort[k])}
    keys = sim.orders(state, data).slots.ctx.key
    traces = jnp.stack(
        [
            fisher_trace(env, jax.tree.map(lambda a, k=k: a[k], nets), Ctx(**(ctx(k) | {"key": keys[k]})))
            for k in range(len(cohort))
        ]
    )
    assert traces.max() > 1.1 * traces.min()
    assert_close(after.server.net, mean(nets, traces), 1e-5)
    monkeypatch.setattr(fedas_file, "fisher_trace", lambda env, net, ctx: jnp.full((), 0.37))
    sim = engine(make_method("fedas"), cohort)
    after, _, _, nets = sim.examine(state, data)
    assert_close(after.server.net, mean(nets, jnp.ones(len(cohort))), 1e-6)
    # the clients' heads are their own: not averaged before the next round
    told = lambda s: sim.method.receive(env, s.server, jax.tree.map(lambda a: a[0], s.clients), None, ctx_of(sim, s, data))
    assert_close(
        jax.jit(told)(after)[1]["params"]["fc"], jax.tree.map(lambda a: a[0], after.clients.resident["params"]["fc"])
    )


def ctx_of(sim: Simulation, state, data) -> Ctx:
    """Of the first client of the cohort."""
    return jax.tree.map(lambda a: a[0], sim.orders(state, data).slots.ctx)


def test_fedas_trace_adds_up_over_batches():
    sim = engine(make_method("fedas"), (2,))
    state, data = start(sim)
    env, ctx = sim.open(data), ctx_of(sim, state, data)
    net = state.server.net
    draw = stream(env, ctx, jax.random.fold_in(ctx.key, fedas_file.FISHER), 1)
    total = 0.0
    for k in range(4):  # 14 examples: 4, 4, 4, 2
        batch = draw(jnp.int32(k))
        x, y = batch.x[np.asarray(batch.mask)], batch.y[np.asarray(batch.mask)]

        def nll(params, x=x, y=y):
            logits = env.model.head({"params": params}, env.model.features({**net, "params": params}, x)[0])
            return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y].mean()

        total += sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(jax.grad(nll)(net["params"])))
    assert np.isclose(float(fisher_trace(env, net, ctx)), total, rtol=1e-5)


def test_fedas_alignment_is_a_sum_over_classes():
    rng = np.random.default_rng(2)
    features, goals = rng.normal(size=(7, 3)), rng.normal(size=(4, 3))
    labels, mask = np.array([0, 0, 2, 2, 2, 1, 1]), np.array([1, 1, 1, 1, 1, 1, 0], bool)
    want = sum(np.mean((features[mask & (labels == c)] - goals[c]) ** 2) for c in (0, 1, 2))
    features[6] = np.nan  # padding may hold anything
    got = alignment(jnp.asarray(features), jnp.asarray(goals)[labels], jnp.asarray(labels), jnp.asarray(mask), 4)
    assert np.isclose(float(got), want, rtol=1e-6)


# ---- pFedFDA ------------------------------------------------------------------------------------------------------
def gaussian_task(seed: int, n: int = 40, d: int = 5, spread: float = 0.6):
    """(features, labels, common Gaussians, prior): class 2 is absent, the common means are somewhat off."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, d))
    labels = rng.integers(0, 2, n)
    features = centres[labels] + rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * spread
    common = Gaussians(centres + 0.8 * rng.normal(size=(3, d)), np.eye(d) * 2.0)
    return features, labels, common, np.bincount(labels, minlength=3) / n + 1e-4


def test_lda_head_is_the_closed_form():
    """Bayes' rule with Gaussian densities gives the same log-odds."""
    features, labels, common, prior = gaussian_task(0)
    with jax.enable_x64(True):
        mine = fit(jnp.asarray(features), jnp.asarray(labels), jnp.ones(40, bool), jnp.asarray(common.mean), False)
        coef, bias = lda(mine, jnp.asarray(prior))
        np.testing.assert_array_equal(mine.mean[2], common.mean[2])  # absent: the common one
        around = np.concatenate([features[labels == c] - features[labels == c].mean(0) for c in (0, 1)])
        np.testing.assert_allclose(mine.covariance, around.T @ around / 39 + np.eye(5), atol=1e-12)
        smooth = (1 - 1e-4) * np.asarray(mine.covariance) + 1e-4 * np.trace(mine.covariance) / 5 * np.eye(5)
        inverse = np.linalg.inv(smooth)
        logits = features @ np.asarray(coef).T + np.asarray(bias)
        density = np.stack([-0.5 * np.einsum("ni,ij,nj->n", f, inverse, f) for f in features - mine.mean[:, None]], 1)
        density += np.log(prior)
        np.testing.assert_allclose(logits - logits[:, :1], density - density[:, :1], atol=1e-9)
        jittered = fit(jnp.asarray(features), jnp.asarray(labels), jnp.ones(40, bool), jnp.asarray(common.mean), True)
        np.testing.assert_allclose(jittered.covariance - mine.covariance, 1e-4, atol=1e-12)


def test_interpolation_search_against_a_fine_grid():
    """What 21 values find is near what 101 find, and hardly worse; padding does not matter."""
    search = jax.jit(surface, static_argnums=6)
    few, many = jnp.linspace(0, 1, 21), jnp.linspace(0, 1, 101)
    at = lambda losses: np.array(np.unravel_index(losses.argmin(), losses.shape)) / (len(losses) - 1)
    inner = 0
    for seed in range(5):
        features, labels, common, prior = gaussian_task(seed, n=16, spread=1.5)
        pad = lambda a: np.concatenate([a, np.full((3, *a.shape[1:]), 2, a.dtype)])
        rest = Gaussians(*map(np.float32, common)), np.float32(prior)
        coarse = np.asarray(search(np.float32(pad(features)), pad(labels), np.arange(19) < 16, *rest, few, False))
        if seed == 0:
            plain = search(np.float32(features), labels, np.ones(16, bool), *rest, few, False)
            np.testing.assert_allclose(coarse, plain, atol=1e-5)
        fine = np.asarray(search(np.float32(pad(features)), pad(labels), np.arange(19) < 16, *rest, many, False))
        assert fine.min() - 1e-6 <= coarse.min() <= fine.min() + 3e-3
        assert np.abs(at(fine) - at(coarse)).max() <= 0.1
        inner += (np.abs(at(coarse) - 0.5) < 0.5).any()
    assert inner >= 3  # not only corners


def test_pfedfda_survives_a_single_example():
    one = np.arange(4) == 0
    features, labels = np.ones((4, 5), np.float32), np.zeros(4, int)
    common = Gaussians(np.zeros((3, 5), np.float32), np.eye(5, dtype=np.float32))
    losses_ = surface(features, labels, one, common, np.float32([1.0001, 1e-4, 1e-4]), jnp.linspace(0, 1, 5), False)
    assert np.isfinite(losses_).all()
    np.testing.assert_allclose(fit(features, labels, one, common.mean, False).covariance, np.eye(5))


# ---- FedCP --------------------------------------------------------------------------------------------------------
def test_fedcp_gates_sum_to_one_and_the_context_has_length_one():
    sim = simulation("fedcp")
    net = sim.env.model.init(jax.random.key(0))
    v = context(sim.env, net)
    total = np.asarray(net["params"]["fc"]["kernel"]).sum(1)
    np.testing.assert_allclose(v, total / np.linalg.norm(total), atol=1e-6)
    z = jax.random.normal(jax.random.key(1), (6, 5))
    policy = net["params"]["policy"]
    soft, noisy, other = (gates(policy, z, v, key) for key in (None, jax.random.key(2), jax.random.key(3)))
    for r, s in (soft, noisy, other):
        np.testing.assert_allclose(r + s, 1, atol=1e-6)
        assert (r > 0).all() and (s > 0).all()
    assert not np.allclose(soft[0], noisy[0]) and not np.allclose(noisy[0], other[0])
    a = np.asarray((z * v) @ policy["kernel"] + policy["bias"])
    a = np.maximum((a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5), 0)
    np.testing.assert_allclose(soft[0], 1 / (1 + np.exp(a[:, 5:] - a[:, :5])), atol=1e-5)  # first half: the private gate


def test_fedcp_private_head_stays_and_the_global_one_is_the_middle():
    sim = engine(make_method("fedcp"), (4,))
    state, data = start(sim)
    after = sim.examine(state, data)[0]
    own = jax.tree.map(lambda a: a[4], after.clients.own)
    old = state.server.net["params"]["fc"]
    assert_close(after.server.net["params"]["fc"], jax.tree.map(lambda a, b: (a + b) / 2, own, old), 1e-6)
    assert not tiny.close(own, old, 1e-3)
    assert not same_bits(after.server.net["params"]["policy"], state.server.net["params"]["policy"])


# ---- all of them --------------------------------------------------------------------------------------------------
@functools.cache
def skewed() -> Federation:
    """Six clients with two of four classes each, 20 to 40 training rows: something to personalise, unlike in `tiny`."""
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
    """Ten rounds: four of five test examples right (local training: 0.95), where a guess is right in one of four."""
    fed, method = skewed(), make_method(name)
    model = models.build("mlp", fed.shape, 4, hidden=(16,))
    model = method.extend(model)
    env = Env(model, losses.make_loss("ce", 4), optim.Sgd(0.9, 5e-4), N, 4, 10, 2.0, 2.0, rounds=10)
    who, lr = Participation(4, 4, tuple(range(N))), optim.schedule("constant", 0.05, 10)
    sim = simulate(method, env, fed, who, lr=lr, evaluations=("personal",), eval_every=10, capacity=1)
    state, data = start(sim)
    score = sim.adapt if method.adapts else sim.evaluate
    before = score(state, data)["personal"]
    after = score(sim.run(state, data, jnp.int32(10))[0], data)["personal"]
    rate = lambda s: float(np.sum(s["accuracy"]["correct"]) / np.sum(s["accuracy"]["count"]))
    assert rate(after) > max(0.8, rate(before)), (rate(before), rate(after))
    assert float(np.sum(after["loss"]["total"])) < float(np.sum(before["loss"]["total"]))


@pytest.mark.parametrize("name", ["fedamp", "fedfomo", "fedala", "fedas"])
def test_layouts_agree_after_round_one(name):
    """Two lanes on each of two devices, from a state that has moved: peers' rows, loops of unequal length."""
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
    """Every model: a round and the clients' predictors fit together, private BatchNorm statistics included."""
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
        assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), state)


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
