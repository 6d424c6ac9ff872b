"""The entry point of the command line. A mistake of the user is one sentence on stderr and exit code 2."""

from __future__ import annotations

import os
import sys

from fedjax_sim.cli.commands import COMMANDS
from fedjax_sim.cli.parser import make_parser
from fedjax_sim.errors import UserError


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        args = make_parser().parse_args(argv)
        return COMMANDS[args.command](args)
    except UserError as problem:
        print(f"fedjax-sim: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


__all__ = ["main", "make_parser"]
