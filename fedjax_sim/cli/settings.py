"""From parsed options to settings of an experiment and a directory."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from fedjax_sim.cli.parser import OF_A_RUN
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.given import layered, scoped
from fedjax_sim.experiment.tree import SETTINGS
from fedjax_sim.methods import METHODS
from fedjax_sim.options import shown
from fedjax_sim.presets import preset

AGENT_ROUNDS = 600  # default of `train`
ROUNDS_ACROSS = 50  # default of `train --over`
# settings of a preset that these commands ignore
NOT_FOR = {"profile": OF_A_RUN, "train": ("rounds",)}


def read_sets(sets: list[str], example: str, dotted: bool = True) -> dict[str, str]:
    """{name: value} of --set NAME=VALUE, or if dotted NAME.OPTION=VALUE."""
    out = {}
    for item in sets:
        name, equals, value = item.partition("=")
        owner, dot, option = name.partition(".")
        if not (equals and owner and value and (option or not (dot or dotted))):
            form = "NAME.OPTION=VALUE" if dotted else "NAME=VALUE"
            raise UserError(f"--set '{shown(item)}' cannot be read; use {form}, e.g. {example}")
        out[name] = value
    return out


def settings_of(args: argparse.Namespace, *methods: str) -> dict[str, Any]:
    """The settings of runs of `methods`: the preset's, overridden by those on the command line."""
    missing = object()
    typed = {key: getattr(args, key, missing) for key in SETTINGS if key != "method"}
    typed = {key: value for key, value in typed.items() if value is not missing}
    typed |= read_sets(args.sets, "fedavg.weights=uniform")
    usual: dict[str, Any] = {}
    if args.command == "train":
        usual["rounds"] = ROUNDS_ACROSS if args.over else AGENT_ROUNDS
    if args.preset:
        chosen = preset(args.preset)
        left_out = NOT_FOR.get(args.command, ())
        for method in methods:
            mine = scoped(method, chosen.of(method))
            if len(methods) > 1:  # only settings of the run, which all methods share
                mine = {n: v for n, v in mine.items() if chosen.settings.get(n) == v}
            usual |= {n: v for n, v in mine.items() if n not in left_out}
    return layered(usual, typed)


def method_of(args: argparse.Namespace) -> str:
    """METHOD, or the method of the preset."""
    if args.method is None and not args.preset:
        raise UserError(
            f"{args.command} needs a METHOD or a --preset (see fedjax-sim {args.command} --help)"
        )
    method = args.method or preset(args.preset).method
    if args.method is None and method not in METHODS:
        raise UserError(
            f"preset '{args.preset}' is for the method '{method}', which is not part of this"
            " version"
        )
    lookup("method", method, METHODS)
    return method


def read_values(text: str) -> tuple[str, list[str]]:
    """NAME=VALUE,VALUE,… -> (name, values).

    >>> read_values("lr=0.01,0.03")
    ('lr', ['0.01', '0.03'])
    """
    name, equals, rest = text.partition("=")
    values = [part.strip() for part in rest.split(",")]
    if not (name and equals and all(values)):
        raise UserError(
            f"--vmap '{shown(text)}' cannot be read; use NAME=VALUE,VALUE, e.g. lr=0.01,0.03,0.1"
        )
    return name.strip(), values


def output_directory(
    args: argparse.Namespace, stem: str, experiment: Experiment, seeds: int = 1
) -> pathlib.Path:
    """--out, or a new name under runs/; an existing directory is refused unless it is empty or can
    be resumed."""
    from fedjax_sim.runner.files import exists  # imports NumPy, which the help must not wait for

    data = pathlib.Path(experiment.data.dataset.split(":")[0]).stem[:60]
    name = f"{stem}-{data}-s{experiment.training.seed}"
    out = as_path(args.out) if args.out else free_directory(name)
    if exists(out) and not args.dry_run and not resumable(args.command, seeds, out):
        one = args.command in ("run", "train")
        hint = f", or resume it with fedjax-sim resume {out}" if one else ""
        raise UserError(
            f"output directory '{shown(str(out))}' exists already; choose another --out{hint}"
        )
    return out


def resumable(command: str, seeds: int, out: pathlib.Path) -> bool:
    """Whether the command may write into the existing `out`; that it holds the same run is checked
    later."""
    from fedjax_sim.report.comparison import is_comparison
    from fedjax_sim.runner import run_directory

    if command not in ("run", "train", "compare"):
        return False
    if command == "compare" or seeds > 1:
        return run_directory.empty(out) or (
            not (out / run_directory.CONFIG).exists() and is_comparison(out)
        )
    return run_directory.empty(out) or run_directory.unfinished(out)


def free_directory(stem: str) -> pathlib.Path:
    root = pathlib.Path("runs")
    for i in range(1, 100_000):
        path = root / f"{stem}-{i:03d}"
        if not path.exists():
            return path
    raise UserError(f"no free directory name for '{stem}' under runs/")


def as_path(text: str) -> pathlib.Path:
    """A path from the command line, with ~ and ~user expanded."""
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"'{shown(text)}' is not a path: there is no such user") from None
