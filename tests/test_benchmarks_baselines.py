"""The table of all methods on a small scale: pairs, options, and a method that cannot run is named."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import baselines


def test_table_of_methods(tmp_path, capsys):
    settings = "--dataset digits --examples 600 --clients 4 --partition dirichlet:1 --rounds 1 --seeds 1 --model mlp"
    assert (
        baselines.main(
            [*settings.split(), "--methods", "fedprox:mu=0.5,fedfa,fedpam", "--momentum", "0.8", "--out", str(tmp_path)]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "fedfa was not run" in err and "| `fedprox:mu=0.5` |" in out
    rows = {r["method"]: r for r in json.loads((tmp_path / "baselines.json").read_text())["rows"]}
    assert set(rows) == {"local", "fedavg", "fedprox:mu=0.5", "fedpam"}
    assert (rows["fedavg"]["lr"], rows["fedpam"]["lr"], rows["fedpam"]["momentum"]) == (0.02, 0.005, 0.8)  # its own, given
    assert rows["local"]["vs_local"] == 0 and rows["local"]["down"] == 0 and rows["fedavg"]["client_state"] == 0
    assert rows["fedavg"]["down"] == rows["fedavg"]["up"] == rows["local"]["client_state"] == 4 * 50_890


def test_interval_covers_the_mean():
    rng = np.random.default_rng(1)
    mean, low, high = baselines.interval(rng.random((3, 20)), rng.random((3, 20)))
    assert low < mean < high
