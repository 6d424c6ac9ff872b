"""Runs that differ in a number alone: one executable in a process, one cache entry over processes,
or side by side."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tiny
from commands import empty_folder, refused
from paths import ROOT
from test_runner import ONE, table

import fedjax_sim as fs
from fedjax_sim.cli.main import main
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.runner.many import run_values

__all__ = ["empty_folder"]  # used by every test
SMALL = dict(rounds=3, eval_every=2, epochs=1.0, participation="0.5") | {
    k: v for k, v in ONE.items() if k != "lr"
}
TINY = ["--model", "mlp", "--clients", "4", "--epochs", "1", "--quiet"]


def setup_of(method: str = "fedprox", **more):
    return fs.prepare(fs.Experiment.of(method, **{**SMALL, **more}), fed=tiny.federation())


def assert_same_rows(a: list[dict], b: list[dict]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        assert all(x[k] == pytest.approx(y[k], abs=1e-5, nan_ok=True) for k in x)


# ---- one program ---------------------------------------------------------------------------------
def test_runs_that_differ_in_numbers_share_the_executable():
    one, other = (
        fs.run("fedprox", tiny.federation(), lr=lr, mu=lr, momentum=1 - lr, **SMALL)
        for lr in (0.1, 0.2)
    )
    assert one.program is other.program
    assert not tiny.same_bits(one.state.server, other.state.server)
    wider = fs.run("fedprox", tiny.federation(), **{**SMALL, "epochs": 2.0})
    assert wider.program is not one.program


def test_another_process_finds_every_program_in_the_cache(tmp_path):
    """After the second value the cache holds what it held after the first."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    seen = []
    for i, (lr, mu) in enumerate([("0.02", "0.01"), ("0.05", "0.3")]):
        argv = ["run", "fedprox", *TINY, "--rounds", "1", "--devices", "1", "--lr", lr]
        argv += [
            "--set",
            "model.hidden=8",
            "--set",
            f"fedprox.mu={mu}",
            "--out",
            str(tmp_path / str(i)),
        ]
        subprocess.run(
            [sys.executable, "-m", "fedjax_sim", *argv],
            env=env,
            check=True,
            cwd=tmp_path,
            capture_output=True,
        )
        seen.append({path.name for path in (tmp_path / "xla").glob("*-cache")})
    assert seen[0] and seen[0] == seen[1]


# ---- side by side --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "name", "values"),
    [
        ("fedprox", "mu", [0, 1.0]),
        ("fedpolicy", "agent.lr", [0.001, 0.1]),
        ("fedavg_ft", "lr", [0.02, 0.1]),  # fine-tuned at evaluation, at the rate of its own
        # an agent and peers; clients train before round 1
        pytest.param("pfedrlla", "lr", [0.02, 0.1], marks=pytest.mark.slow),
    ],
)
def test_values_side_by_side_are_separate_runs(tmp_path, method, name, values):
    quick = {
        "pfedrlla": dict(side=4, embedding=6, random_rounds=1, every=1),
        "fedpolicy": {"agent.batch": 2},
    }
    small = quick.get(method, {})
    results = run_values(setup_of(method, options=small), name, values, tmp_path / "all")
    for value, result in zip(values, results, strict=True):
        alone = fs.run(
            method, tiny.federation(), out=tmp_path / f"{value}", **SMALL, **small, **{name: value}
        )
        assert result.out == tmp_path / "all" / f"{name}={value}"
        tiny.assert_close(result.state, alone.state, 1e-5)
        assert_same_rows(result.rows, alone.rows)
        files = lambda run: sorted(
            p.name for folder in (".", "checkpoints") for p in (run.out / folder).iterdir()
        )
        assert files(result) == files(alone)
        config = lambda run: flat_config(json.loads((run.out / "config.json").read_text()))
        assert config(result) == config(alone)
    assert not tiny.same_bits(results[0].state, results[1].state)


def test_each_value_goes_on_alone(tmp_path):
    run_values(setup_of(), "momentum", [0.5, 0.9], tmp_path)
    longer = fs.resume(tmp_path / "momentum=0.5", 5, fed=tiny.federation())
    whole = fs.run("fedprox", tiny.federation(), **{**SMALL, "rounds": 5}, momentum=0.5)
    tiny.assert_close(longer.state, whole.state, 1e-5)
    assert [row["round"] for row in table(tmp_path / "momentum=0.5" / "rounds.csv")] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]


@pytest.mark.parametrize(
    ("name", "values", "more", "sentence"),
    [
        (
            "epochs",
            [1, 2],
            {},
            "unknown setting for values side by side 'epochs'; allowed: .*lr.*momentum.*mu",
        ),
        ("mu", ["big", 1], {}, "fedprox.mu 'big' is not a number"),
        ("lr", [-1, 1], {}, "lr -1.0 is too small"),
        ("momentum", [0, 0.9], {}, "momentum 0 needs another program than the other values"),
        ("lr", [0.1, "0.10"], {}, "lr=0.1,0.10 does not name two or more different values"),
        ("lr", [0.1, 0.2], dict(devices="2"), "--vmap runs on one device, not 2"),
        ("lr", [0.1, 0.2], dict(state_on="host"), "state-on host is not possible with --vmap"),
        ("lr", [0.1, 0.2], dict(backend="loop"), "backend loop is not possible with --vmap"),
    ],
)
def test_refused(name, values, more, sentence):
    with pytest.raises(fs.UserError, match=sentence):
        run_values(setup_of(**more), name, values)


