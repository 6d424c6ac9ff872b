"""benchmarks.sweep_values: what is compared with what, and one measurement."""

import types

import pytest

from benchmarks import sweep_values


def test_ratios_are_of_the_same_work():
    after = types.SimpleNamespace(compile_s=10.0, best=1.0)
    beside = types.SimpleNamespace(compile_s=20.0, best=2.0)
    found = sweep_values.ratios(4, 5, after, beside)
    assert found["anew"] == pytest.approx(4 * (10 + 5) / (10 + 4 * 5))
    assert found["beside"] == pytest.approx((20 + 5 * 2) / (10 + 4 * 5))
    assert found["round"] == 0.5


def test_one_measurement(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    argv = [
        "--networks",
        "mlp",
        "--values",
        "2",
        "--repeat",
        "1",
        "--json",
        str(tmp_path / "v.json"),
    ]
    assert sweep_values.main(argv) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert (
        row.split()[:3] == ["mlp", "2", "30"] and row.endswith(("pay", "pays")) and "beside" in head
    )
    assert (tmp_path / "v.json").read_text().count("round_beside_s") == 1
