"""What the command line says about results and failures: divergence, replaced options, targets,
gains, expected failures."""

from __future__ import annotations

import json
import re

import pytest
from commands import SMALL, empty_folder, refused

from fedjax_sim.cli.commands import COMMANDS
from fedjax_sim.cli.main import main
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.tree import SETTINGS, flat_config
from fedjax_sim.methods import METHODS, make_method

__all__ = ["empty_folder"]  # used by every test
ALOUD = [word for word in SMALL if word != "--quiet"]


@pytest.mark.parametrize(
    "problem, sentence",
    [
        (PermissionError(13, "Permission denied", "runs/a"), "'runs/a': Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "there is not enough memory"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17 bytes"),
            "there is not enough memory",
        ),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte"), "a file cannot be read"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (EOFError(), "a file cannot be read: EOFError"),
        (OSError("two\nlines"), "two"),
    ],
)
def test_expected_failures_are_one_sentence(capsys, monkeypatch, problem, sentence):
    def fail(args):
        raise problem

    monkeypatch.setitem(COMMANDS, "list", fail)
    assert sentence in refused(capsys, "list")
    monkeypatch.setenv("FEDJAX_SIM_TRACEBACK", "1")
    with pytest.raises(type(problem)):
        main(["list"])


@pytest.mark.parametrize(
    "problem", [KeyError("a"), RuntimeError("a mistake"), ValueError("a mistake")]
)
def test_mistakes_of_the_program_keep_their_traceback(monkeypatch, problem):
    def fail(args):
        raise problem

    monkeypatch.setitem(COMMANDS, "list", fail)
    with pytest.raises(type(problem)):
        main(["list"])


