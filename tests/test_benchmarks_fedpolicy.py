"""The table of FedPolicy's policies at a tiny size: it goes on where it was stopped, and says what it has."""

import json

from benchmarks import fedpolicy_table as bench

TINY = ["--dataset", "synthetic:shape=6x6x1,classes=3,train=400,test=60", "--partition", "iid", "--model", "mlp"]
TINY += ["--clients", "5", "--cohort", "3", "--epochs", "1", "--rounds", "5", "--chunk", "1", "--devices", "1"]


def test_it_goes_on_and_draws(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert bench.main([*TINY, *out, "--rows", "random", "--seeds", "0"]) == 0
    assert bench.main([*TINY, *out, "--rows", "random", "--seeds", "0,1"]) == 0
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(r["row"], r["seed"]) for r in runs] == [("random", 0), ("random", 1)]
    shares = [runs[0][f"share_{name}"] for name in ("full", "backbone", "head")]
    assert abs(sum(shares) - 1) < 1e-6 and len(runs[0]["curve"]) == 5
    assert max(runs[0]["curve"]) == round(runs[0]["best"], 2) >= runs[0]["by_val"] - 1e-9
    assert (tmp_path / "front.png").stat().st_size > 5000 and (tmp_path / "fedpolicy.csv").exists()
    assert "| random | 2 |" in capsys.readouterr().out
    assert bench.main([*TINY, *out, "--rows", "sacc"]) == 2 and "did you mean 'sac'" in capsys.readouterr().err
    assert bench.main(["--out", str(tmp_path / "nowhere"), "--table"]) == 2
