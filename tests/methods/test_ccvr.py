"""ccvr: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_client import RNG, rows_of
from tiny import CLASSES, N, close, simulation, start

from fedjax_sim.local import features
from fedjax_sim.methods import ccvr


@pytest.fixture(scope="module")
def pooled_features():
    """(statistics summed over all clients, diagonal and full; features [n, d] and labels of all of
    them, by NumPy)."""
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
    drawn = np.asarray(
        ccvr.draw_features(jax.random.key(0), jnp.array(mean), jnp.array(covariance), 40_000)
    )
    for c in range(2):
        assert np.allclose(drawn[c].mean(0), mean[c], atol=0.06)
        assert np.allclose(np.cov(drawn[c], rowvar=False), covariance[c], atol=0.12)
    flat = np.asarray(
        ccvr.draw_features(
            jax.random.key(0), jnp.array(mean), jnp.array([[4.0, 0, 1, 1]] * 2), 40_000
        )
    )
    assert np.allclose(flat[0].std(0), [2, 0, 1, 1], atol=0.05)


def test_ccvr_head_step_in_closed_form():
    """Two classes seen, no variance, 128 each: one batch of 256, whatever the shuffle; the third
    class is left out."""
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
    """A head that always says class 0: after calibration it separates three Gaussians it has never
    seen examples of."""
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
    # 8 rounds are planned
    early, last = (sim.evaluate(state._replace(t=jnp.int32(t)), data) for t in (7, 8))
    assert close(early["global"], base.evaluate(plain, start(base)[1])["global"], 1e-6)
    assert not close(early["global"]["loss"]["total"], last["global"]["loss"]["total"], 1e-4)
    net = sim.method.finish(sim.open(data), state.server, jax.random.PRNGKey(0))
    assert close(net["params"]["fc1"], plain.server.net["params"]["fc1"], 1e-6)
    assert not close(net["params"]["fc"], plain.server.net["params"]["fc"], 1e-4)
    assert sim.method.extra_floats(sim.env, net) == (0, 0)