def test_replaced_options_are_said(capsys):
    assert main(["compare", "fedavg", "scaffold", *SMALL, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "scaffold replaces momentum 0.9 by 0: it would invalidate" in out
        and "fedavg replaces" not in out
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_declare_options_that_they_know(method):
    """What a method says it replaces are settings of a run; the ones that take their own plain
    steps say so."""
    replaced = dict(make_method(method).replaces)
    assert set(replaced) <= set(SETTINGS) and all(replaced.values())
    expected = {
        "scaffold": {"momentum"},
        "pfedme": {"momentum", "weight_decay"},
        "qbandit": {"epochs"},
    }
    assert set(replaced) == expected.get(method, set(replaced)) and (
        method != "fedavg" or not replaced
    )


def test_a_diverging_comparison_says_so(capsys, tmp_path):
    """--lr 1e9: who diverged, when, and what it means; training accuracy by its name; gains and
    targets stored."""
    options = [
        "--rounds",
        "2",
        "--lr",
        "1e9",
        "--protocol",
        "fedpolicy",
        "--val-fraction",
        "0",
        "--out",
        "out",
    ]
    assert main(["compare", "fedavg", "scaffold", *SMALL, *options]) == 0
    out = capsys.readouterr().out
    first = json.loads((tmp_path / "out" / "fedavg" / "summary.json").read_text())
    second = json.loads((tmp_path / "out" / "scaffold" / "summary.json").read_text())
    assert (
        first["diverged"] > 0
        and first["diverged_first"]["round"] >= 1
        and first["diverged_first"]["client"] >= 0
    )
    assert (
        f"fedavg: {first['diverged']} client updates ({100 * first['diverged_share']:.1f} %)"
        " diverged" in out
    )
    assert (
        f"first that of client {first['diverged_first']['client']} in round"
        f" {first['diverged_first']['round']}" in out
    )
    assert first["rounds_without_upload"] > 0 and "nothing was uploaded in" in out
    stored = json.loads((tmp_path / "out" / "scaffold" / "config.json").read_text())
    assert (
        flat_config(stored)["momentum"] == 0.9
        and stored["resolved"]["replaces"] == second["replaces"]
    )
    assert (
        second["replaces"] == {"momentum": "0: it would invalidate the control variates"}
        and first["replaces"] == {}
    )
    assert first["client_split"] == "train" and "training accuracy" in first["client_acc_note"]
    assert (
        "client mean (train)" in out
        and "client_on_train_rows" in (tmp_path / "out/fedavg/metrics.csv").read_text()
    )
    for name in ("rounds_to", "comm_gb_to", "time_min_to", "convergence_round", "layer_dist"):
        assert name in first
    assert "peak memory of the process" in out and "process" in first["peak_rss_note"]
    assert set(json.loads((tmp_path / "out" / "compare.json").read_text())) == {
        "relative_gain",
        "differs",
        "runs",
        "statistics",
    }


def test_tables_of_targets_and_gains():
    from fedjax_sim.report import text as describe

    one = dict(
        method="a",
        best_global=0.6,
        rounds_to={"50": 3, "70": None},
        comm_gb_to={"50": 0.5, "70": None},
    )
    one |= dict(time_min_to={"50": 2.0, "70": None}, convergence_round=None)
    two = one | dict(
        method="b", best_global=0.5, rounds_to={"50": None, "70": None}, convergence_round=7
    )
    table = describe.targets_table([one, two]).splitlines()
    assert "50 %" in table[0] and "70 %" not in table[0]  # nobody got there
    assert "3 (0.5000 GB, 2:00 min)" in table[2] and table[3].split() == ["b", "×", "7"]
    assert describe.targets_table([two]) == ""
    assert describe.gains_line([one, two]) == "relative to the best other: a +20.00 %, b -16.67 %"
    assert describe.gains_line([one]) == ""


def test_the_estimated_peak_counts_runtime_and_program(capsys):
    assert main(["run", "fedavg", *SMALL, "--dry-run"]) == 0
    found = re.search(
        r"estimated peak memory: ([0-9.]+) GB \(runtime ([0-9.]+) MB, program ([0-9.]+) MB",
        capsys.readouterr().out,
    )
    peak, runtime, program = map(float, found.groups())
    peak *= 1000
    assert 380 < runtime < runtime + program < peak < 2000


@pytest.mark.parametrize(
    ("method", "model"), [("fedavg", "lenet5"), ("ditto", "cnn4"), ("fedavg", "mlp")]
)
def test_the_estimated_arrays_are_those_of_the_compiler(method, model):
    """State and data are the program's arguments; training a client is most of its scratch."""
    import jax.numpy as jnp
    import numpy as np

    from fedjax_sim.engine import layout as layouts
    from fedjax_sim.runner.facts import facts
    from fedjax_sim.runner.prepare import prepare

    setup = prepare(
        Experiment.of(method, model=model, clients=20, rounds=2, devices="1", chunk="1"),
        measure=False,
    )
    sim, estimated = setup.simulation, facts(setup)
    state, data = layouts.place(sim.layout, setup.first_state(), sim.data)
    analysis = sim.run.lower(state, data, jnp.int32(1), np.bool_(True)).compile().memory_analysis()
    if analysis is None:
        pytest.skip("the compiler says nothing about memory")
    assert estimated["state"] + estimated["data"] == pytest.approx(
        analysis.argument_size_in_bytes, rel=0.15
    )
    assert estimated["training"] == pytest.approx(
        analysis.temp_size_in_bytes, rel=0.2 if model != "mlp" else 1.5
    )


def test_an_interrupted_comparison_goes_on(capsys, tmp_path):
    """The same command again: what is finished is read, what was begun is resumed, what is missing
    is run."""
    import shutil

    out = tmp_path / "both"
    command = ["compare", "fedavg", "local", *SMALL, "--rounds", "2", "--quiet", "--out", str(out)]
    assert main(command) == 0
    first = json.loads((out / "compare.json").read_text())["runs"]
    shutil.rmtree(out / "local")
    rows = (out / "fedavg" / "metrics.csv").read_bytes()
    assert main(command) == 0
    again = json.loads((out / "compare.json").read_text())["runs"]
    assert [r["method"] for r in again] == ["fedavg", "local"]
    same = [r["client_acc_mean"] for r in first]
    # rows are kept to eight digits
    assert [r["client_acc_mean"] for r in again] == pytest.approx(same, rel=1e-6)
    assert (out / "fedavg" / "metrics.csv").read_bytes() == rows
    capsys.readouterr()
    assert "holds another configuration" in refused(capsys, *command, "--lr", "0.5")


def test_the_rarest_evaluation_is_the_last_round(tmp_path):
    """A huge --eval-every asks for no huge buffer: the logs of one call are bounded."""
    out = tmp_path / "rare"
    assert (
        main(
            [
                "run",
                "fedavg",
                *SMALL,
                "--rounds",
                "2",
                "--quiet",
                "--eval-every",
                "2147483647",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert [line.split(",")[0] for line in (out / "metrics.csv").read_text().splitlines()] == [
        "round",
        "2",
    ]


def test_client_figures_say_which_rows_they_stand_on(tmp_path, capsys):
    """Split and count beside every figure over clients: before a run, in its line, table, files and
    report."""
    from fedjax_sim.report import curves, tables
    from fedjax_sim.report.groups import grouped
    from fedjax_sim.report.runs import load_runs

    out = tmp_path / "local"
    assert main(["run", "local", *ALOUD, "--rounds", "1", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    summary = json.loads((out / "summary.json").read_text())
    rows = summary["client_rows"]
    text = f"{rows['least']} to {rows['most']} validation rows each"
    assert (
        rows["split"] == summary["client_split"] == "val"
        and 0 < rows["least"] < rows["mean"] < rows["most"]
    )
    assert (
        f"clients are scored on {text}" in captured.out
        and f"client figures: on {text}" in captured.out
    )
    # local has no global model
    assert "client mean (val)" in captured.out and "client mean accuracy (val)" in captured.err
    header, line = (row.split(",") for row in (out / "metrics.csv").read_text().splitlines())
    assert float(dict(zip(header, line, strict=True))["client_rows_least"]) == rows["least"]
    groups = grouped(load_runs([out]))
    assert f"client mean (%; {rows['least']}–{rows['most']} val rows)" in tables.markdown(groups)
    assert (
        curves.title_of("client_mean", groups)
        == f"clients, each with the model it predicts with, mean ({text})"
    )


def test_training_accuracy_is_never_without_its_name(tmp_path, capsys):
    out = tmp_path / "train"
    argv = [
        "--protocol",
        "fedpolicy",
        "--val-fraction",
        "0",
        "--evaluate",
        "global,personal,resident",
    ]
    assert main(["run", "local", *ALOUD, "--rounds", "1", *argv, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "client mean accuracy (train)" in captured.err and "client mean (train)" in captured.out
    assert "training rows each: training accuracies" in captured.out
    from fedjax_sim.report import curves
    from fedjax_sim.report.groups import grouped
    from fedjax_sim.report.runs import load_runs

    groups = grouped(load_runs([out]))
    assert all(
        "training rows" in curves.title_of(c, groups) for c in ("client_mean", "resident_mean")
    )
