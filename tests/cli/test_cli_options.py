"""Every option of every command is honoured or refused; none is accepted and then ignored."""

from __future__ import annotations

import argparse
import ast
import json
import pathlib

import pytest
from commands import SMALL, empty_folder, refused

from fedjax_sim.cli import parser as parsers
from fedjax_sim.cli.commands import COMMANDS
from fedjax_sim.cli.main import main
from fedjax_sim.experiment.tree import SETTINGS

__all__ = ["empty_folder"]  # used by every test

PACKAGE = pathlib.Path(parsers.__file__).parents[1]
PARSER = parsers.make_parser()
SUBS = next(a.choices for a in PARSER._actions if isinstance(a.choices, dict))
TINY = [*(word for word in SMALL if word != "--quiet"), "--rounds", "2"]
GRID = """methods = ["fedavg"]
[settings]
model = "mlp"
"model.hidden" = [8]
clients = 6
rounds = 2
"""


class Watched(argparse.Namespace):
    """Remembers what a command asked for."""

    def __getattribute__(self, name):
        if not name.startswith("_"):
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return object.__getattribute__(self, name)


def read_by(argv: list[str]) -> set[str]:
    """The options that a command looks at on its way, from its own start: what parsing itself does
    not count."""
    plain = parsers.make_parser().parse_args(argv)
    args = Watched(**vars(plain), argv=argv)
    vars(args).pop("_read", None)
    COMMANDS[plain.command](args)
    return vars(args).get("_read", set())


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A finished run and a sweep file to try the commands on."""
    folder = tmp_path_factory.mktemp("options")
    assert main(["run", "fedavg", *TINY, "--out", str(folder / "run")]) == 0
    (folder / "grid.toml").write_text(GRID)
    return folder


def commands(work: pathlib.Path) -> dict[str, list[list[str]]]:
    """For every command what together looks at all of its options."""
    run, grid = str(work / "run"), str(work / "grid.toml")
    both = lambda *argv: [
        [*argv, *TINY, "--out", str(work / f"own-{argv[0]}")],
        [*argv, *TINY, "--dry-run"],
    ]
    cell = [
        "paper",
        "run",
        "qbandit:T2",
        "--scale",
        "smoke",
        "--rows",
        "baseline+joint+comm",
        "--cols",
        "c10a1",
    ]
    return {
        "run": both("run", "fedavg"),
        "compare": both("compare", "fedavg", "local"),
        "train": [["train", "pfedrlla", *TINY, "--protocol", "pfedrlla", "--dry-run"]],
        "profile": [
            ["profile", "fedavg", *TINY, "--dry-run"],
            ["profile", "fedavg", *TINY, "--out", str(work / "p")],
        ],
        "sweep": [
            ["sweep", grid, "--out", str(work / "grid")],
            ["sweep", grid, "--out", str(work / "grid"), "--task", "0"],
        ],
        "resume": [["resume", run]],
        "report": [["report", run]],
        "paper": [
            ["paper", "list"],
            [*cell, "--dry-run"],
            [*cell, "--rounds", "1", "--out", str(work / "papers")],
        ],
        "export": [["export", run]],
        "list": [["list", "losses"]],
    }


# read before a command starts (`main`), or, for train's dry run, by what `run` does after it
ELSEWHERE = {"command", "imports"}
LATER = {"train": {"json", "log", "quiet", "seeds_mode"}}


def nested(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A command and its own commands."""
    inside = [
        sub
        for a in parser._actions
        if isinstance(a, argparse._SubParsersAction)
        for sub in a.choices.values()
    ]
    return [parser, *inside]


def test_commands_are_all_tried():
    assert set(commands(pathlib.Path())) == set(SUBS) == set(COMMANDS)


@pytest.mark.parametrize("command", sorted(SUBS))
def test_every_option_is_looked_at(command, work, capsys):
    asked: set[str] = set()
    for argv in commands(work)[command]:
        asked |= read_by(argv)
    offered = {a.dest for parser in nested(SUBS[command]) for a in parser._actions} - {"help"}
    assert offered - asked - ELSEWHERE - LATER.get(command, set()) == set()


def test_every_setting_of_a_run_is_used_by_somebody():
    """A field of an Experiment that no module asks for would be an option without effect."""
    read: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name not in ("cli", "experiment"):
            tree = ast.parse(file.read_text())
            read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            read |= {
                n.value
                for n in ast.walk(tree)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
    assert {name for _, name, _, _ in SETTINGS.values()} - read == set()


REFUSED = [
    (
        ["profile", "fedavg", "--seeds", "2"],
        "'--seeds' is not an option of fedjax-sim profile (did you mean '--seed'?)",
    ),
    (["profile", "fedavg", "--quiet"], "'--quiet' is not an option of fedjax-sim profile"),
    (["profile", "fedavg", "--keep=2"], "'--keep' is not an option of fedjax-sim profile"),
    (["run", "fedavg", "--partipation", "1"], "did you mean '--participation'?"),
    (["run", "fedavg", "--num-processes", "2"], "need --coordinator"),
    (
        ["run", "fedavg", "--coordinator", "auto", "--num-processes", "2"],
        "leave --num-processes and --process-id out",
    ),
    (
        ["run", "fedavg", *TINY, "--dry-run", "--labels", "a.bmp"],
        "unknown ending of a figure's file '.bmp'",
    ),
    (["sweep", "grid.toml", "--slurm", "-c 4"], "it needs --launcher slurm"),
    (["sweep", "grid.toml", "--gather", "--workers", "2"], "--workers has no meaning beside it"),
    (["sweep", "grid.toml", "--task", "1", "--dry-run"], "--dry-run has no meaning beside it"),
    (
        ["sweep", "grid.toml", "--dry-run", "--launcher", "ray"],
        "--launcher has no meaning beside it",
    ),
    (["sweep", "grid.toml", "--log", "nowhere"], "unknown log 'nowhere'"),
]


@pytest.mark.parametrize("argv, sentence", REFUSED, ids=[" ".join(w[:4]) for w, _ in REFUSED])
def test_what_would_say_nothing_is_refused(argv, sentence, capsys):
    assert sentence in refused(capsys, *argv)


def test_a_dry_run_tells_who_has_which_data(capsys, tmp_path):
    assert (
        main(["run", "fedavg", *TINY, "--dry-run", "--labels", str(tmp_path / "labels.png")]) == 0
    )
    assert "label skew" in capsys.readouterr().out
    assert (tmp_path / "labels.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", "fedavg", "local", *TINY, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("label skew") == 1  # the same data are described once
    assert main(["compare", "fedavg", "local", *TINY, "--dry-run", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(t["event"], t["method"]) for t in events] == [
        ("dry-run", "fedavg"),
        ("dry-run", "local"),
    ]
    assert events[0]["parameters"] > 0


def test_profile_leaves_out_what_a_preset_says_of_runs(capsys):
    argv = [
        "--preset",
        "fedpolicy-fmnist",
        "--dataset",
        "digits",
        "--model",
        "mlp",
        "--clients",
        "10",
        "--dry-run",
    ]
    assert main(["profile", *argv]) == 0
    assert "fedpolicy on digits" in capsys.readouterr().out
