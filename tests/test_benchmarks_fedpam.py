"""Smoke test of the FedPAM benchmark: its table, and that finished methods are not run again."""

from __future__ import annotations

import json

from benchmarks import fedpam

SMALL = "--dataset digits --clients 4 --model mlp --rounds 2 --minutes 1 --large-clients 6 --large-rounds 1 --devices 1"


def test_table_beside_the_published_and_goes_on_where_it_was(tmp_path, capsys):
    run = lambda *more: fedpam.main([*SMALL.split(), "--out", str(tmp_path), *more])
    assert run("--methods", "fedpam") == 0
    assert run("--methods", "fedavg,fedpam") == 0
    out, err = capsys.readouterr()
    assert err.count("fedpam round 2") == 1 and err.count("fedavg round 2") == 1
    assert "N = 6: fedavg" in out and "private" in out
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(r["method"], r["clients"], r["rounds"]) for r in runs] == [
        ("fedpam", 4, 2), ("fedpam", 6, 1), ("fedavg", 4, 2), ("fedavg", 6, 1)
    ]  # fmt: skip
    assert runs[0]["private_parameters"] == 64**2 and runs[2]["private_parameters"] == 0
    assert json.loads((tmp_path / "fedpam.json").read_text())["runs"][0]["method"] == "fedavg"


def test_every_method_of_its_table(tmp_path, capsys):
    """Without a common model, with fine-tuning at evaluation, with server states of all kinds: a row each."""
    words = "--dataset digits --clients 3 --model mlp --rounds 1 --minutes 1 --large-rounds 0 --devices 1 --methods all"
    assert fedpam.main([*words.split(), "--out", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "fedpam.json").read_text())["runs"]
    assert [r["method"] for r in runs] == [*fedpam.BASELINES, "fedpam"] and len(runs) == 15
    assert all(0 <= r["rows"][-1]["personal_mean"] <= 1 for r in runs)
    without = {r["method"] for r in runs if r["rows"][-1]["global_mean"] is None}
    assert without == {"fedamp", "fedper", "fedrep", "fedfomo", "pfedfda"} and "fedfomo" in capsys.readouterr().out


def test_mistakes_are_one_sentence(capsys):
    assert fedpam.main(["--set", "fedpan.lam=1"]) == 2
    assert "fedpan.lam=1" in capsys.readouterr().err
