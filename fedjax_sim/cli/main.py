"""The entry point of the command line. An expected failure is one sentence and exit code 2.

Expected are bad input (`UserError`) and failures of reading, allocating and writing: no such file,
no permission, a full disk, a name too long, no memory, damaged or hostile files. Anything else is a
bug and keeps its traceback. FEDJAX_SIM_TRACEBACK=1 shows the traceback of expected failures too.
"""

from __future__ import annotations

import os
import sys

from fedjax_sim.cli.commands import COMMANDS
from fedjax_sim.cli.parser import make_parser
from fedjax_sim.errors import UserError, expected
from fedjax_sim.options import shown

LONGEST = 900  # characters of an error message


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    argv = sys.argv[1:] if argv is None else argv
    try:
        if any("\0" in argument for argument in argv):
            raise UserError("an argument holds a zero byte")
        args = make_parser().parse_args(argv)
        for file in getattr(args, "imports", ()):
            from fedjax_sim.experiment.imports import load_file

            load_file(file)
        args.argv = argv
        return COMMANDS[args.command](args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except Exception as problem:
        sentence = expected(problem)
        if sentence is None or os.environ.get("FEDJAX_SIM_TRACEBACK") == "1":
            raise
        print(f"fedjax-sim: {shown(sentence, LONGEST)}", file=sys.stderr)
        return 2


__all__ = ["expected", "main", "make_parser"]


if __name__ == "__main__":
    sys.exit(main())
