"""fedpam: its contrast against a plain-Python transcription, gradients, three rounds of PyTorch,
its matrices, bad input."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden.baselines import settings
from paths import GOLDEN_FOLDER
from tiny import CLASSES, M, N, assert_close, same_bits, simulation, start

from fedjax_sim.cli.main import main
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import simulate
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.local import Batch
from fedjax_sim.local.contrast import anchor_contrast, unit
from fedjax_sim.local.features import live_features
from fedjax_sim.local.losses import make_loss
from fedjax_sim.local.optim import Sgd, schedule
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedpam import PRIVATE
from fedjax_sim.models import build, from_module, parameter_counts
from fedjax_sim.models.batch_norm import BatchNorm
from fedjax_sim.models.projection import with_projection
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.types import Client, Ctx, Env


def written_out(z, head, adjust, y, real, tau):
    """L_pcl as the equation stands, in Python floats; head W [C][d], adjust P [d][d]."""

    def direction(v):
        length = max(math.sqrt(sum(a * a for a in v)), 1e-8)
        return [a / length for a in v]

    def dot(a, b):
        return sum(p * q for p, q in zip(a, b, strict=True))

    columns = list(zip(*adjust, strict=True))
    anchors = [direction([dot(row, column) for column in columns]) for row in head]
    unit_z = [direction(v) for v in z]
    batch = [i for i in range(len(z)) if real[i]]
    total = 0.0
    for i in batch:
        top = math.exp(dot(unit_z[i], anchors[y[i]]) / tau)
        below = sum(math.exp(dot(unit_z[i], w) / tau) for w in anchors)
        below += sum(math.exp(dot(unit_z[i], unit_z[j]) / tau) for j in batch if y[j] != y[i])
        total -= math.log(top / below)
    return total / len(batch)


def random_batch(seed: int, size: int = 7, classes: int = 4, width: int = 5):
    rng = np.random.default_rng(seed)
    z, y = np.maximum(rng.standard_normal((size, width)), 0), rng.integers(0, classes, size)
    head, adjust = (
        rng.standard_normal((classes, width)),
        np.eye(width) + 0.3 * rng.standard_normal((width, width)),
    )
    return z, y, head, adjust


BATCHES = {
    "random": lambda z, y: (z, y, np.ones(len(y), bool)),
    "one class": lambda z, y: (z, np.full_like(y, 2), np.ones(len(y), bool)),
    "all different": lambda z, y: (z[:4], np.arange(4), np.ones(4, bool)),
    "zero features": lambda z, y: (
        z * (np.arange(len(y)) % 3 > 0)[:, None],
        y,
        np.ones(len(y), bool),
    ),
    "padding": lambda z, y: (z, y, np.arange(len(y)) < 5),
    "one example": lambda z, y: (z, y, np.arange(len(y)) < 1),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_contrast_is_the_equation(kind):
    with jax.enable_x64(True):
        for seed in range(5):
            z, y, head, adjust = random_batch(seed)
            z, y, real = BATCHES[kind](z, y)
            for tau in (0.07, 0.5, 1.0):
                want = written_out(
                    z.tolist(), head.tolist(), adjust.tolist(), y.tolist(), real.tolist(), tau
                )
                got = anchor_contrast(
                    jnp.array(z), jnp.array(head @ adjust), jnp.array(y), jnp.array(real), tau
                )
                np.testing.assert_allclose(float(got), want, rtol=1e-12, atol=1e-12)


def test_lengths_do_not_matter():
    """Scaling W or z leaves the loss as it is, and its gradient has no part along z."""
    with jax.enable_x64(True):
        z, y, head, adjust = random_batch(3)
        loss = lambda z, head: anchor_contrast(
            z, head @ adjust, jnp.array(y), jnp.ones(len(y), bool), 0.5
        )
        base = float(loss(z, head))
        lengths = np.random.default_rng(0).uniform(0.01, 100, (len(y), 1))
        for other in (
            loss(z * 1e4, head),
            loss(z * lengths, head),
            loss(z, head * 1e-3),
            loss(z, head * lengths[:4]),
        ):
            np.testing.assert_allclose(float(other), base, rtol=1e-12)
        along = (jax.grad(loss)(jnp.array(z), head) * z).sum(1)
        np.testing.assert_allclose(along, 0, atol=1e-14)


@pytest.mark.parametrize("tau", [0.01, 0.5])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e4])
def test_finite_in_single_precision(tau, scale):
    """Cold, huge, vanishing: value and gradients are finite; padding may hold a nan."""
    z, y, head, adjust = (
        jnp.array(a, np.int32 if a.dtype.kind == "i" else np.float32) for a in random_batch(1)
    )
    real = jnp.arange(len(y)) < 6
    loss = lambda z, head, adjust: anchor_contrast(z, head @ adjust, y, real, tau)
    z = (z * scale).at[-1].set(jnp.nan)
    value, grads = jax.value_and_grad(loss, (0, 1, 2))(z, head * max(scale, 1e-3), adjust)
    assert all(np.isfinite(a).all() for a in (value, *grads))
    assert 0 <= float(value) <= 2 / tau + math.log(4 + 7)
    # a feature opposite to its anchor, on another's, is the worst there is: log(1 + e^{2/τ})
    anchors = jnp.stack([head[0], -head[0]])
    worst = anchor_contrast(anchors[1:] * 1e4, anchors, jnp.array([0]), jnp.array([True]), tau)
    np.testing.assert_allclose(float(worst), np.logaddexp(0, 2 / tau), rtol=1e-5)


def objective_of(options: dict, private):
    """(loss of (params with P), params) on one batch of the tiny federation in float64, as `local`
    sees it."""
    seen = {}
    method = make_method("fedpam", **options)
    sim = simulation("fedpam")
    fed = tiny.federation()
    model = method.extend(build("mlp", fed.shape, CLASSES, hidden=(5,), dtype=jnp.float64))
    env = dataclasses.replace(
        sim.env, model=model, dtype=jnp.float64, fed=fed, counts=jnp.ones((N, CLASSES))
    )
    net = model.init(jax.random.key(4))
    import fedjax_sim.methods.fedpam as module

    def spy(env, net, client, ctx, *, objective, optimizer):
        seen.update(objective=objective, net=net, optimizer=optimizer)
        raise StopIteration

    plain, module.local_sgd = module.local_sgd, spy
    try:
        ctx = Ctx(jnp.int32(0), jax.random.key(0), jnp.int32(0), jnp.ones(()), jnp.ones(()))
        method.local(env, net, None, Client(own=private), ctx)
    except StopIteration:
        pass
    finally:
        module.local_sgd = plain
    rows = fed.rows["train"][2][:6]
    batch = Batch(
        jnp.array(fed.x[rows], jnp.float64),
        jnp.array(fed.y[rows]),
        jnp.arange(6) < 5,
        jax.random.key(0),
    )
    value = lambda params: seen["objective"]({**net, "params": params}, batch, ())[0]
    return value, seen["net"]["params"], seen["optimizer"]


@pytest.mark.parametrize("options", [{}, {"variant": "pcl"}, {"variant": "pam"}, {"m": 4}], ids=str)
def test_gradients_reach_everything(options):
    """θ, W and P_k move as finite differences say, the head through both its places; P_k never
    decays."""
    with jax.enable_x64(True):
        width = options.get("m", 5)
        private = jnp.eye(width) + 0.2 * jax.random.normal(jax.random.key(1), (width, width))
        value, params, optimizer = objective_of(options, private)
        assert (PRIVATE in params) == (
            options.get("variant") != "pcl"
        ) and PRIVATE not in optimizer.groups
        assert set(optimizer.groups) == set(params) - {PRIVATE}
        value = jax.jit(value)
        grads = jax.grad(value)(params)
        flat, tree = jax.tree.flatten(params)
        rng = np.random.default_rng(5)
        for i, (leaf, grad) in enumerate(zip(flat, jax.tree.leaves(grads), strict=True)):
            towards = jnp.array(rng.standard_normal(leaf.shape))
            at = lambda h, i=i, towards=towards: value(
                jax.tree.unflatten(tree, [*flat[:i], flat[i] + h * towards, *flat[i + 1 :]])
            )
            slope = float((at(1e-6) - at(-1e-6)) / 2e-6)
            assert abs(slope) > 1e-4  # nothing is cut off
            np.testing.assert_allclose(float((grad * towards).sum()), slope, rtol=1e-5, atol=1e-6)


def test_without_contrast_it_is_fedavg():
    """λ = 0: every upload equals FedAvg's, the matrices stay, and personal predictions are the
    global model's."""
    base, other = simulation("fedavg"), simulation("fedpam", lam=0.0)
    a, b = base.examine(*start(base)), other.examine(*start(other))
    assert_close(a[3], b[3], 1e-6)
    assert (np.asarray(b[0].clients.own) == np.eye(5)).all()
    scores = other.evaluate(b[0], other.data)
    assert_close(
        scores["personal"]["loss"]["total"], scores["global@clients"]["loss"]["total"], 1e-5
    )


