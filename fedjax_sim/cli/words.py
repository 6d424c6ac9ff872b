"""Settings as data — an entry of `compare`, a point of a sweep, a preset — through the same parser
as the command line.

A name is an option of the run (`lr`, `batch_size`, `evaluate`), of the method (`mu`, `agent`,
`agent.lr`; for one method among several `fedprox.mu`), of the model (`model.hidden`) or of the loss
(`loss.gamma`).
"""

from __future__ import annotations

import argparse
import copy
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from fedjax_sim.cli.parser import Parser, add_options
from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.methods import METHODS, controlled, options_of
from fedjax_sim.options import shown
from fedjax_sim.transforms import TRANSFORMS

# of the whole command, never of one run among several
OF_THE_COMMAND = frozenset(
    {
        "out",
        "dry-run",
        "device",
        "quiet",
        "json",
        "seeds",
        "seeds-mode",
        "set",
        "preset",
        "import",
        "log",
    }
    | {"coordinator", "num-processes", "process-id"}
)
ONE_PROCESS = frozenset({"dtype"})  # of everything that a process computes


@functools.cache
def option_parser() -> Parser:
    parser = Parser(prog="fedjax-sim", add_help=False)
    add_options(parser)
    return parser


def run_options() -> dict[str, bool]:
    """Name of every option of a run, without dashes in front -> whether it is a switch without a
    value."""
    actions = option_parser()._option_string_actions
    return {
        flag[2:]: action.nargs == 0 for flag, action in actions.items() if flag.startswith("--")
    }


def read_entry(text: str) -> tuple[str, dict[str, str]]:
    """'METHOD:OPTION=VALUE,…' -> (method, settings).

    >>> read_entry("fedprox:mu=0.1,partition=dirichlet:0.1"), read_entry(
    ...     "fedavg:evaluate=global,personal"
    ... )[1]
    (('fedprox', {'mu': '0.1', 'partition': 'dirichlet:0.1'}), {'evaluate': 'global,personal'})
    """
    method, colon, rest = text.partition(":")
    lookup("method", method, METHODS)
    settings = {}
    for part in re.split(r",(?=[\w.-]+=)", rest) if colon else []:
        name, equals, value = part.partition("=")
        if not (equals and name and value):
            raise UserError(
                f"'{shown(text)}' cannot be read; use METHOD:OPTION=VALUE,OPTION=VALUE, e.g."
                " fedprox:mu=0.1,lr=0.05"
            )
        settings[name] = value
    return method, settings


def as_text(value: Any) -> str:
    """
    >>> as_text([64, 32]), as_text(["global", "personal"]), as_text(0.1)
    ('64x32', 'global,personal', '0.1')
    """
    if isinstance(value, (list, tuple)):
        return ("x" if all(isinstance(v, int) for v in value) else ",").join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def words(
    method: str,
    settings: Mapping[str, Any],
    refused: Collection[str] = (),
    others: Collection[str] = (),
) -> list[str]:
    """Settings of one method as words of a command line. others: methods whose options may stand
    here too, for them.

    >>> words("fedprox", {"mu": 0.1, "batch_size": 8, "model.hidden": [8], "probe": True})
    ['--set=fedprox.mu=0.1', '--batch-size=8', '--set=model.hidden=8', '--probe']
    >>> words("fedavg", {"mu": 0.1, "fedprox.mu": 1}, others=["fedprox"])
    []
    """
    switches, out = run_options(), []
    known = {m: options_of(m) for m in {method, *others}}
    for name, value in settings.items():
        flag, text = name.replace("_", "-"), as_text(value)
        owner, _, inner = name.partition(".")
        if flag in refused:
            raise UserError(
                f"'{name}' is an option of the whole command, not of one run; give it as --{flag}"
            )
        if switches.get(flag):
            if text not in ("true", "false"):
                raise UserError(f"{name} '{shown(text)}' is not one of true, false")
            out += [f"--{flag}"] if text == "true" else []
        elif flag in switches:
            out.append(f"--{flag}={text}")
        elif owner in ("model", "loss", *TRANSFORMS) and inner:
            out.append(f"--set={name}={text}")
        elif belongs(name, method):
            out.append(f"--set={method}.{name.removeprefix(f'{method}.')}={text}")
        elif not any(belongs(name, m) for m in others):
            allowed = [
                *(f for f in switches if f not in refused),
                *(o for options in known.values() for o in options),
            ]
            raise unknown(f"option of a run or of method '{method}'", shown(name), set(allowed))
    return out


def scoped(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """METHOD.OPTION where OPTION is one of the run: for that method alone. What is '' is left out.

    >>> scoped(
    ...     "fedprox",
    ...     {"lr": 1, "fedprox.lr": 0.1, "fedavg.lr": 1, "fedprox.mu": 2, "fedprox.start_from": ""},
    ... )
    {'lr': 0.1, 'fedprox.mu': 2}
    """
    out: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in settings.items():
        owner, dot, option = name.partition(".")
        if dot and owner in METHODS and option.replace("_", "-") in run_options():
            own |= {option: value} if owner == method else {}
        else:
            out[name] = value
    return {name: value for name, value in (out | own).items() if value != ""}


def belongs(name: str, method: str) -> bool:
    """Whether `name` is an option of `method`, with or without its name in front."""
    name = name.removeprefix(f"{method}.")
    return name in options_of(method) or (name.startswith("agent.") and controlled(method))


def applied(args: argparse.Namespace, more: list[str]) -> argparse.Namespace:
    """`args` with further words of the command line, which win over those it was made from."""
    return option_parser().parse_args(more, namespace=copy.copy(args))
