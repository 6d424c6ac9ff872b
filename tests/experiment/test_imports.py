"""`--import FILE.py`: own methods, models, agents and datasets by name in every command."""

from __future__ import annotations

import json
import pathlib

import pytest
from commands import SMALL, empty_folder, refused
from paths import ROOT

from fedjax_sim.cli.main import main
from fedjax_sim.experiment.tree import flat_config

__all__ = ["empty_folder"]  # used by every test
FILE = '''
"""Everything of one's own."""
import numpy as np
import agents
import fedjax_sim as fs
from helper import SIDE


@fs.register("my_prox")
class MyProx(fs.FedProx):
    """FedProx with another default."""

    mu: fs.Real = fs.field(0.5, ge=0)


def tiny_net(shape, classes, *, dtype, conv, width: int = 5):
    """One hidden layer."""
    return fs.build("mlp", shape, classes, dtype=dtype, conv=conv, hidden=(width,))


def stripes():
    """Images whose mean is their label."""
    y = np.arange(240) % 3
    x = (80 * y[:, None, None, None] + np.zeros((1, SIDE, SIDE, 1))).astype(np.uint8)
    return x[:180], y[:180], x[180:], y[180:]


class Lazy(agents.Uniform):
    """Chooses at random."""

    lr: fs.Real = 0.1


fs.register_model("tiny_net", tiny_net)
fs.register_dataset("stripes", stripes)
fs.register_agent("lazy", Lazy)
'''


@pytest.fixture
def own(tmp_path):
    """The file; what it registers is forgotten afterwards."""
    from agents import registry
    from fedjax_sim.data.sources import DATASETS
    from fedjax_sim.methods import _KINDS, METHODS
    from fedjax_sim.models import MODELS, REGISTRY

    tables = (METHODS, _KINDS, MODELS, REGISTRY, DATASETS, registry.ENTRIES, registry.DESCRIPTIONS)
    before = [dict(table) for table in tables]
    (tmp_path / "helper.py").write_text("SIDE = 6\n")
    file = tmp_path / "custom.py"
    file.write_text(FILE)
    yield str(file)
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


SETTINGS = [
    "--dataset",
    "stripes",
    "--model",
    "tiny_net",
    "--set",
    "model.width=4",
    "--clients",
    "4",
    "--epochs",
    "1",
    "--devices",
    "1",
    "--chunk",
    "1",
    "--quiet",
    "--rounds",
    "2",
]


def test_user_code_by_name_in_every_command(own, capsys, tmp_path):
    for what, name in (
        ("methods", "my_prox"),
        ("models", "tiny_net"),
        ("datasets", "stripes"),
        ("agents", "lazy"),
    ):
        assert main(["list", what, "--import", own]) == 0
        line = next(
            text for text in capsys.readouterr().out.splitlines() if text.split()[:1] == [name]
        )
        assert len(line.split()) > 1  # with the first line of what is written about it
    assert (
        main(
            [
                "compare",
                "my_prox:mu=0.1",
                "fedpolicy:agent=lazy,agent.lr=0.2",
                *SETTINGS,
                "--dry-run",
                "--import",
                own,
            ]
        )
        == 0
    )
    assert "tiny_net" in capsys.readouterr().out
    assert (
        main(
            [
                "run",
                "my_prox",
                *SETTINGS,
                "--set",
                "my_prox.mu=0.25",
                "--out",
                "out",
                "--import",
                own,
            ]
        )
        == 0
    )
    config = flat_config(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert (config["method"], config["dataset"], config["model"]) == (
        "my_prox",
        "stripes",
        "tiny_net",
    )
    assert (
        json.loads((tmp_path / "out" / "summary.json").read_text())["client_acc_mean"] is not None
    )
    assert main(["resume", "out", "--rounds", "3", "--quiet", "--import", own]) == 0
    toml = pathlib.Path("grid.toml")
    toml.write_text(
        'methods = ["my_prox"]\n[grid]\nmu = [0.1, 1]\n[settings]\ndataset = "stripes"\nmodel ='
        ' "tiny_net"\n'
    )
    capsys.readouterr()
    assert main(["sweep", str(toml), "--dry-run", "--import", own]) == 0
    said = capsys.readouterr().out
    assert "my_prox-mu0.1-s0" in said and "my_prox-mu1-s0" in said


def test_without_the_file_the_names_are_unknown(own, capsys, tmp_path):
    from fedjax_sim.sweeps.folder import Folder
    from fedjax_sim.sweeps.queue import command

    assert "unknown method 'my_prox'" in refused(capsys, "run", "my_prox", *SMALL)
    argv = command(Folder(tmp_path / "s"), imports=["/a/custom.py", own])
    assert argv[-5:] == ["--import", "/a/custom.py", "--import", own, "--task"]
    assert str(tmp_path / "s" / "sweep.json") in argv  # whole paths: a task may start elsewhere


@pytest.mark.parametrize(
    "text, sentence",
    [
        (None, "there is no such file"),
        (
            "import nothing_like_that",
            "line 1: ModuleNotFoundError: No module named 'nothing_like_that'",
        ),
        ("x = 1\ny = x / 0", "line 2: ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("from fedjax_sim.errors import UserError\nraise UserError('mine')", "fedjax-sim: mine"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(capsys, text, sentence):
    if text is not None:
        pathlib.Path("bad.py").write_text(text)
    assert sentence in refused(capsys, "list", "methods", "--import", "bad.py")


def test_what_user_builders_return_is_checked(own, capsys):
    pathlib.Path("wrong.py").write_text(
        "import fedjax_sim as fs\nfs.register_dataset('stripes', lambda: 3)\n"
        "fs.register_model('tiny_net', lambda shape, classes, *, dtype, conv: 3)\n"
    )
    assert "must be made as (x_train" in refused(
        capsys, "run", "fedavg", "--dataset", "stripes", "--import", "wrong.py"
    )
    assert "returned int, not a Model" in refused(
        capsys, "run", "fedavg", "--model", "tiny_net", "--import", "wrong.py"
    )


def test_the_example_is_such_a_file(own, capsys):
    example = str(ROOT / "examples" / "custom.py")
    options = [
        "--dataset",
        "stripes",
        "--model",
        "narrow",
        "--set",
        "model.width=8",
        "--dry-run",
        "--import",
        example,
    ]
    assert main(["compare", "gentle:mu=1", "fedpolicy:agent=coin", *options]) == 0
    assert "model narrow" in capsys.readouterr().out