def test_matrices_are_private():
    """P_k starts as the identity, moves where a client takes part, stays otherwise, and is never
    among the uploads."""
    sim = simulation("fedpam")
    state, data = start(sim)
    after, log, ids, nets = sim.examine(state, data)
    own = np.asarray(after.clients.own)
    took_part = np.isin(np.arange(N), np.asarray(ids))
    moved = np.linalg.norm(own - np.eye(5), axis=(1, 2))
    assert (moved[took_part] > 1e-4).all() and (moved[~took_part] == 0).all()
    assert set(nets["params"]) == set(after.server.net["params"]) == {"fc1", "fc"}
    assert int(log["private_parameters"]) == 25
    np.testing.assert_allclose(float(log["adjust_distance"]), moved.sum() / M, rtol=1e-5)
    base = simulation("fedavg")
    logs = base.examine(*start(base))[1]
    assert all(same_bits(log[k], logs[k]) for k in ("taken", "sent", "down", "up"))


def test_silent_features_are_counted_and_reported():
    """Against NumPy on the clients' first images; two of five units are dead; a run that goes on so
    is warned."""
    fed, sim = tiny.federation(), simulation("fedpam")
    env = sim.open(sim.data)
    net = env.model.init(jax.random.key(0))
    kernel = net["params"]["fc1"]["kernel"]
    with_first = lambda kernel, bias: {
        **net,
        "params": {**net["params"], "fc1": {"kernel": kernel, "bias": bias}},
    }
    dead = with_first(1e-3 * kernel, jnp.array([5.0, -1e6, 5.0, -1e6, 5.0]))
    for ids in (jnp.arange(N), jnp.array([1])):
        np.testing.assert_allclose(live_features(env, dead, ids), 0.6, rtol=1e-6)
    # 64 images of three clients
    seen = np.concatenate([np.resize(fed.client_rows(k, "train"), 22) for k in (0, 3, 5)])
    z = np.asarray(fed.x)[seen].reshape(len(seen), -1) @ np.asarray(kernel)
    for shift in (-1.0, -3.0, -5.0):
        got = live_features(env, with_first(kernel, jnp.full(5, shift)), jnp.array([0, 3, 5]))
        np.testing.assert_allclose(got, ((z + shift) > 0).any(0).mean(), rtol=1e-6)
    rounds, warnings = (
        [dict(round=t, live_features=0.3) for t in range(10)],
        make_method("fedpam").warnings,
    )
    assert (
        "70 % are 0" in warnings(rounds)[0] and not warnings(rounds[:9]) and not warnings([{}] * 30)
    )
    assert not warnings([*rounds[:-1], dict(round=9, live_features=0.9)])


