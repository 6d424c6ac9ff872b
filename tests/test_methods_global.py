"""FedNTD, CCVR, FedSAM, FedFA, amplitude mixing and FedCA against NumPy, PyTorch and closed forms.

Client 1 of the tiny federation holds three examples and a batch four: every epoch is one masked batch with all of them,
so a whole local training is known without sharing a single random draw.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden.stored import torch_values
from tiny import CLASSES, N, close, simulation, start

from fedjax_sim.errors import UserError
from fedjax_sim.local import LANES, features
from fedjax_sim.local.losses import Confusion, init_confusion
from fedjax_sim.methods import ccvr, fedca, fedfa, fedfa_freq, fedntd, fedsam, make_method
from fedjax_sim.models import Model, from_module
from fedjax_sim.models.nets import PlainNet, plain_groups
from fedjax_sim.types import Client, Cohort, Ctx

LR = 0.05  # of tiny.simulation
RNG = lambda seed=0: np.random.default_rng(seed)


def small_conv() -> Model:
    """Two convolution blocks of 2 and 3 channels, quick to compile."""
    convs, hidden = ((2, 3, 1, False), (3, 3, 1, True)), (5,)
    names, dense = plain_groups(convs, hidden)
    return from_module(
        "small",
        PlainNet(convs, hidden, CLASSES, "patches"),
        shape=(4, 4, 1),
        groups=names + dense,
        dense=dense,
        width=5,
        classes=CLASSES,
        stages=(("conv1", 2), ("conv2", 3)),
        dtype=jnp.float32,
    )


def train_one(
    name: str,
    client: int = 1,
    epochs: float = 2.0,
    loss: str = "ce",
    conv: bool = False,
    neighbour: int | None = None,
    given: dict[str, dict[str, np.ndarray]] | None = None,
    **options,
):
    """(starting net, client after, upload) of ONE client's local training, outside of any round.

    With a neighbour the two are trained side by side. Parameter groups in `given` replace the drawn ones.
    """
    sim = simulation(name, loss=loss, **options)
    env = sim.open(jax.device_put(sim.data))
    env = dataclasses.replace(env, model=small_conv()) if conv or name == "fedfa" else env
    net = env.model.init(jax.random.key(0))
    net["params"] |= jax.tree.map(jnp.float32, given or {})
    server, own = sim.method.init(env, net)
    row = Client(own, init_confusion(CLASSES) if env.track_confusion else ())
    ctx = Ctx(jnp.int32(client), jax.random.PRNGKey(5), jnp.int32(0), jnp.float32(epochs), jnp.float32(LR))
    if neighbour is None:
        after, up = jax.jit(lambda row, ctx: sim.method.local(env, net, server, row, ctx))(row, ctx)
        return net, after, up
    env = dataclasses.replace(env, lanes=2)
    rows, both = jax.tree.map(lambda a: jnp.stack([a, a]), (row, ctx))
    many = jax.jit(jax.vmap(lambda row, ctx: sim.method.local(env, net, server, row, ctx), axis_name=LANES))
    return net, *jax.tree.map(lambda a: a[0], many(rows, both._replace(id=jnp.array([client, neighbour]))))


def rows_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    fed = tiny.federation()
    rows = fed.client_rows(client)
    return np.asarray(fed.x)[rows], np.asarray(fed.y)[rows]


# ---- values of PyTorch ------------------------------------------------------------------------------------------
def torch_net(name: str) -> dict[str, dict[str, np.ndarray]]:
    """{group: {leaf: array}} of one stored network: `start`, or what a training made of it in two steps."""
    values, out = torch_values("methods_global"), {}
    for key in (key for key in values if key.startswith(name + "/")):
        group, leaf = key.removeprefix(name + "/").split(".")
        out.setdefault(group, {})[leaf] = values[key]
    return out


def agrees(net, wanted: str, tolerance: float = 2e-5) -> bool:
    return close(net["params"], torch_net(wanted), tolerance)


def test_pytorch_saw_the_examples_of_client_1():
    values = torch_values("methods_global")
    for mine, theirs in zip(rows_of(1), (values["x"], values["y"]), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# ---- FedNTD -----------------------------------------------------------------------------------------------------
def test_ntd_is_the_divergence_over_the_other_classes():
    want = {name: torch_values("methods_global")[f"ntd/{name}"] for name in ("teacher", "student", "y", "value", "slope")}
    tau = float(torch_values("methods_global")["ntd/tau"])
    mask = np.array([True, True, False, True, True, False, True])
    teacher, student, y = np.zeros((7, 4)), np.zeros((7, 4)), np.zeros(7, int)
    teacher[mask], student[mask], y[mask] = want["teacher"], want["student"], want["y"]
    student[2], teacher[5] = np.nan, np.inf  # padding may hold anything
    value, grad = jax.value_and_grad(
        lambda s: tau**2 * fedntd.not_true_divergence(jnp.array(teacher), s, jnp.array(y), jnp.array(mask), tau)
    )(jnp.array(student))
    np.testing.assert_allclose(value, want["value"], atol=1e-6)
    np.testing.assert_allclose(grad[mask], want["slope"], atol=1e-6)
    assert np.all(np.asarray(grad)[~mask] == 0)


def test_fedntd_trains_like_torch():
    _, _, up = train_one("fedntd", beta=2.0, tau=1.5, given=torch_net("start"))
    assert agrees(up.net, "fedntd")
    assert not agrees(up.net, "plain", 1e-4)  # the distillation is visible


# ---- FedSAM -----------------------------------------------------------------------------------------------------
def test_fedsam_takes_the_gradient_at_the_perturbed_point():
    _, _, up = train_one("fedsam", rho=0.4, given=torch_net("start"))
    assert agrees(up.net, "fedsam")
    assert not agrees(up.net, "plain", 1e-4)


def test_fedsam_keeps_the_statistics_of_the_first_pass():
    grad_of = lambda w, batch: ((w["a"] ** 2 / 2, ("statistics at", w["a"])), {"a": w["a"]})
    (_, aux), grads, batch = fedsam.sharpness_aware(0.5)(grad_of, {"a": jnp.array(3.0)}, 7, lambda step: ("batch", step), ())
    assert aux == ("statistics at", 3.0) and grads["a"] == 3.5 and batch == ("batch", 7)


# ---- CCVR -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pooled_features():
    """(statistics summed over all clients, diagonal and full; features [n, d] and labels of all of them, by NumPy)."""
    sim = simulation("ccvr")
    env = sim.open(start(sim)[1])
    net = sim.env.model.init(jax.random.key(3))
    before, features.ROWS = features.ROWS, 5  # several passes per client, the last one ragged
    sums = {}
    for full in (False, True):
        one = jax.jit(lambda k: ccvr.class_statistics(env, net, k, full))
        sums[full] = jax.tree.map(lambda *a: sum(a), *[one(k) for k in range(N)])
    features.ROWS = before
    x, y = (np.concatenate(parts) for parts in zip(*map(rows_of, range(N)), strict=True))
    layer = jax.tree.map(np.asarray, net["params"]["fc1"])
    return sums, np.maximum(x.reshape(len(x), -1) @ layer["kernel"] + layer["bias"], 0), y


def test_ccvr_pools_the_covariance_of_all_features(pooled_features):
    sums, features, y = pooled_features
    for full in (False, True):
        mean, covariance = ccvr.gaussians(sums[full])
        for c in range(CLASSES):
            mine = features[y == c]
            want = np.cov(mine, rowvar=False)
            assert sums[full].count[c] == len(mine) > 2
            assert np.allclose(mean[c], mine.mean(0), atol=1e-5)
            assert np.allclose(covariance[c], want if full else np.diag(want), atol=1e-4)


def test_ccvr_draws_from_the_gaussians():
    """Full covariance, singular as well: moments of 40,000 draws."""
    root = RNG().normal(size=(2, 4, 2))  # rank 2 of 4
    covariance = root @ root.transpose(0, 2, 1)
    mean = np.array([[1.0, -2.0, 0.0, 3.0], [0.0] * 4])
    drawn = np.asarray(ccvr.draw_features(jax.random.key(0), jnp.array(mean), jnp.array(covariance), 40_000))
    for c in range(2):
        assert np.allclose(drawn[c].mean(0), mean[c], atol=0.06)
        assert np.allclose(np.cov(drawn[c], rowvar=False), covariance[c], atol=0.12)
    flat = np.asarray(ccvr.draw_features(jax.random.key(0), jnp.array(mean), jnp.array([[4.0, 0, 1, 1]] * 2), 40_000))
    assert np.allclose(flat[0].std(0), [2, 0, 1, 1], atol=0.05)


def test_ccvr_head_step_in_closed_form():
    """Two classes seen, no variance, 128 each: one batch of 256, whatever the shuffle; the third class is left out."""
    env = simulation("ccvr").env
    net = env.model.init(jax.random.key(1))
    mean = RNG().normal(size=(3, 5)).astype(np.float32)
    count = np.array([4.0, 6.0, 0.0], np.float32)
    total = mean * count[:, None] + (count == 0)[:, None] * 50  # nothing may depend on the unseen
    sums = ccvr.Statistics(*map(jnp.array, (count, total, mean**2 * count[:, None])))
    got = ccvr.calibrate(env, net, jax.random.PRNGKey(0), sums, samples=128, lr=0.01, epochs=2)
    w, b = (np.asarray(net["params"]["fc"][k], np.float64) for k in ("kernel", "bias"))
    vw, vb = 0 * w, 0 * b
    for _ in range(2):
        z = mean[:2] @ w + b
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        back = (p - np.eye(3)[:2]) / 2
        vw, vb = 0.9 * vw + mean[:2].T @ back, 0.9 * vb + back.sum(0)
        w, b = w - 0.01 * vw, b - 0.01 * vb
    head = got["params"]["fc"]
    assert np.allclose(head["kernel"], w, atol=2e-5) and np.allclose(head["bias"], b, atol=2e-5)
    assert close(got["params"]["fc1"], net["params"]["fc1"], 0)


def test_ccvr_repairs_a_biased_head():
    """A head that always says class 0: after calibration it separates three Gaussians it has never seen examples of."""
    env, rng = simulation("ccvr").env, RNG(1)
    net = env.model.init(jax.random.key(1))
    net["params"]["fc"] = dict(kernel=jnp.zeros((5, 3)), bias=jnp.array([2.0, 0.0, 0.0]))
    centre = np.eye(3, 5) * 4
    x = centre[:, None] + rng.normal(size=(3, 400, 5))
    sums = ccvr.Statistics(jnp.full(3, 400.0), jnp.array(x.sum(1)), jnp.array((x**2).sum(1)))
    guess = lambda net: np.asarray(env.model.head(net, jnp.array(x.reshape(-1, 5))).argmax(-1))
    score = lambda net: (guess(net) == np.repeat(range(3), 400)).mean()
    assert score(net) == pytest.approx(1 / 3)
    assert score(ccvr.calibrate(env, net, jax.random.PRNGKey(0), sums, 128, 0.05, 20)) > 0.9


def test_ccvr_post_hoc_only_touches_the_head_at_the_end():
    sim, base = simulation("ccvr", mode="post_full", head_lr=0.1), simulation("fedavg")
    state, data = start(sim)
    state, _, ids, _ = sim.examine(state, data)
    plain = base.examine(*start(base))[0]
    assert close(state.server.net, plain.server.net, 1e-6)
    assert set(np.nonzero(np.asarray(state.server.joined))[0]) == set(np.asarray(ids).tolist())
    early, last = (sim.evaluate(state._replace(t=jnp.int32(t)), data) for t in (7, 8))  # 8 rounds are planned
    assert close(early["global"], base.evaluate(plain, start(base)[1])["global"], 1e-6)
    assert not close(early["global"]["loss"]["total"], last["global"]["loss"]["total"], 1e-4)
    net = sim.method.finish(sim.open(data), state.server, jax.random.PRNGKey(0))
    assert close(net["params"]["fc1"], plain.server.net["params"]["fc1"], 1e-6)
    assert not close(net["params"]["fc"], plain.server.net["params"]["fc"], 1e-4)
    assert sim.method.extra_floats(sim.env, net) == (0, 0)


# ---- FedFA ------------------------------------------------------------------------------------------------------
def numpy_ffa(x, spread_mean, spread_std, noise, eps=1e-6):
    """The layer on real examples only, x [B, h, w, Ch], loops over examples and channels."""
    batch, channels = x.shape[0], x.shape[-1]
    mean, std = np.zeros((batch, channels)), np.zeros((batch, channels))
    for i in range(batch):
        for c in range(channels):
            mean[i, c] = x[i, :, :, c].mean()
            std[i, c] = np.sqrt(x[i, :, :, c].var(ddof=1) + eps)

    def deviation(values, spread):
        q = 1 / (1 + 1 / (spread + eps))
        return np.sqrt((channels * q / q.sum() + 1) * (values.var(0, ddof=1) + eps))

    shift = mean + deviation(mean, spread_mean) * noise[0]
    scale = std + deviation(std, spread_std) * noise[1]
    out = np.stack(
        [
            np.stack([scale[i, c] * (x[i, :, :, c] - mean[i, c]) / std[i, c] + shift[i, c] for c in range(channels)], -1)
            for i in range(batch)
        ]
    )
    return out, mean.mean(0), std.mean(0), shift, scale / std * np.sqrt(std**2 - eps)


def test_fedfa_layer_equals_numpy():
    rng = RNG(2)
    x = rng.normal(2.0, 3.0, size=(5, 3, 4, 6))
    spread = rng.uniform(0.01, 2, size=(2, 6))
    noise = rng.normal(size=(2, 5, 6))
    mask = np.array([True, True, True, False, False])
    x[3:] = 1e4  # padding must not enter a statistic
    gamma = fedfa.Moments(*map(jnp.array, spread))
    out, now = fedfa.augment_features(jnp.array(x), jnp.array(mask), gamma, jnp.array(noise))
    want, mean, std, shift, scale = numpy_ffa(x[:3], *spread, noise[:, :3])
    assert np.allclose(out[:3], want, atol=1e-4)
    assert np.allclose(now.mean, mean, atol=1e-5) and np.allclose(now.std, std, atol=1e-5)
    # the output's own channel moments are the drawn ones
    assert np.allclose(np.asarray(out)[:3].mean((1, 2)), shift, atol=1e-4)
    assert np.allclose(np.asarray(out)[:3].std((1, 2), ddof=1), np.abs(scale), atol=1e-4)


def test_fedfa_gradient_is_finite_on_flat_maps():
    """Dead channels and one-pixel maps: the ε inside the roots keeps slopes finite."""
    ones = fedfa.Moments(jnp.ones(2), jnp.ones(2))
    for x in (jnp.zeros((3, 2, 2, 2)), jnp.ones((1, 1, 1, 2))):
        noise, mask = jnp.ones((2, x.shape[0], 2)), jnp.ones(x.shape[0], bool)
        grad = jax.grad(lambda x: fedfa.augment_features(x, mask, ones, noise)[0].sum())(x)
        assert np.isfinite(np.asarray(grad)).all()


def test_fedfa_running_statistics_of_the_first_stage():
    """One step from zero and one: 0.01 and 0.99 + 0.01 times the means over client 1's maps, by torch's convolution."""
    want = {name: torch_values("methods_global")[f"fedfa/{name}"] for name in ("kernel", "bias", "mean", "std")}
    conv1 = {"kernel": want["kernel"], "bias": want["bias"]}
    _, after, up = train_one("fedfa", epochs=1.0, p=1.0, given={"conv1": conv1})
    got = after.own["conv1"]
    np.testing.assert_allclose(got.mean, 0.01 * want["mean"], atol=1e-6)
    np.testing.assert_allclose(got.std, 0.99 + 0.01 * want["std"], atol=1e-6)
    assert close(after.own, up.report, 0)


def test_fedfa_spread_is_the_variance_over_participants():
    rng = RNG(3)
    values = {"conv1": fedfa.Moments(rng.normal(size=(4, 6)), rng.normal(size=(4, 6)))}
    ok = np.array([True, False, True, True])
    values["conv1"].mean[1] = np.nan
    sim = simulation("fedfa")
    net = sim.env.model.init(jax.random.key(0))
    cohort = Cohort(
        net,
        jnp.ones(sim.env.num_groups),
        (),
        3,
        np.arange(4),
        jnp.array(ok),
        jnp.ones(4),
        jax.tree.map(jnp.array, values),
        (),
        0,
        (),
    )
    server = sim.method.aggregate(sim.env, fedfa.Server(net, {}), cohort)
    for got, want in zip(server.spread["conv1"], values["conv1"], strict=True):
        assert np.allclose(got, want[ok].var(0, ddof=1), atol=1e-6)


def test_fedfa_without_augmentation_is_fedavg():
    plain, off = train_one("fedavg", client=2, conv=True)[2], train_one("fedfa", client=2, p=0.0)
    assert close(plain.net, off[2].net, 1e-6)
    assert np.all(np.asarray(off[1].own["conv2"].mean) == 0) and np.all(np.asarray(off[1].own["conv2"].std) == 1)
    assert not close(plain.net, train_one("fedfa", client=2)[2].net, 1e-4)


# ---- amplitude mixing -------------------------------------------------------------------------------------------
def test_amplitudes_are_mixed_and_phases_kept():
    rng, lam = RNG(4), 0.3
    x, partner = rng.normal(size=(3, 4, 6, 2)), np.array([2, 0, 1])
    got = np.asarray(fedfa_freq.mix_amplitudes(jnp.array(x), jnp.array(partner), lam))
    for i in range(3):
        for c in range(2):
            one, two = np.fft.fft2(x[i, :, :, c]), np.fft.fft2(x[partner[i], :, :, c])
            mixed = ((1 - lam) * abs(one) + lam * abs(two)) * one / abs(one)
            assert np.allclose(got[i, :, :, c], np.fft.ifft2(mixed).real, atol=1e-5)


def test_padding_is_nobodys_partner():
    """The real examples of a batch are shuffled among themselves; a lonely one is mixed with itself and stays."""
    mask = jnp.array([True, True, True, False, False])
    drawn = {tuple(fedfa_freq.partners(jax.random.key(seed), mask)[:3].tolist()) for seed in range(12)}
    assert all(sorted(one) == [0, 1, 2] for one in drawn) and len(drawn) > 2
    trained = lambda name, client, **options: train_one(name, client, conv=True, **options)[2].net
    assert close(trained("fedavg", 3), trained("fedfa_freq", 3, p=1.0, lam=1.0), 1e-5)
    assert not close(trained("fedavg", 2), trained("fedfa_freq", 2, p=1.0, lam=1.0), 1e-4)


# ---- FedCA ------------------------------------------------------------------------------------------------------
def cohort_of(struggles: np.ndarray, ok: np.ndarray, nets) -> Cohort:
    size = len(ok)
    return Cohort(
        (), (), (), int(ok.sum()), np.arange(size), jnp.array(ok), jnp.ones(size), jnp.array(struggles), (), 0, (), nets
    )


@pytest.mark.parametrize("hopeless", [False, True])
def test_fedca_averages_once_per_priority_class(hopeless):
    """One average per worst class, then their mean, spelled out; a class that everybody fails is averaged uniformly."""
    rng, p = RNG(5), 2
    struggles = rng.uniform(0, 0.8, size=(5, 6))
    struggles[:, 3] = 1.0 if hopeless else 0.9 + 0.02 * np.arange(5)
    ok = np.array([True, True, False, True, True])
    nets = {"params": {"fc": rng.normal(size=(5, 2, 3))}, "batch_stats": {}}
    nets["params"]["fc"][2] = 0  # the engine cleans what is not ok
    here = np.nonzero(ok)[0]
    worst = np.argsort(-struggles[here].mean(0))[:p]
    averages = []
    for c in worst:
        skill = np.array([max(0.0, 1 - struggles[k, c]) for k in here])
        skill = skill / skill.sum() if skill.sum() > 0 else np.full(len(here), 1 / len(here))
        averages.append(sum(u * nets["params"]["fc"][k] for u, k in zip(skill, here, strict=True)))
    struggles[2] = np.nan
    env = simulation("fedca").env
    method = make_method("fedca", priorities=p)
    got = method.aggregate(env, (), cohort_of(struggles, ok, jax.tree.map(jnp.array, nets))).net
    assert np.allclose(got["params"]["fc"], np.mean(averages, 0), atol=1e-6)
    assert 3 in worst


def test_fedca_equal_strugglers_weigh_the_same():
    ok = jnp.array([True, True, False, True])
    weights = fedca.priority_weights(jnp.tile(jnp.array([0.2, 0.9, 0.5]), (4, 1)), ok, 3)
    assert np.allclose(weights, [1 / 3, 1 / 3, 0, 1 / 3])


def test_fedca_struggle_is_the_share_predicted_elsewhere():
    conf = RNG(6).uniform(0, 2, size=(3, 3))
    count = np.array([4.0, 2.0, 0.5])
    want = [min(1.0, sum(conf[i, j] for j in range(3) if j != i) / count[i]) for i in range(3)]
    assert np.allclose(fedca.struggle(Confusion(jnp.array(conf), jnp.array(count), jnp.array(0.0))), want, atol=1e-6)
    _, after, up = train_one("fedca")  # tracked with plain cross-entropy as well, and reported after training
    assert not np.allclose(after.confusion.conf, 1) and close(up.report, fedca.struggle(after.confusion), 1e-6)


# ---- all of them ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedntd", "ccvr", "fedsam", "fedfa", "fedfa_freq", "fedca"])
def test_takes_the_loss_of_the_run(name):
    plain, calibrated = train_one(name)[2], train_one(name, loss="c3e")[2]
    assert all(np.isfinite(a).all() for a in tiny.arrays(calibrated)) and not close(plain.net, calibrated.net, 1e-3)


@pytest.mark.parametrize("name", ["ccvr", "fedfa"])
def test_side_by_side_agrees(name):
    """Running values and statistics stand still once a client has finished and its neighbour has not."""
    (_, alone, want), (_, beside, got) = train_one(name), train_one(name, neighbour=2)
    assert close(want, got, 1e-5) and close(alone, beside, 1e-5)


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("ccvr", {"mode": "half"}, "unknown mode of ccvr 'half'; allowed: per_round_diag, post_full"),
        ("fedsam", {"rho": "-1"}, "rho=-1"),
        ("ccvr", {"samples": "0"}, "samples=0"),
        ("fedfa", {"p": "1.5"}, "p=1.5"),
        ("fedfa_freq", {"lam": "2"}, "lam=2"),
        ("fedntd", {"tau": "0"}, "tau=0"),
        ("fedca", {"priorities": "-1"}, "priorities=-1"),
    ],
)
def test_bad_options_are_refused(name, options, said):
    with pytest.raises(UserError, match=said):
        make_method(name, **options)


def test_fedfa_needs_feature_maps():
    with pytest.raises(UserError, match="model 'mlp' has none"):
        start(simulation("fedfa"))
