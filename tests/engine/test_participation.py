"""Who takes part: sizes, uniformity, dropout and stragglers, against counts and binomial bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.engine.participation import Participation, cohort_size, unseen_clients
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment

ROUNDS = 4000
KEYS = jax.random.split(jax.random.key(3), ROUNDS)


def draws(part: Participation) -> tuple[np.ndarray, np.ndarray]:
    """(ids [T, M], takes part [T, M]) of many rounds."""
    ids, active = jax.jit(jax.vmap(part.sample))(KEYS, jnp.arange(ROUNDS))
    return np.asarray(ids), np.asarray(active)


def read(text):
    return Experiment.of(participation=text).training.participation


@pytest.mark.parametrize(
    "text, clients, seen, want",
    [
        ("0.1", 100, 100, (10, 10)),
        ("1", 7, 7, (7, 7)),
        ("0.01", 20, 20, (1, 1)),
        ("0.3", 10, 10, (3, 3)),
        ("0.5:1", 20, 20, (10, 20)),
        ("0.1:0.1", 50, 50, (5, 5)),
        ("10/50", 50, 50, (10, 10)),
        ("50/50", 50, 50, (50, 50)),
        ("0.5", 20, 10, (5, 5)),
        ("5/20", 20, 10, (5, 5)),  # a fraction is of the clients that may be sampled
    ],
)
def test_parsing(text, clients, seen, want):
    assert cohort_size(read(text), clients, seen) == want


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "1.5",
        "-0.1",
        "0.5:0.1",
        "0.1:0.2:0.3",
        "11/10",
        "0/10",
        "2.5/10",
        "inf/10",
        "nan/10",
        "nan",
        "x",
        "3/9",
        "",
        "/",
        "1/",
        ":",
    ],
)
def test_refusals(text):
    with pytest.raises(UserError) as caught:
        cohort_size(read(text), 10, 10)
    assert "\n" not in str(caught.value)


def test_cohorts_are_uniform_without_replacement():
    seen = (0, 2, 3, 5, 8, 9, 11)
    ids, active = draws(Participation(3, 3, seen))
    assert active.all() and ids.shape == (ROUNDS, 3)
    assert all(len(set(row)) == 3 for row in ids.tolist())
    counts = np.array([(ids == i).sum() for i in seen])
    assert counts.sum() == ROUNDS * 3  # nobody else
    p = 3 / len(seen)
    assert np.abs(counts - ROUNDS * p).max() < 5 * np.sqrt(ROUNDS * p * (1 - p))


def test_range_draws_every_size_equally_often():
    _, active = draws(Participation(2, 5, tuple(range(9))))
    sizes = active.sum(1)
    counts = np.bincount(sizes, minlength=6)
    assert counts[:2].sum() == 0 and np.abs(counts[2:] - ROUNDS / 4).max() < 5 * np.sqrt(
        ROUNDS * 3 / 16
    )
    # the first ones of the permutation
    assert all((row[:n]).all() for row, n in zip(active, sizes, strict=True))


def test_a_round_depends_on_its_key_alone():
    part = Participation(3, 5, tuple(range(9)), dropout=0.5, slow=(0.5, 0.2))
    ids = jnp.arange(9)
    for fn in (part.reports, part.share_of_work):
        assert np.array_equal(fn(KEYS[0], ids), fn(KEYS[0], ids)) and not np.array_equal(
            fn(KEYS[0], ids), fn(KEYS[1], ids)
        )
        # keyed by the client, not by its place in the cohort
        assert np.array_equal(
            np.asarray(fn(KEYS[0], ids))[::-1], np.asarray(fn(KEYS[0], ids[::-1]))
        )


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_dropout_is_the_chance_of_failing(chance):
    failed = ~np.asarray(
        jax.vmap(lambda k: Participation(5, 5, tuple(range(5)), chance).reports(k, jnp.arange(5)))(
            KEYS
        )
    )
    n = failed.size
    assert abs(failed.sum() - n * chance) <= 5 * np.sqrt(n * chance * (1 - chance))


def test_stragglers_manage_a_uniform_share():
    part = Participation(5, 5, tuple(range(5)), slow=(0.4, 0.25))
    share = np.asarray(jax.vmap(lambda k: part.share_of_work(k, jnp.arange(5)))(KEYS)).reshape(-1)
    slow = share[share < 1]
    assert abs(len(slow) - 0.4 * len(share)) < 5 * np.sqrt(len(share) * 0.24)
    assert slow.min() >= 0.25 and abs(slow.mean() - 0.625) < 5 * 0.75 / np.sqrt(12 * len(slow))
    assert (
        np.asarray(Participation(5, 5, tuple(range(5))).share_of_work(KEYS[0], jnp.arange(5))) == 1
    ).all()


def test_schedule_is_followed_in_turn():
    part = Participation(2, 2, tuple(range(6)), schedule=((1, 2), (5, 0), (3, 4)))
    got = [tuple(np.asarray(part.sample(KEYS[t], jnp.int32(t))[0]).tolist()) for t in range(4)]
    assert got == [(1, 2), (5, 0), (3, 4), (1, 2)]


def test_unseen_clients():
    assert unseen_clients(0, 20, 0) == ()
    assert len(unseen_clients(0.25, 20, 0)) == 5 and len(unseen_clients(3, 20, 0)) == 3
    assert unseen_clients(3, 20, 0) == unseen_clients(3, 20, 0) != unseen_clients(3, 20, 1)
    assert set(unseen_clients(19, 20, 4)) < set(range(20))
    for amount in (-1, 20, 21, 1.5, 0.99):
        with pytest.raises(UserError):
            unseen_clients(amount, 20, 0)


def test_natural_values_from_python():
    """Numbers and pairs are the same runs as their texts."""
    import fedjax_sim as fs

    small = dict(model="mlp", model_options={"hidden": (4,)}, clients=6, rounds=2, epochs=0.5)
    pairs = [
        (
            dict(participation=0.5, devices=1, chunk=1),
            dict(participation="3/6", devices="1", chunk="1"),
        ),
        (dict(participation=3, shuffle=False), dict(participation="3", shuffle="off")),
        (dict(participation=(2, 4)), dict(participation="2:4")),
    ]
    for natural, text in pairs:
        run = fs.run("fedavg", **small, **natural)
        assert run.rows == fs.run("fedavg", **small, **text).rows
        assert all(2 <= row["participants"] <= 4 for row in run.rounds)
