"""The evidence of pFedRLLA on a small scale: rows, figures, and that finished rows are not computed again."""

from __future__ import annotations

import argparse
import json

import numpy as np

from benchmarks import pfedrlla, pfedrlla_designed

TINY = "--side 4 --embedding 6 --designed-rounds 6 --encoder-steps 3 --devices 1"
SMALL = "--dataset digits --model mlp --clients 10 --classes 4 --minutes 0 --rounds 2 --pretrain-rounds 3"


def test_designed_parts(tmp_path, capsys, monkeypatch):
    words = ["--part", "heatmap,embeddings", "--out", str(tmp_path), *TINY.split()]
    assert pfedrlla.main(words) == 0
    row = json.loads((tmp_path / "heatmap.jsonl").read_text().splitlines()[0])
    weights = np.array(row["weights"])
    assert weights.shape == (9, 10) and np.allclose(weights.sum(1), 1, atol=1e-4) and len(row["curve"]) == 6
    worth = {rule["rule"]: rule for rule in row["landscape"]}
    assert worth["wanted"]["r3"] == 0 > worth["uniform"]["r3"] and abs(worth["self"]["r2"]) < 1e-6
    assert worth["group"]["entropy"] < worth["uniform"]["entropy"] < 1.001
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("heatmap.png", "embeddings.png"))
    assert "mhae" in (tmp_path / "embeddings.csv").read_text() and "silhouette" not in capsys.readouterr().err
    monkeypatch.setattr(pfedrlla_designed, "trained", None)  # what is finished is read
    monkeypatch.setattr(pfedrlla_designed, "embeddings", None)
    assert pfedrlla.main(words) == 0


def test_table_beside_the_published(tmp_path, capsys):
    assert (
        pfedrlla.main(
            ["--part", "table", "--out", str(tmp_path), *TINY.split(), *SMALL.split(), "--methods", "local,pfedrlla"]
        )
        == 0
    )
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "table.jsonl").read_text().splitlines())}
    assert set(rows) == {"s=4 local", "s=4 pfedrlla"}
    assert all(0 <= row[k] <= 1 for row in rows.values() for k in ("ap_mean", "ap_pooled", "bp_mean", "bp_pooled"))
    assert "reward" in rows["s=4 pfedrlla"]["curve"][-1] and "s=4 pfedrlla" in capsys.readouterr().out


def test_every_method_is_scored_by_what_its_clients_predict_with(tmp_path, monkeypatch):
    """Fine-tuned copies, and private models; the published figures beside the scores that they are."""
    monkeypatch.setattr(pfedrlla, "label", lambda args, classes, name, of=pfedrlla.label: of(
        argparse.Namespace(dataset="cifar10"), 2, name
    ))  # fmt: skip
    words = [*TINY.split(), *SMALL.split(), "--methods", "fedavg,fedbabu,ditto,fedavg_ft"]
    assert pfedrlla.main(["--part", "table", "--out", str(tmp_path), *words]) == 0
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "table.jsonl").read_text().splitlines())}
    average, tuned, private, copies = (rows[f"s=4 {m}"] for m in ("fedavg", "fedbabu", "ditto", "fedavg_ft"))
    assert (average["published_bp"], average["published_ap"]) == (86.26, 89.61)  # FedAvg and FedAvg+FT of the table
    assert (tuned["published_ap"], private["published_ap"], copies["published_ap"]) == (89.8, 89.4, None)
    assert private["ap_mean"] != average["ap_mean"]
    assert {"ft_mean", "ap_mean"} <= set(tuned) and "bp_mean" not in tuned and "ft_mean" not in average
    # one of ten clients is trained in a round: the others hold what they held
    assert abs(average["bp_mean"] - average["ap_mean"]) <= 0.1


def test_cost_is_shares_of_local_training(tmp_path):
    words = ["--part", "cost", "--out", str(tmp_path), *TINY.split(), *SMALL.split(), "--cost-rounds", "1"]
    assert pfedrlla.main(words) == 0
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
    rows = [np.concatenate([fed.client_rows(k, s) for s in ("train", "val", "test")]) for k in range(6)]
    assert len(set(np.concatenate(rows).tolist())) == 360
    from fedjax_sim.data.sources import load

    data = load("digits")
    y = np.concatenate([data.y_train, data.y_test])
    for client, own in enumerate(rows):
        assert np.array_equal(np.asarray(fed.y)[own], (y[own] + client // 2 * 3) % 10)
