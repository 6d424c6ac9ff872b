"""Two processes on loopback with four fake devices each: the figures and models of one process with
eight devices."""

from __future__ import annotations

import csv
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest
from paths import ROOT
from tiny import close

from fedjax_sim.api import resume

LIMIT = 120  # seconds
OPTIONS = [
    "run",
    "scaffold",
    "--model",
    "mlp",
    "--set",
    "model.hidden=8",
    "--clients",
    "10",
    "--participation",
    "0.8",
    "--rounds",
    "4",
    "--eval-every",
    "2",
    "--checkpoint-every",
    "2",
    "--epochs",
    "1",
    "--chunk",
    "1",
    "--devices",
    "8",
    "--evaluate",
    "global,personal,resident",
    "--quiet",
]

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "FEDJAX_SIM_CACHE": jax.config.values["jax_compilation_cache_dir"],
}


def free_port() -> int:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]
    except OSError as problem:
        pytest.skip(f"no port can be bound on 127.0.0.1: {problem}")


def start(folder: pathlib.Path, *more: str) -> subprocess.Popen:
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "fedjax_sim", *OPTIONS, "--out", "run", *more],
        cwd=folder,
        text=True,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(processes: list[subprocess.Popen]) -> list[str]:
    """Their standard outputs; on failure or after LIMIT seconds all of them are ended."""
    limit, outputs = time.monotonic() + LIMIT, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1.0, limit - time.monotonic()))
            assert process.returncode == 0, err[-2000:]
            outputs.append(out)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return outputs


def table(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_processes_equal_one(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    pair = [
        start(
            tmp_path / f"p{i}",
            "--coordinator",
            address,
            "--num-processes",
            "2",
            "--process-id",
            str(i),
        )
        for i in range(2)
    ]
    first, second = finish(pair)
    finish([start(tmp_path / "alone")])
    # only process 0 speaks and writes
    assert "run directory" in first and all(
        line.startswith("[Gloo]") for line in second.splitlines()
    )
    assert list((tmp_path / "p1").iterdir()) == []
    assert {p.name for p in (tmp_path / "p0" / "run").iterdir()} >= {
        "config.json",
        "metrics.csv",
        "summary.json",
    }
    assert sorted(p.name for p in (tmp_path / "p0" / "run" / "checkpoints").iterdir()) == [
        "00000002",
        "00000004",
    ]
    for name in ("metrics.csv", "rounds.csv"):
        together, alone = (table(tmp_path / folder / "run" / name) for folder in ("p0", "alone"))
        assert len(together) == len(alone) == (2 if name == "metrics.csv" else 4)
        for a, b in zip(together, alone, strict=True):
            assert list(a) == list(b)
            assert all(
                float(a[k]) == pytest.approx(float(b[k]), rel=1e-5, abs=1e-5)
                for k in a
                if b[k] != ""
            )
    # the models themselves, global and per client, read back from what was written
    together, alone = (resume(tmp_path / folder / "run").state for folder in ("p0", "alone"))
    assert close((together.server, together.clients), (alone.server, alone.clients), 1e-5)
    # two processes go on, from the same directory
    address = f"127.0.0.1:{free_port()}"
    command = [
        "resume",
        str(tmp_path / "p0" / "run"),
        "--rounds",
        "5",
        "--quiet",
        "--coordinator",
        address,
    ]
    pair = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fedjax_sim",
                *command,
                "--num-processes",
                "2",
                "--process-id",
                str(i),
            ],
            cwd=tmp_path,
            text=True,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    first, second = finish(pair)
    assert "run directory" in first and "run directory" not in second
    assert [r["round"] for r in table(tmp_path / "p0" / "run" / "rounds.csv")] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]
    # what two processes wrote is an ordinary run directory: one process with the same devices goes
    # on
    more = subprocess.run(
        [sys.executable, "-m", "fedjax_sim", "resume", "run", "--rounds", "6", "--quiet"],
        cwd=tmp_path / "p0",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert more.returncode == 0, more.stderr[-2000:]
    assert [r["round"] for r in table(tmp_path / "p0" / "run" / "metrics.csv")] == ["2", "4", "6"]


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--num-processes", "2", "--process-id", "0"], "need --coordinator"),
        (["--coordinator", "127.0.0.1:1", "--num-processes", "2"], "cannot join the processes"),
    ],
)
def test_incomplete_addresses_are_one_sentence(tmp_path, options, sentence):
    process = start(tmp_path / "p", *options)
    try:
        _, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 2 and sentence in err and err.strip().count("\n") == 0