@pytest.mark.parametrize("infer", ["dot", "cosine"])
def test_predictions_use_the_client_s_matrix(infer):
    """The scores of a client equal those of a NumPy head W P_k."""
    sim = simulation("fedpam", infer=infer)
    state, data = start(sim)
    state = sim.examine(state, data)[0]
    scores = sim.evaluate(state, data)["personal"]
    fed, net = tiny.federation(), jax.tree.map(np.asarray, state.server.net["params"])
    for k in range(N):
        rows = fed.client_rows(k, sim.client_split)
        z = np.maximum(
            np.asarray(fed.x)[rows].reshape(len(rows), -1) @ net["fc1"]["kernel"]
            + net["fc1"]["bias"],
            0,
        )
        anchors = net["fc"]["kernel"].T @ np.asarray(state.clients.own[k])  # W P_k [C, d]
        logits = z @ anchors.T + net["fc"]["bias"]
        if infer == "cosine":
            length = np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-8) * np.linalg.norm(
                anchors, axis=1
            )
            logits = z @ anchors.T / length / 0.5
        assert (
            int(scores["accuracy"]["correct"][k])
            == (logits.argmax(1) == np.asarray(fed.y)[rows]).sum()
        )
        log_p = np.asarray(jax.nn.log_softmax(logits))
        np.testing.assert_allclose(
            scores["loss"]["total"][k],
            -log_p[np.arange(len(rows)), np.asarray(fed.y)[rows]].sum(),
            rtol=1e-4,
        )


