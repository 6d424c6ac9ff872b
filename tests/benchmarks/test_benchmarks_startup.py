"""benchmarks.startup: parts add up, and one start in this process."""

import json

import pytest

from benchmarks import startup


def test_a_part_inside_another_is_counted_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(startup.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(startup.time, "time", lambda: float(next(now)))
    clock = startup.Clock()
    inner = lambda: clock.time("inner", lambda: None)  # one second each
    clock.time("outer", lambda: (inner(), inner()))
    assert clock.parts == {"inner": [0.0, 2.0], "outer": [0.0, 3.0]}  # five seconds in all


def test_one_start_has_every_part():
    settings = dict(method="fedavg", model="mlp", clients=4, rounds=5, epochs=1.0, devices="1")
    row = startup.start(settings, check_weights=True)
    assert set(row["parts"]) == set(startup.PARTS) and all(
        s >= 0 for pair in row["parts"].values() for s in pair
    )
    assert (
        row["hlo_lines"] > row["fusions"] > 0
        and row["programs"] > 0
        and row["same"] in (True, False)
    )
    assert startup.total(row, 1) > row["parts"]["compile"][1] > 0
    text = startup.table(
        [dict(method="fedavg", model="mlp", cache="cold", **json.loads(json.dumps(row)))]
    )
    assert "fedavg mlp cold" in text and all(part in text for part in startup.PARTS)


@pytest.mark.parametrize(
    "arguments", [["--methods", "fedagv"], ["--models", "lenet6"], ["--repeat", "0"]]
)
def test_wrong_names_are_one_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        startup.main(arguments)
    assert error.value.code == 2 and arguments[1] in capsys.readouterr().err
