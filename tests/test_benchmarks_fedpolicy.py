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
    said = capsys.readouterr().out
    assert "| random | 2 |" in said
    for row in bench.all_rows():  # what was not run is there too
        assert f"| {row} | {'2 |' if row == 'random' else '0 | not run |'}" in said
    assert bench.main([*TINY, *out, "--rows", "sacc"]) == 2 and "did you mean 'sac'" in capsys.readouterr().err
    assert bench.main(["--out", str(tmp_path / "nowhere"), "--table"]) == 2


def run_of(row, seed, best, **more):
    """A line of the ledger."""
    figures = dict.fromkeys((*bench.COLUMNS, "share_full", "share_backbone", "share_head", "entropy", "best_val"), 0.5)
    setting = dict(dataset="toy", data="f00", partition="iid", model="mlp", num_clients=5, cohort=3, epochs=1.0, rounds=5)
    line = dict(key=f"{row}{seed}{more}", row=row, seed=seed, live_least=None, agent={}, **setting, **figures)
    return line | dict(best=best, last_ten=best - 1) | more


def test_other_data_are_other_runs_and_another_table(tmp_path, capsys):
    """The same folder, another data set: its runs are run, and figures of the first are not shown as the second's."""
    out = ["--out", str(tmp_path), "--rows", "random", "--seeds", "0"]
    other = [word.replace("train=400", "train=300") for word in TINY]
    for words in (TINY, other, [*TINY, "--epochs", "2"], TINY):
        assert bench.main([*words, *out]) == 0
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == len({run["key"] for run in runs}) == 3 and len({run["data"] for run in runs}) == 2
    said = capsys.readouterr().out.split("train=400", 1)[1]
    assert all(title in said for title in ("train=300", "1 epochs", "2 epochs"))


def test_an_agent_is_scored_greedily_too(tmp_path):
    assert bench.main([*TINY, "--out", str(tmp_path), "--rows", "dqn", "--seeds", "0"]) == 0
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["row"] for run in runs] == ["dqn", "dqn, greedy"]
    assert runs[0]["agent"] and not runs[1]["agent"]  # the second learns nothing


def test_differences_are_paired_and_shares_are_of_the_gain():
    """Seeds differ by 10, policies by 1 and 4: paired, that is no noise. A quarter of what there is to win, not 97 %."""
    runs = [
        run_of(row, seed, 70 + 10 * seed + ahead)
        for row, ahead in (("random", 0), ("full", 4), ("sac", 1))
        for seed in (0, 1, 2)
    ]
    runs.append(run_of("sac", 7, 3.0))  # nobody to compare it with
    row = next(r for r in bench.pooled(runs) if r["row"] == "sac")
    assert (row["best_ahead"], row["best_ahead_std"], row["last_ten_gain"]) == (1.0, 0.0, 0.25)
    assert row["seeds"] == 4 and "| sac | 4 |" in bench.table([row]) and "| 25 % |" in bench.table([row])


def test_a_temperature_at_its_clip_is_said():
    runs = [
        run_of("sac, Adam 0.05", seed, 70, agent={"temperature": t})
        for seed, t in enumerate((148.4131622, 148.4131622, 0.02))
    ]
    assert "at its clip in 2 of 3" in bench.table(bench.pooled(runs))
