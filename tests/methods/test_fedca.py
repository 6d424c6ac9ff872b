"""fedca: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_client import RNG, train_one
from tiny import close, simulation

from fedjax_sim.local.losses import Confusion
from fedjax_sim.methods import fedca, make_method
from fedjax_sim.types import Cohort


def cohort_of(struggles: np.ndarray, ok: np.ndarray, nets) -> Cohort:
    size = len(ok)
    return Cohort(
        (),
        (),
        (),
        int(ok.sum()),
        np.arange(size),
        jnp.array(ok),
        jnp.ones(size),
        jnp.array(struggles),
        (),
        0,
        (),
        nets,
    )


@pytest.mark.parametrize("hopeless", [False, True])
def test_fedca_averages_once_per_priority_class(hopeless):
    """One average per worst class, then their mean, spelled out; a class that everybody fails is
    averaged uniformly."""
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
    assert np.allclose(
        fedca.struggle(Confusion(jnp.array(conf), jnp.array(count), jnp.array(0.0))),
        want,
        atol=1e-6,
    )
    # tracked with plain cross-entropy as well, and reported after training
    _, after, up = train_one("fedca")
    assert not np.allclose(after.confusion.conf, 1) and close(
        up.report, fedca.struggle(after.confusion), 1e-6
    )
