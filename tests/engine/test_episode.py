"""A run as one pure function: the engine's own rounds, also padded and mapped over federations."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim.engine import episode as episodes
from fedjax_sim.engine.episode import Length, each, make_episode, only
from fedjax_sim.engine.keys import seed_key
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner.prepare import prepare

LENGTH = Length(6, last=2, every=2)
COMMON = dict(participation="3/6", rounds=6, epochs=2, batch_size=16, lr=0.05, momentum=0.0)


def federation(seed: int = 0, clients: int = 6) -> fs.Federation:
    """Digits of few clients with few examples; 60 to test the common model."""
    fed = fs.federate("digits", "dirichlet:0.3", clients, "fedpolicy", seed)
    most = {"train": 40, "val": 12, "test": 12}
    size = {s: np.minimum(n, most[s]) for s, n in fed.size.items()}
    rows = {s: table[:, : most[s]] for s, table in fed.rows.items()}
    fewer = {name: rows[:60] for name, rows in fed.server_rows.items()}
    return dataclasses.replace(fed, rows=rows, size=size, server_rows=fewer)


def simulation(method: str, fed: fs.Federation, participation: str = "3/6"):
    config = Experiment.of(
        method, **{**COMMON, "participation": participation}, model="mlp", loss="ce"
    )
    config = config.replace(model_options={"hidden": (8,)}, chunk="1")
    return prepare(config, fed=fed).simulation


def drawn(sim, feds, participants, **more):
    wide, clients = episodes.padded(feds, **more)
    return episodes.draws(sim.stages, wide, clients, participants)


def keys(*seeds: int) -> np.ndarray:
    return np.stack([seed_key(seed) for seed in seeds])


@pytest.mark.parametrize("method", ["full", "backbone", "fedavg"])
def test_an_episode_is_the_run(method):
    fed = federation()
    result = fs.run(
        method, fed, **COMMON, model="mlp", model_options={"hidden": (8,)}, loss="ce", seed=3
    )
    rows = [row for row in result.rows if row["round"] in (4, 6)]
    sim = simulation(method, fed)
    draw = only(drawn(sim, [fed], [3]), 0)
    scores = jax.jit(make_episode(sim, LENGTH))(None, draw, keys(3)[0])
    mean = lambda name: np.mean([row[name] for row in rows])
    np.testing.assert_allclose(scores.common, mean("global_acc"), atol=1e-6)
    np.testing.assert_allclose(scores.clients, mean("client_mean"), atol=1e-6)
    np.testing.assert_allclose(scores.worst, mean("client_worst10"), atol=1e-6)
    taken = result.summary["bytes_down"] / result.summary["bytes_up"]
    np.testing.assert_allclose(scores.down / scores.up, taken, rtol=1e-5)


def test_padding_changes_nothing():
    fed = federation()
    plain = simulation("backbone", fed)
    wide, clients = episodes.padded([fed], clients=9, examples={"train": 70})
    assert wide[0].num_clients == 9 and wide[0].rows["train"].shape == (9, 70)
    sim = simulation("backbone", wide[0], "5/9")
    more = only(episodes.draws(sim.stages, wide, clients, [3]), 0)
    small = only(drawn(plain, [fed], [3]), 0)
    expected = jax.jit(make_episode(plain, LENGTH))(None, small, keys(1)[0])
    found = jax.jit(make_episode(sim, LENGTH))(None, more, keys(1)[0])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("method", ["full", "fedavg"])
def test_federations_side_by_side(method):
    feds = [federation(0, 6), federation(1, 4), federation(2, 5)]
    wide, clients = episodes.padded(feds)
    assert len(wide[0].x) == len(feds[0].x)  # one pool, stored once
    sim = simulation(method, wide[0], "3/6")
    draw, seeds = episodes.draws(sim.stages, wide, clients, [3, 2, 1]), keys(5, 6, 7)
    apart = jax.jit(each(make_episode(sim, LENGTH)))(None, draw, seeds)
    mapped = make_episode(sim, LENGTH, mapped=(episodes.FEDERATIONS,))
    together = jax.jit(each(mapped, side_by_side=True))(None, draw, seeds)
    assert len(np.unique(apart.common)) > 1
    np.testing.assert_allclose(together, apart, atol=1e-6)


def test_federations_that_do_not_fit_together():
    fed = federation()
    other = dataclasses.replace(
        fed, server_rows={name: rows[:30] for name, rows in fed.server_rows.items()}
    )
    with pytest.raises(UserError, match="equally many server rows"):
        episodes.padded([fed, other])
    with pytest.raises(UserError, match="one shape"):
        episodes.padded([fed, dataclasses.replace(fed, x=np.asarray(fed.x)[:, :4])])
    with pytest.raises(UserError, match="6 rounds cannot have"):
        Length(6, last=4, every=2)