def test_variants_differ_as_stated():
    """pcl keeps nothing private; full, with its matrices put back to the identity, decides as pcl
    does."""
    full, pcl = simulation("fedpam"), simulation("fedpam", variant="pcl")
    (state, data), (frozen, same) = start(full), start(pcl)
    assert frozen.clients.own == () and not same_bits(
        full.examine(state, data)[3], pcl.examine(frozen, same)[3]
    )
    after, log, *_ = pcl.examine(frozen, same)
    assert int(log["private_parameters"]) == 0 and "adjust_distance" not in log
    again = state._replace(server=after.server)
    assert_close(full.evaluate(again, data)["personal"], pcl.evaluate(after, same)["personal"])


def test_another_width():
    """m ≠ d: a shared layer of its own, the other groups start as without it; m = d changes
    nothing."""
    plain = build("mlp", (4, 4, 1), CLASSES, hidden=(5,))
    assert with_projection(plain, 0) is plain and with_projection(plain, 5) is plain
    wide = with_projection(plain, 9)
    assert parameter_counts(wide) == {"fc1": 85, "project": 54, "fc": 30}
    assert wide.dense == ("fc1", "project", "fc") and wide.width == 9
    key = jax.random.key(0)
    net = wide.init(key)
    assert same_bits(net["params"]["fc1"], plain.init(key)["params"]["fc1"])
    x = jax.random.normal(key, (3, 4, 4, 1))
    hidden = plain.features(plain.init(key), x)[0]
    p = net["params"]
    want = jnp.maximum(hidden @ p["project"]["kernel"] + p["project"]["bias"], 0)
    assert_close(wide.features(net, x)[0], want, 1e-6)
    assert_close(wide.head(net, want), want @ p["fc"]["kernel"] + p["fc"]["bias"], 1e-6)
    sim = simulation("fedpam", m=9)
    after, log, _, nets = sim.examine(*start(sim))
    assert set(nets["params"]) == {"fc1", "project", "fc"} and after.clients.own.shape == (N, 9, 9)
    assert int(log["private_parameters"]) == 81


class Normed(nn.Module):
    """A small network with BatchNorm; its groups are `body` and `fc`."""

    def setup(self):
        self.body, self.norm, self.fc = nn.Dense(5), BatchNorm(jnp.float32), nn.Dense(CLASSES)

    def features(self, x, train=False, mask=None, tap=None):
        return nn.relu(self.norm(self.body(x.reshape(x.shape[0], -1)), train, mask))

    def head(self, z):
        return self.fc(z)

    def __call__(self, x):
        return self.head(self.features(x))


