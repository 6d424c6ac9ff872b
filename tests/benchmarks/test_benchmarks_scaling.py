"""The scaling and memory benchmarks: what they vary, and one small point of each in its own
process."""

import json

import numpy as np
import pytest

from benchmarks import memory, scaling
from benchmarks.workloads import label_counts


def test_axes_vary_one_thing():
    assert [p.cohort for p in scaling.points("cohort", "mlp", False)] == [10, 20, 50, 100, 200, 500]
    assert [(p.series, p.clients) for p in scaling.points("clients", "mlp", False)] == [
        ("fedavg", 100),
        ("fedavg", 1_000),
        ("fedavg", 10_000),
        ("ditto", 100),
        ("ditto", 300),
        ("ditto", 1_000),
    ]
    assert [p.chunk for p in scaling.points("chunk", "mlp", False)] == [1, 2, 4, 8, 16, 32, 64]
    assert [p.devices for p in scaling.points("devices", "mlp", False)] == [1, 2, 4, 8]
    assert all(
        p.model == "lenet5" for axis in scaling.AXES for p in scaling.points(axis, "lenet5", True)
    )


def test_skewed_clients_hold_the_same_pool():
    pools = [
        int(label_counts(scaling.workload_of(p)).sum())
        for p in scaling.points("skew", "mlp", False)
    ]
    assert set(pools) == {100 * 60}


def test_a_quick_run_writes_rows_and_figures(tmp_path, capsys):
    assert (
        scaling.main(
            [
                "--quick",
                "--axes",
                "skew",
                "--json",
                str(tmp_path / "s.json"),
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    written = json.loads((tmp_path / "s.json").read_text())
    equal, skewed = written["rows"]
    assert written["quick"] and written["machine"]["cores"] >= 1
    # 20 clients of 20 examples in batches of 10: two steps each, and equal clients waste nothing
    assert equal["steps_per_round"] == 40 and equal["executed_over_needed"] == 1
    assert (
        skewed["executed_over_needed"] > 1 and skewed["largest_client"] > skewed["smallest_client"]
    )
    for row in written["rows"]:
        assert row["s_per_round"] == min(row["s_per_round_all"]) > 0 and row["peak_rss_mb"] > 50
        np.testing.assert_allclose(row["rounds_per_s"] * row["s_per_round"], 1)
    assert (tmp_path / "scaling_skew.png").stat().st_size > 5_000
    assert "exec/need" in capsys.readouterr().out


def test_memory_of_a_small_stateful_federation(tmp_path):
    """300 resident models of 3072-64-10 (226 MB): the process grows by them once."""
    file = tmp_path / "m.json"
    assert (
        memory.main(["--cases", "b", "--model", "mlp", "--clients-b", "300", "--json", str(file)])
        == 0
    )
    row = json.loads(file.read_text())["rows"][0]
    assert row["state_mb"] == pytest.approx(
        301 * 4 * (3072 * 64 + 64 + 64 * 10 + 10) / 1e6, rel=1e-3
    )
    before, after = row["stages"]["baseline"], row["stages"]["init"]
    assert after["peak_mb"] - before["rss_mb"] < 1.3 * row["state_mb"] + 30
    assert (
        row["stages"]["rounds"]["peak_mb"] - row["stages"]["compiled"]["rss_mb"]
        < 0.3 * row["state_mb"]
    )
    assert row["compiled_temporary_mb"] < 0.1 * row["state_mb"]


def test_wrong_names_are_one_sentence(capsys):
    for main, arguments in ((scaling.main, ["--axes", "moon"]), (memory.main, ["--cases", "z"])):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "allowed:" in capsys.readouterr().err
