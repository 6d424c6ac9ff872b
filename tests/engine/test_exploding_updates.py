"""Finite updates that explode: the run warns once, counts, and names clients and rounds."""

from __future__ import annotations

import csv
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim.engine.round import exploding_updates
from fedjax_sim.report.text import warnings

BAD = 2
HOW = dict(
    model="mlp",
    model_options={"hidden": (8,)},
    rounds=4,
    epochs=1,
    batch_size=8,
    participation="1",
    devices="1",
)


def federation(factor: float) -> fs.Federation:
    """Five clients of unequal size; the pixels of one are `factor` times what they should be."""
    rng = np.random.default_rng(0)
    sizes = (10, 200, 40, 60, 25)
    y = rng.integers(0, 3, sum(sizes) + 30)
    x = (rng.standard_normal((len(y), 4, 4, 1)) + y[:, None, None, None]).astype(np.float32)
    rows = np.split(np.arange(len(y)), np.cumsum(sizes))
    x[rows[BAD]] *= factor
    return fs.Federation.from_arrays(x, y, {"train": rows[:-1]}, test=rows[-1], mean=0.0, std=1.0)


def test_an_exploding_client_is_said_and_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        result = fs.run("fedavg", federation(1e5), out=tmp_path / "run", **HOW)
    said = [r.getMessage() for r in caplog.records if "exploded" in r.getMessage()]
    assert len(said) == 1 and "client 2 in round 1" in said[0] and "clip" in said[0]
    assert np.isfinite(result.rounds[0]["update_norm_max"]) and result.rounds[0]["diverged"] == 0
    assert result.rounds[0]["exploding"] == 1 and result.rounds[0]["exploding_id"] == BAD
    assert result.rounds[0]["update_norm_max"] > 100 * result.rounds[0]["update_norm"] > 0
    summary = result.summary
    assert summary["exploding"] == sum(r["exploding"] for r in result.rounds) > 0
    assert (
        summary["exploding_first"] == {"round": 1, "client": BAD}
        and BAD in summary["exploding_clients"]
    )
    assert any(
        "exploded" in line and "clients 2" in line and "rounds 1" in line
        for line in warnings(summary)
    )
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        assert sum(int(row["exploding"]) for row in csv.DictReader(file)) == summary["exploding"]


def test_healthy_clients_are_not(caplog):
    result = fs.run("fedavg", federation(1.0), **HOW)
    assert result.summary["exploding"] == 0 and result.summary["exploding_first"] is None
    assert "exploded" not in caplog.text and not any(
        "exploded" in line for line in warnings(result.summary)
    )
    assert all(0 < r["update_norm"] <= r["update_norm_max"] < 10 for r in result.rounds)


@pytest.mark.parametrize(
    ("length", "began", "count"),
    [
        ([1.0, 2.0, 50.0, 0.1], [3.0] * 4, 1),  # far longer than the others and than its model
        ([1.0, 2.0, 25.0, 0.1], [3.0] * 4, 0),  # a large client, but no longer than ten models
        ([400.0, 500.0, 600.0, 450.0], [3.0] * 4, 4),  # all of them
        ([40.0, 50.0, 60.0, 45.0], [3.0] * 4, 0),  # all alike: a first round
        ([1.0, 2.0, 50.0, 1e9], [3.0, 3.0, 3.0, 0.0], 1),  # nothing to compare with
    ],
)
def test_what_explodes(length, began, count):
    ok = jnp.array([True, True, True, True])
    found = exploding_updates(jnp.array(length), jnp.array(began), ok, jnp.arange(4) + 10)
    assert int(found["exploding"]) == count
    assert int(found["exploding_id"]) == (12 if count else -1)
    nobody = exploding_updates(jnp.array(length), jnp.array(began), ~ok, jnp.arange(4))
    assert (
        int(nobody["exploding"]),
        float(nobody["update_norm"]),
        float(nobody["update_norm_max"]),
    ) == (0, 0.0, 0.0)