def test_own_batch_statistics():
    """With statistics that stay on the client, each predicts with its own: W P_k over its own
    normalisation."""
    fed, plain = tiny.federation(), simulation("fedpam")
    groups = ("body", "norm", "fc")
    model = from_module(
        "normed",
        Normed(),
        shape=fed.shape,
        groups=groups,
        dense=("body", "fc"),
        width=5,
        classes=CLASSES,
        stages=(),
        dtype=jnp.float32,
    )
    model = plain.method.extend(model)
    env = dataclasses.replace(plain.env, model=model, bn_local=True)
    who, lr = Participation(M, M, tuple(range(N))), schedule("constant", 0.05, 8)
    sim = simulate(plain.method, env, fed, who, lr=lr, evaluations=("personal",))
    state, data = start(sim)
    state, _, ids, _ = sim.examine(state, data)
    scores = sim.evaluate(state, data)["personal"]
    for k in np.asarray(ids):
        mine = jax.tree.map(lambda a, k=k: a[k], state.clients)
        assert not same_bits(mine.batch_stats, state.server.net["batch_stats"])
        rows = fed.client_rows(int(k), sim.client_split)
        net = {**state.server.net, "batch_stats": mine.batch_stats}
        z = model.features(net, jnp.asarray(np.asarray(fed.x)[rows]))[0]
        fc = net["params"]["fc"]
        logits = z @ (fc["kernel"].T @ mine.own).T + fc["bias"]
        loss = -jax.nn.log_softmax(logits)[np.arange(len(rows)), np.asarray(fed.y)[rows]].sum()
        np.testing.assert_allclose(scores["loss"]["total"][k], loss, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tau": 0.0}, r"fedpam.tau=0 is not allowed; use a number above 0"),
        ({"tau": -1.0}, "fedpam.tau=-1 is not allowed"),
        ({"tau": math.nan}, "fedpam.tau 'nan' is not a finite number"),
        ({"tau": math.inf}, "fedpam.tau 'inf' is not a finite number"),
        ({"lam": -1.0}, "fedpam.lam=-1 is not allowed; use 0 or more"),
        ({"lam": math.nan}, "fedpam.lam 'nan' is not a finite number"),
        ({"lam": "inf"}, "fedpam.lam 'inf' is not a finite number"),
        (
            {"m": -3},
            (
                r"m=-3 is not a width of features; allowed: 0 \(the model's own\), or a whole"
                r" number to 32768"
            ),
        ),
        ({"m": 2.5}, "fedpam.m '2.5' is not a whole number"),
        ({"m": math.nan}, "fedpam.m 'nan' is not a whole number"),
        ({"m": 10**6}, "m=1000000 is not a width"),
        ({"m": "wide"}, "fedpam.m 'wide' is not a whole number"),
        (
            {"variant": "pcls"},
            r"unknown variant of fedpam 'pcls' \(did you mean 'pcl'\?\); allowed: full, pam, pcl",
        ),
        ({"infer": "angle"}, "unknown infer of fedpam 'angle'; allowed: cosine, dot"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make_method("fedpam", **options)


def test_models_it_cannot_take():
    model = build("mlp", (2, 2, 1), 3, hidden=(4,))
    with pytest.raises(UserError, match="fedpam needs the group name 'adjust'"):
        make_method("fedpam").extend(model._replace(groups=(*model.groups, PRIVATE)))
    odd = model._replace(
        init=lambda key: {
            "params": {"fc1": {}, "fc": {"table": jnp.zeros((4, 3))}},
            "batch_stats": {},
        }
    )
    with pytest.raises(
        UserError, match=r"fedpam needs a linear head with a kernel \[4, 3\].*'mlp' has table"
    ):
        make_method("fedpam").extend(odd)
    with pytest.raises(UserError, match="'mlp' has a group 'project' already"):
        make_method("fedpam", m=7).extend(with_projection(model, 6))


def test_short_vectors_have_no_direction():
    assert same_bits(unit(jnp.zeros((2, 3))), jnp.zeros((2, 3)))
    assert_close(jax.jacobian(unit)(jnp.zeros(3)), jnp.zeros((3, 3)))


@pytest.mark.parametrize("chunk", [1, 3])
def test_three_rounds_equal_a_pytorch_loop(chunk):
    """Golden values of golden/baselines: the server after every round, every client's logits and
    matrix, to 1e-9.

    Batches are padded there (16 places for 4 to 12 examples), and some rows have features that are
    all zero.
    """
    with np.load(GOLDEN_FOLDER / "baselines" / "values.npz") as file:
        want = {
            name.removeprefix("fedpam/"): file[name]
            for name in file.files
            if name.startswith("fedpam/")
        }
    x, y, rows = settings.pool()
    clients = len(settings.SIZES)
    with jax.enable_x64(True):
        fed = Federation.from_arrays(x, y, rows, classes=settings.CLASSES, mean=0.0, std=1.0)
        method = make_method("fedpam", **settings.OPTIONS["fedpam"])
        model = build(
            "mlp", settings.SHAPE, settings.CLASSES, hidden=(settings.WIDTH,), dtype=jnp.float64
        )
        env = Env(
            model=method.extend(model),
            loss=make_loss("ce", settings.CLASSES),
            optimizer=Sgd(settings.MOMENTUM, settings.DECAY),
            num_clients=clients,
            cohort=3,
            batch_size=settings.BATCH,
            epochs=settings.EPOCHS,
            max_epochs=settings.EPOCHS,
            dtype=jnp.float64,
        )
        who = Participation(3, 3, tuple(range(clients)), schedule=settings.COHORTS)
        lr = schedule("constant", settings.LR, settings.ROUNDS)
        sim = simulate(method, env, fed, who, Layout(chunk), lr=lr, evaluations=())
        net = {"params": jax.tree.map(jnp.asarray, settings.initial()), "batch_stats": {}}
        state, step = sim.init(0, net), jax.jit(sim.round)
        for t in range(settings.ROUNDS):
            state, log = step(state, sim.data)
            for group in ("fc1", "fc"):
                for leaf, value in state.server.net["params"][group].items():
                    np.testing.assert_allclose(
                        value, want[f"server/{group}/{leaf}"][t], rtol=0, atol=1e-9
                    )
            for k in range(clients):
                mine = method.personal(
                    env, state.server, jax.tree.map(lambda a, k=k: a[k], state.clients), None
                )
                logits = method.predict(env, mine, jnp.asarray(x[rows["test"][k]]))
                np.testing.assert_allclose(logits, want["logits"][t, k], rtol=0, atol=1e-9)
            floats = np.array(env.group_floats(net))
            sent = [int(np.asarray(log[name]) @ floats) // 3 for name in ("taken", "sent")]
            assert sent == want["floats"].tolist()
        np.testing.assert_allclose(state.clients.own, want["client/pam"], rtol=0, atol=1e-9)


def test_its_own_rate_unless_the_run_names_one(tmp_path, capsys):
    """At the run's usual lr and momentum most features die at once, so it has its own; a number
    that is given counts."""
    cases = [
        ("fedpam", {}, 0.005, 0.5),
        ("fedpam", {"momentum": 0.9}, 0.005, 0.9),
        ("fedavg", {}, 0.02, 0.9),
    ]
    cases += [
        ("fedpam", {"lr": 0.02, "momentum": 0.9}, 0.02, 0.9),
        ("fedpam", {"options": {"lam": 0.0}}, 0.005, 0.5),
    ]
    cases += [
        ("fedpam", {"options": {"variant": variant}}, 0.005, 0.5) for variant in ("pcl", "pam")
    ]
    for name, given, lr, momentum in cases:
        setup = prepare(
            Experiment.of(name, model="mlp", **given), fed=tiny.federation(), measure=False
        )
        assert (setup.experiment.training.lr, setup.experiment.training.momentum) == (
            lr,
            momentum,
        ) and type(setup.experiment.training.lr) is float
        own = {"lr": 0.005, "momentum": 0.5} if name == "fedpam" else {}
        assert setup.resolved["prefers"] == {
            k: v for k, v in own.items() if getattr(setup.experiment.training, k) == v
        }
    # as it is shipped
    assert main(["run", "fedpam", "--rounds", "6", "--out", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert (
        "fedpam: momentum 0.5 is the method's default (--momentum sets another)"
        in captured.out + captured.err
    )
    with (tmp_path / "a" / "rounds.csv").open(newline="") as file:
        # 0.3 with 0.02 and 0.9
        assert min(float(row["live_features"]) for row in csv.DictReader(file)) > 0.6
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["client_acc_mean"] > 0.5
