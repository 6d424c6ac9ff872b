"""Old against new: turns, ratios and verdicts by hand, and one real run of this tree against
itself."""

from __future__ import annotations

import json

import pytest
from golden.make_benchmarks import TINY

from benchmarks import revisions
from benchmarks.peers.protocol import ROOT


class Recorded:
    """A worker that takes the seconds it is told."""

    def __init__(self, side, seconds, order):
        self.side, self.seconds, self.order = side, iter(seconds), order

    def round(self, index):
        self.order.append((self.side, index))
        return next(self.seconds)


def test_turns_alternate_and_a_pair_is_the_best_of_its_rounds():
    order = []
    workers = {
        "new": Recorded("new", [3.0, 1.0, 5.0, 6.0], order),
        "old": Recorded("old", [2.0, 4.0, 9.0, 8.0], order),
    }
    pairs = revisions.time_pairs(workers, pairs=2, best_of=2)
    assert pairs == [{"new": 1.0, "old": 2.0}, {"new": 5.0, "old": 8.0}]
    sides, rounds = zip(*order, strict=True)
    assert sides == ("new", "old", "old", "new") * 2 and rounds == (0, 0, 1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize(
    "new, verdict",
    [
        ([3.0, 2.2, 2.1, 4.0, 2.4], "slower"),
        ([1.0, 1.9, 1.8, 1.5, 0.5], "faster"),
        ([2.1] * 4 + [1.9], "no difference seen"),
    ],
)
def test_the_verdict_asks_for_the_whole_interval(new, verdict):
    said = revisions.compare([{"new": seconds, "old": 2.0} for seconds in new])
    assert said["verdict"] == verdict and said["coverage"] == pytest.approx(0.9375)
    assert (
        said["ratios"] == [seconds / 2 for seconds in new] and said["median"] == sorted(new)[2] / 2
    )
    assert (said["low"], said["high"]) == (min(new) / 2, max(new) / 2)
    assert said["best_s"] == {"new": min(new), "old": 2.0} and said["ratio_of_best"] == min(new) / 2


def test_this_tree_against_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDJAX_SIM_CHUNK", "1")
    monkeypatch.setenv("FEDJAX_SIM_DEVICES", "1")
    file = tmp_path / "out.json"
    argv = [
        "--old",
        str(ROOT),
        "--workloads",
        TINY.to_json(),
        "--pairs",
        "2",
        "--best-of",
        "1",
        "--json",
        str(file),
    ]
    assert revisions.main([*argv, "--logs", str(tmp_path / "logs")]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["workload"] == "tiny" and len(row["ratios"]) == 2 and min(row["ratios"]) > 0
    assert row["versions"]["new"] == row["versions"]["old"] and "jax" in row["versions"]["new"]
    assert min(row["peak_rss_mb"].values()) > 10 and min(row["compile_s"].values()) > 0
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"new-tiny.log", "old-tiny.log"}
    printed = capsys.readouterr().out
    assert (
        f"{row['median']:.3f} [{row['low']:.3f}, {row['high']:.3f}; 50 %, 2 pairs]" in printed
        and row["verdict"] in printed
    )


def test_each_side_runs_in_its_own_tree(tmp_path, capsys):
    """A tree whose peer cannot start: its own words come back, and the run says which side it
    was."""
    for name, text in (
        ("benchmarks/__init__.py", ""),
        ("benchmarks/peers/__init__.py", ""),
        ("benchmarks/peers/ours.py", ""),
        ("benchmarks/peers/launch.py", 'print(\'{"error": "this tree speaks"}\', flush=True)'),
        ("fedjax_sim/__init__.py", ""),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    argv = ["--old", str(tmp_path), "--new", str(tmp_path), "--workloads", TINY.to_json()]
    assert revisions.main(argv) == 1
    assert "not measured: new: this tree speaks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--old", "/nowhere"],
            "--old: '/nowhere' is not a checkout with benchmarks/peers/ours.py",
        ),
        (["--old", str(ROOT), "--workloads", "W1,W9"], "unknown workload 'W9'; allowed: W1, W2"),
        (["--old", str(ROOT), "--pairs", "0"], "--pairs 0 must be at least 1"),
        (["--old", str(ROOT), "--best-of", "-1"], "--best-of -1 must be at least 1"),
        (
            ["--old", str(ROOT), "--old-python", "/nowhere/python"],
            "'/nowhere/python' is not an executable Python",
        ),
    ],
)
def test_mistakes_are_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        revisions.main(argv)
    assert message in capsys.readouterr().err


def test_a_tree_hidden_by_an_installed_package_is_refused(tmp_path):
    """Without a fedjax_sim of its own, Python would take the installed one."""
    (tmp_path / "benchmarks" / "peers").mkdir(parents=True)
    (tmp_path / "benchmarks" / "peers" / "ours.py").write_text("")
    assert "imports fedjax_sim from" in revisions.tree_problem(
        tmp_path.resolve(), revisions.sys.executable
    )
