"""`compare`: entries with options of their own, everything prepared first, seeds and their data,
the files it writes."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from commands import SMALL, empty_folder

from fedjax_sim.cli.main import main
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.runner import many

__all__ = ["empty_folder"]  # used by every test
ROUNDS = ["--rounds", "2"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The same method twice, with options of the method and of the run; two seeds, whose data
    follow them."""
    out = tmp_path_factory.mktemp("compare") / "out"
    entries = ["fedprox:mu=0.1,lr=0.05", "fedprox:mu=1"]
    assert (
        main(
            [
                "compare",
                *entries,
                *SMALL,
                *ROUNDS,
                "--seeds",
                "2",
                "--data-seed",
                "follow",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    return out


def config(path):
    return flat_config(json.loads((path / "config.json").read_text()))


def test_entries_have_options_of_their_own(compared):
    first, second = compared / "fedprox,mu=0.1,lr=0.05", compared / "fedprox,mu=1"
    assert [config(f / "seed-0")["options"] for f in (first, second)] == [{"mu": 0.1}, {"mu": 1.0}]
    assert [config(f / "seed-0")["lr"] for f in (first, second)] == [0.05, 0.02]


def test_the_partition_follows_the_seed(compared):
    labels = {}
    for seed in (0, 1):
        for entry in ("fedprox,mu=1", "fedprox,mu=0.1,lr=0.05"):
            path = compared / entry / f"seed-{seed}"
            assert (config(path)["seed"], config(path)["data_seed"]) == (seed, seed)
            with np.load(path / "labels.npz") as file:
                labels.setdefault(seed, file["label_counts"])
                # the same for every method
                assert np.array_equal(labels[seed], file["label_counts"])
    assert not np.array_equal(labels[0], labels[1])


def test_files_of_a_comparison(compared):
    stored = json.loads((compared / "compare.json").read_text())
    runs = [json.loads((p / "summary.json").read_text()) for p in sorted(compared.glob("*/seed-*"))]
    assert [r["method"] for r in stored["runs"]] == ["fedprox:mu=0.1,lr=0.05"] * 2 + [
        "fedprox:mu=1"
    ] * 2
    best = [r["best_global"] for r in runs[:2]]
    (cell,) = [s["figures"]["best_global"] for s in stored["statistics"] if "0.05" in s["method"]]
    assert (
        cell["n"] == 2
        and cell["mean"] == pytest.approx(np.mean(best))
        and cell["std"] == pytest.approx(np.std(best, ddof=1))
    )
    rows = list(csv.DictReader((compared / "compare.csv").open()))
    assert [r["seed"] for r in rows] == ["0", "1", "mean", "std", "n"] * 2
    assert float(rows[2]["best_global"]) == pytest.approx(np.mean(best))
    figures = {k for k, v in runs[0].items() if isinstance(v, float)}
    assert figures <= set(rows[0]) and "rounds_to.20" in rows[0]
    assert "fedprox (lr=0.05, mu=0.1)" in (compared / "compare.md").read_text()
    assert r"\toprule" in (compared / "compare.tex").read_text()
    assert (compared / "curves.png").stat().st_size > 5000


def test_everything_is_prepared_before_anything_trains(monkeypatch):
    order = []
    real = many.ready
    monkeypatch.setattr(many, "ready", lambda *a, **b: order.append("prepared") or real(*a, **b))

    def trains(*setups, **more):
        order.append("trained")
        raise KeyboardInterrupt

    monkeypatch.setattr(many, "run_all", trains)
    assert main(["compare", "fedavg", "fedprox", "ditto", *SMALL]) == 130
    assert order == ["prepared"] * 3 + ["trained"]


def test_methods_share_what_they_read(monkeypatch):
    read = []
    from fedjax_sim.runner import prepare

    real = prepare.load_federation
    monkeypatch.setattr(
        prepare, "load_federation", lambda c: read.append(c.data.partition) or real(c)
    )
    assert main(["compare", "fedavg", "fedprox", "fedavg:partition=iid", *SMALL, "--dry-run"]) == 0
    assert read == ["dirichlet:0.3", "iid"]


def test_settings_that_differ_are_said(tmp_path, capsys):
    """Variants of one method have one rate; a method with a rate of its own is compared with others
    aloud."""
    argv = [*SMALL, "--dry-run"]
    assert main(["compare", "fedpam", "fedpam:variant=pam", *argv]) == 0
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("compared with")
    ]
    assert said == [
        "compared with different settings: fedpam.variant full (fedpam), pam (fedpam:variant=pam)"
    ]
    assert main(["compare", "fedavg", "fedpam", "fedpolicy", *argv]) == 0
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("compared with")
    ]
    assert said == [
        "compared with different settings: lr 0.02 (fedavg, fedpolicy), 0.005 (fedpam)",
        "compared with different settings: momentum 0.9 (fedavg, fedpolicy), 0.5 (fedpam)",
        "compared with different settings: loss ce (fedavg, fedpam), c3e (fedpolicy)",
    ]
    assert main(["compare", "fedavg", "fedprox", *argv]) == 0
    assert "compared with" not in capsys.readouterr().out


def test_settings_that_differ_are_in_the_files(compared):
    differs = json.loads((compared / "compare.json").read_text())["differs"]
    first, second = "fedprox:mu=0.1,lr=0.05", "fedprox:mu=1"
    assert differs == {
        "lr": {first: "0.05", second: "0.02"},
        "fedprox.mu": {first: "0.1", second: "1.0"},
    }


def test_the_order_typed_is_kept(tmp_path):
    """In the files of the comparison, and by `report` of its folder."""
    from fedjax_sim.report.groups import grouped, labels
    from fedjax_sim.report.runs import load_runs

    assert main(["compare", "fedprox:mu=1", "fedavg", "ccvr", *SMALL, *ROUNDS, "--out", "out"]) == 0
    assert labels(grouped(load_runs(["out"]))) == ["fedprox", "fedavg", "ccvr"]
