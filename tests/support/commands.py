"""Small runs by the command line, in an empty folder, and the sentence with which one is
refused."""

from __future__ import annotations

import pathlib

import pytest

from fedjax_sim.cli.main import main

SMALL = [
    "--model",
    "mlp",
    "--set",
    "model.hidden=8",
    "--clients",
    "6",
    "--participation",
    "0.5",
    "--epochs",
    "1",
    "--devices",
    "1",
    "--chunk",
    "1",
    "--quiet",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDJAX_SIM_DATA", raising=False)


def refused(capsys, *argv: str) -> str:
    """The one sentence with which a command line is refused."""
    assert main(list(argv)) == 2
    err = capsys.readouterr().err
    assert err.startswith("fedjax-sim: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