COMMAND = ["run", "fedprox", *TINY, "--rounds", "2"]


def test_the_command(capsys):
    assert main([*COMMAND, "--vmap", "weight-decay=0.001,0.1", "--seeds", "2", "--out", "o"]) == 0
    paths = [f"o/seed-{s}/weight-decay={v}" for s in (0, 1) for v in ("0.001", "0.1")]
    printed = capsys.readouterr().out
    assert (
        f"run directories: {', '.join(paths)}" in printed
        and "fedprox weight-decay=0.1 seed 1" in printed
    )
    finals = [np.load(next(pathlib.Path(p).glob("clients.npz")))["personal_correct"] for p in paths]
    assert len({a.tobytes() for a in finals}) > 1
    config = flat_config(json.loads(pathlib.Path(paths[3], "config.json").read_text()))
    assert (config["weight_decay"], config["seed"]) == (0.1, 1)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--vmap", "lr"], "--vmap 'lr' cannot be read; use NAME=VALUE,VALUE"),
        (["--vmap", "batch_size=1,2"], "unknown setting for values side by side 'batch_size'"),
        (["--vmap", "lr=1,2", "--devices", "2"], "--vmap runs on one device, not 2"),
        (
            ["--vmap", "lr=1,2", "--seeds", "2", "--seeds-mode", "vmap"],
            "--seeds-mode vmap does not go with --vmap",
        ),
    ],
)
def test_the_command_refuses(argv, sentence, capsys):
    assert sentence in refused(capsys, *COMMAND, *argv)


def test_other_commands_do_not_know_it(capsys):
    assert "--vmap" in refused(capsys, "compare", "fedavg", "fedprox", "--vmap", "lr=1,2")


def test_numbers_of_a_loss_run_side_by_side():
    """Two values of an option of the local loss are one program, and each is the run by itself."""
    setup = setup_of("fedavg", loss="focal")
    both = run_values(setup, "loss.gamma", [1.0, 3.0])
    for gamma, result in zip((1.0, 3.0), both, strict=True):
        alone = fs.run(
            "fedavg",
            tiny.federation(),
            **{**SMALL, "loss": "focal", "loss_options": {"gamma": gamma}},
        )
        assert result.setup.experiment.training.loss_options == {"gamma": gamma}
        np.testing.assert_allclose(
            result.net["params"]["fc"]["kernel"], alone.net["params"]["fc"]["kernel"], atol=1e-5
        )
    assert not np.allclose(*(result.net["params"]["fc"]["kernel"] for result in both), atol=1e-5)


def test_numbers_of_a_transform_side_by_side(capsys, tmp_path):
    """--vmap clip.norm=…: each is the run of its value; --set and Python name the option
    alike."""
    more = ["--transform", "clip:1.0", "--transform", "topk:0.5"]
    assert main([*COMMAND, *more, "--vmap", "clip.norm=0.01,0.5", "--out", "o"]) == 0
    assert (
        main([*COMMAND, *more, "--set", "clip.norm=0.01", "--devices", "1", "--out", "alone"]) == 0
    )
    config = lambda folder: json.loads(pathlib.Path(folder, "config.json").read_text())
    assert table(pathlib.Path("o/clip.norm=0.01/metrics.csv")) != table(
        pathlib.Path("o/clip.norm=0.5/metrics.csv")
    )
    alone, mapped = config("alone"), config("o/clip.norm=0.01")
    assert (
        flat_config(mapped)["transforms"]
        == flat_config(alone)["transforms"]
        == ["clip:norm=0.01", "topk:0.5"]
    )
    assert mapped["config_hash"] == alone["config_hash"]
    rows = [
        table(pathlib.Path(folder, "metrics.csv"))[-1] for folder in ("o/clip.norm=0.01", "alone")
    ]
    assert float(rows[0]["global_loss"]) == pytest.approx(float(rows[1]["global_loss"]), rel=1e-5)
    said = refused(capsys, *COMMAND, "--transform", "clip", "--vmap", "clip.nrm=1,2")
    assert "unknown setting for values side by side 'clip.nrm' (did you mean 'clip.norm'?)" in said
    said = refused(
        capsys, *COMMAND, "--transform", "clip", "--transform", "clip", "--set", "clip.norm=1"
    )
    assert "'clip' is there 2 times" in said
    assert "'topk' is there 0 times" in refused(
        capsys, *COMMAND, "--transform", "clip", "--set", "topk.share=1"
    )


def test_options_of_a_transform_from_python():
    setup = fs.api.set_up("fedavg", None, model="mlp", transforms=["clip"], **{"clip.norm": 0.5})
    assert setup.experiment.method.transforms == ("clip:norm=0.5",)
    with pytest.raises(fs.UserError, match="'clip' is there 0 times"):
        fs.api.set_up("fedavg", None, model="mlp", **{"clip.norm": 0.5})
