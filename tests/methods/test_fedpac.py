"""fedpac: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import numpy as np
from fixed_cohort import engine
from tiny import N, assert_close, federation, same_bits, start

from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedpac import mixing


def test_fedpac_mixing():
    rng = np.random.default_rng(1)
    variance, shares = (
        rng.uniform(0.1, 1, 4).astype(np.float32),
        rng.normal(size=(4, 6)).astype(np.float32),
    )
    ok = np.ones(4, bool)
    alpha = np.asarray(mixing(variance, shares, ok))
    np.testing.assert_allclose(alpha.sum(1), 1, atol=1e-6)
    assert ((alpha == 0) | (alpha >= 1e-3)).all()
    # nobody but one reported: its own head, whatever the others' numbers are
    one = np.arange(4) == 2
    np.testing.assert_allclose(
        mixing(np.where(one, variance, np.nan), shares, one)[2], one, atol=1e-6
    )
    # equal clients share their heads by their variances
    np.testing.assert_allclose(
        mixing(np.float32([1, 3]), np.ones((2, 6), np.float32), ok[:2]),
        [[0.75, 0.25]] * 2,
        atol=1e-6,
    )
    # clients far apart keep their own
    np.testing.assert_allclose(mixing(variance, 1e3 * shares, ok), np.eye(4), atol=1e-6)
    # no solution: its own
    np.testing.assert_allclose(mixing(np.full(4, np.nan, np.float32), shares, ok), np.eye(4))


def test_fedpac_with_one_client():
    """The mixed head is the trained one, the backbone its own, the centroids its class means."""
    sim = engine(make_method("fedpac"), (2,))
    state, data = start(sim)
    after, _, _, nets = sim.examine(state, data)
    assert_close(
        jax.tree.map(lambda a: a[2], after.server.heads),
        jax.tree.map(lambda a: a[0], nets["params"]["fc"]),
        1e-6,
    )
    assert_close(after.server.net, jax.tree.map(lambda a: a[0], nets), 1e-6)
    others = [i for i in range(N) if i != 2]
    rest = lambda s: jax.tree.map(lambda a: a[np.array(others)], s.server.heads)
    assert same_bits(rest(state), rest(after))
    seen = federation().label_counts()[2] > 0
    assert np.array_equal(np.asarray(after.server.known), seen)
    rows = federation().client_rows(2)
    x, y, fc1 = (
        federation().x[rows].reshape(len(rows), -1),
        federation().y[rows],
        nets["params"]["fc1"],
    )
    features = np.maximum(x @ np.asarray(fc1["kernel"][0]) + np.asarray(fc1["bias"][0]), 0)
    for c in np.flatnonzero(seen):
        np.testing.assert_allclose(after.server.centroids[c], features[y == c].mean(0), atol=1e-5)
