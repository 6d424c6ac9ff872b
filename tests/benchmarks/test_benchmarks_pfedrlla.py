"""The evidence of pFedRLLA on a small scale: rows, figures, and that finished rows are not computed
again."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import pfedrlla, pfedrlla_designed

TINY = "--side 4 --embedding 6 --designed-rounds 6 --encoder-steps 3 --devices 1"
SMALL = "--dataset digits --model mlp --clients 10 --classes 4 --pretrain-rounds 3"


def test_designed_parts(tmp_path, capsys, monkeypatch):
    argv = ["--part", "heatmap,embeddings", "--out", str(tmp_path), *TINY.split()]
    assert pfedrlla.main(argv) == 0
    row = json.loads((tmp_path / "heatmap.jsonl").read_text().splitlines()[0])
    weights = np.array(row["weights"])
    assert (
        weights.shape == (9, 10)
        and np.allclose(weights.sum(1), 1, atol=1e-4)
        and len(row["curve"]) == 6
    )
    worth = {rule["rule"]: rule for rule in row["landscape"]}
    assert worth["wanted"]["r3"] == 0 > worth["uniform"]["r3"] and abs(worth["self"]["r2"]) < 1e-6
    assert worth["group"]["entropy"] < worth["uniform"]["entropy"] < 1.001
    assert all(
        (tmp_path / name).stat().st_size > 1000 for name in ("heatmap.png", "embeddings.png")
    )
    assert (
        "mhae" in (tmp_path / "embeddings.csv").read_text()
        and "silhouette" not in capsys.readouterr().err
    )
    monkeypatch.setattr(pfedrlla_designed, "trained", None)  # what is finished is read
    monkeypatch.setattr(pfedrlla_designed, "embeddings", None)
    assert pfedrlla.main(argv) == 0


def test_cost_is_shares_of_local_training(tmp_path):
    argv = [
        "--part",
        "cost",
        "--out",
        str(tmp_path),
        *TINY.split(),
        *SMALL.split(),
        "--cost-rounds",
        "1",
    ]
    assert pfedrlla.main(argv) == 0
    row, whole = map(json.loads, (tmp_path / "cost.jsonl").read_text().splitlines())
    assert whole["round_with"] > 0 and whole["extra_share"] > -1
    server = ("agent_share", "encoder_share", "projections_share")
    assert all(row[k] > 0 for k in (*server, "validation_share"))
    assert abs(sum(row[k] for k in server) - row["server_share"]) < 1e-6


def test_a_part_that_is_not_there(capsys):
    assert pfedrlla.main(["--part", "heat"]) == 2
    assert "there is no part 'heat'; allowed: heatmap" in capsys.readouterr().err


def test_groups_contradict_each_other():
    """The same digit has another name in every group, and nobody shares an image."""
    fed = pfedrlla_designed.grouped(3, 2, rows=60)
    rows = [
        np.concatenate([fed.client_rows(k, s) for s in ("train", "val", "test")]) for k in range(6)
    ]
    assert len(set(np.concatenate(rows).tolist())) == 360
    from fedjax_sim.data.sources import load

    data = load("digits")
    y = np.concatenate([data.y_train, data.y_test])
    for client, own in enumerate(rows):
        assert np.array_equal(np.asarray(fed.y)[own], (y[own] + client // 2 * 3) % 10)
