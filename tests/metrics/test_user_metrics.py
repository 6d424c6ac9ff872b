"""Metrics by name: one function gives sums and figures; columns, summary and report follow."""

from __future__ import annotations

import csv
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from commands import SMALL, empty_folder, refused

import fedjax_sim as fs
from fedjax_sim import metrics
from fedjax_sim.cli.main import main
from fedjax_sim.engine.layout import as_numpy
from fedjax_sim.metrics import make_metrics

__all__ = ["empty_folder"]  # used by every test
MORE = dict(model="mlp", rounds=2, epochs=1, participation="0.5", devices="1", chunk="1")


def logits_of(result, rows) -> np.ndarray:
    fed, model = tiny.federation(), result.setup.simulation.env.model
    return np.asarray(
        model.head(result.net, model.features(result.net, jnp.asarray(fed.x[rows]), train=False)[0])
    )


def recalls(logits, y) -> list[float]:
    return [float((logits[y == c].argmax(-1) == c).mean()) for c in np.unique(y)]


def error(logits, y) -> float:
    p = np.asarray(jax.nn.softmax(logits))
    sure, hit = p.max(1), p.argmax(1) == y
    place = np.clip(np.ceil(sure * 15).astype(int) - 1, 0, 14)
    return sum(
        abs(hit[place == b].mean() - sure[place == b].mean()) * (place == b).mean()
        for b in np.unique(place)
    )


def test_the_global_models_by_hand():
    fed = tiny.federation()
    result = fs.run("fedavg", fed, metrics="recall,calibration", **MORE)
    rows = np.asarray(fed.server_rows["test"])
    logits, y, last = logits_of(result, rows), fed.y[rows], result.rows[-1]
    assert last["global_recall_mean"] == pytest.approx(np.mean(recalls(logits, y)))
    assert last["global_recall_worst"] == pytest.approx(min(recalls(logits, y)))
    assert last["global_ece"] == pytest.approx(error(logits, y), abs=1e-5)
    # clients predict with the common model
    own = np.concatenate([fed.client_rows(k, "test") for k in range(tiny.N)])
    assert last["client_recall_mean"] == pytest.approx(
        np.mean(recalls(logits_of(result, own), fed.y[own]))
    )
    # as the file has it
    assert result.summary["metrics"]["global_ece"] == pytest.approx(last["global_ece"], rel=1e-7)
    better = {
        name: about["better"]
        for name, about in result.summary["metrics_about"].items()
        if about["tabled"]
    }
    for prefix in ("global", "client"):
        assert [better[f"{prefix}_{name}"] for name in ("recall_mean", "recall_worst", "ece")] == [
            1,
            1,
            -1,
        ]


@pytest.mark.parametrize("how", [dict(state_on="host"), dict(devices="2")])
def test_personal_models_and_layouts(how):
    """Each client's own model on its own rows; host rows and a mesh add up alike."""
    fed = tiny.federation()
    plain = fs.run("ditto", fed, metrics=["recall"], **MORE)
    other = fs.run("ditto", fed, metrics=["recall"], **{**MORE, **how})
    for name in ("client_recall_mean", "global_recall_worst"):
        assert other.rows[-1][name] == pytest.approx(plain.rows[-1][name], abs=1e-6)
    pooled = np.concatenate(
        [
            np.stack(
                [
                    plain.predict(fed.x[fed.client_rows(k, "test")], client=k),
                    fed.y[fed.client_rows(k, "test")],
                ],
                1,
            )
            for k in range(tiny.N)
        ]
    )
    want = np.mean([(pooled[pooled[:, 1] == c, 0] == c).mean() for c in np.unique(pooled[:, 1])])
    assert plain.rows[-1]["client_recall_mean"] == pytest.approx(want)


def test_what_is_not_asked_for_costs_nothing():
    setup = fs.prepare(fs.Experiment.of("fedavg", **MORE), fed=tiny.federation())
    scores = setup.simulation.evaluate(setup.simulation.init(0, setup.net), setup.simulation.data)
    assert {name for mode in as_numpy(scores).values() for name in mode} == {"accuracy", "loss"}


def test_fine_tuned_models_are_measured_when_they_are_made():
    result = fs.run("fedavg_ft", tiny.federation(), metrics=["recall"], **MORE)
    assert "client_recall_mean" in result.rows[-1] and "client_recall_mean" not in result.rows[0]


def test_a_user_metric(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    monkeypatch.setattr(metrics, "_FACTORIES", dict(metrics._FACTORIES))

    @fs.register_metric("top2")
    def top2(classes):
        """The true class is among the two most likely."""

        def sums(logits, labels, real):
            best = jax.lax.top_k(logits, 2)[1]
            return dict(hit=((best == labels[:, None]).any(1) * real).sum(), count=real.sum())

        return fs.Metric("top2", sums, lambda s: dict(top2=float(s["hit"] / max(s["count"], 1))))

    assert main(["run", "fedavg", *SMALL, "--rounds", "1", "--metrics", "top2", "--out", "o"]) == 0
    row = next(csv.DictReader(pathlib.Path("o/metrics.csv").read_text().splitlines()))
    assert float(row["global_top2"]) >= float(row["global_acc"])
    assert json.loads(pathlib.Path("o/summary.json").read_text())["metrics"]["client_top2"] > 0
    assert main(["report", "o"]) == 0
    assert "global top2" in pathlib.Path("o/report.html").read_text()


def test_mistakes_are_sentences(capsys):
    assert "unknown metric 'recal' (did you mean 'recall'?)" in refused(
        capsys, "run", "fedavg", *SMALL, "--metrics", "recal"
    )
    with pytest.raises(fs.UserError, match=r"metrics 3 is not a list of metrics"):
        fs.run("fedavg", tiny.federation(), metrics=3, **MORE)
    assert [metric.better for metric in make_metrics(["recall", "calibration"], 3, default=())] == [
        1,
        -1,
    ]
