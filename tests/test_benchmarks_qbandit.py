"""The evidence driver of Q-bandit on a small scale: rows, counts, and that a second start only does what is missing."""

from __future__ import annotations

import json

from benchmarks import ledger, qbandit

SMALL = "--datasets digits --alphas 5 --rounds 2 --train 0 --test 0 --model mlp --evaluate-every 2 --devices 1"


def test_table_of_policies_goes_on_where_it_was(tmp_path, capsys):
    run = lambda *more: qbandit.main([*SMALL.split(), "--out", str(tmp_path), *more])
    assert run("--rows", "fedavg", "--seeds", "0") == 0
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"dataset": "dig')  # killed while it wrote
    capsys.readouterr()
    assert run("--rows", "fedavg", "--seeds", "0,1") == 0
    out, err = capsys.readouterr()
    assert "digits-a5-fedavg-s1-" in err and "-s0-" not in err and "cut short" in err
    runs = ledger.read(tmp_path / "runs.jsonl")
    assert [(r["row"], r["seed"]) for r in runs] == [("fedavg", 0), ("fedavg", 1)]
    assert all((r["exceed_compute"], r["exceed_comm"]) == (8, 2) for r in runs)  # two layers: Table 1 is cut to them
    assert "| `fedavg` | 2 | 8.0 ± 0.0 |" in out and "random 7.3 / 7.7" in out
    assert (tmp_path / "rounds/digits-a5-fedavg-s1-rounds2-train0-test0-modelmlp.csv").exists()
    lines = (tmp_path / "layer_distance.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 and (tmp_path / "layer_distance.png").exists()
    assert run("--table") == 0 and "`fedavg`" in capsys.readouterr().out


def test_runs_of_other_settings_do_not_share_a_file():
    """Two networks in one folder once wrote to the same file, and the figure of layers mixed them."""
    name = lambda *words: qbandit.name_of(qbandit.key_of(qbandit.make_parser().parse_args(words), "mnist", 1.0, "fedavg", 0))
    assert name() == "mnist-a1-fedavg-s0"
    others = [f"--{word.replace('_', '-')}" for word in qbandit.SETTING]
    names = [name(word, {"--model": "mlp", "--channels": "4x4x8x8"}.get(word, "7")) for word in others]
    assert len({name(), *names}) == 1 + len(others)


def test_bad_rows_are_one_sentence(tmp_path, capsys):
    assert qbandit.main(["--rows", "fedavgs", "--out", str(tmp_path)]) == 2
    assert "did you mean 'fedavg'" in capsys.readouterr().err


def test_published_and_expected_are_there(tmp_path):
    args = qbandit.make_parser().parse_args(["--out", str(tmp_path)])
    key = qbandit.key_of(args, "cifar10", 5.0, "learner-client", 0)
    names = ("exceed_compute", "exceed_comm", "last_compute", "last_comm", "client_acc", "global_acc", "bytes")
    more = dict.fromkeys((*names, "pairwise_distance", "mean_epochs", "mean_depth", "seconds_per_round"), 1.0)
    (tmp_path / "runs.jsonl").write_text(json.dumps(key | more) + "\n")
    other = qbandit.make_parser().parse_args(["--out", str(tmp_path), "--rounds", "7"])
    assert "no run with this setting yet: rounds 7" in qbandit.table(ledger.read(tmp_path / "runs.jsonl"), other)
    text = qbandit.table(ledger.read(tmp_path / "runs.jsonl"), args)
    assert "joint compute 400 → 322, comm 400 → 396" in text and "fedavg 400.0 / 800.0" in text
