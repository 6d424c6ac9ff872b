"""--preset NAME: its settings as words in front of those that were typed, so that every one of them
can be typed over."""

from __future__ import annotations

import argparse

from fedjax_sim.cli.parser import OF_A_RUN
from fedjax_sim.cli.words import scoped, words
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.methods import METHODS
from fedjax_sim.presets import preset

# a preset's rounds are those of a run; training an agent for it has a number of its own
NOT_FOR = {"profile": OF_A_RUN, "train": ("rounds",)}


def with_preset(argv: list[str], args: argparse.Namespace) -> list[str]:
    """The command line with what the preset says, and its method where none is named."""
    chosen = preset(args.preset)
    if args.command == "compare":
        methods = [entry.partition(":")[0] for entry in args.methods]
    else:
        methods = [args.method or chosen.method]
    more = [] if args.command == "compare" or args.method else [chosen.method]
    told: dict[str, None] = {}
    for method in methods:
        if method not in METHODS and method == chosen.method:
            raise UserError(
                f"preset '{chosen.name}' is for the method '{method}', which is not part of this"
                " version"
            )
        lookup("method", method, METHODS)
        mine = scoped(method, chosen.of(method))
        if len(methods) > 1:  # they have one command line: what is of the run is of all of them
            mine = {n: v for n, v in mine.items() if chosen.settings.get(n) == v}
        settings = {n: v for n, v in mine.items() if n not in NOT_FOR.get(args.command, ())}
        told |= dict.fromkeys(words(method, settings))
    at = argv.index(args.command) + 1
    return [*argv[:at], *told, *argv[at:], *more]
