"""The entry point of the command line, and its one boundary: a failure that can be expected is one
sentence and exit code 2.

Expected is bad input (`UserError`), and everything that reading, allocating and writing may meet:
no such file, no permission, a full disk, a name too long, no memory, damaged or hostile files.
Anything else is a mistake of the program and keeps its traceback. FEDJAX_SIM_TRACEBACK=1 shows the
traceback of expected failures too.
"""

from __future__ import annotations

import lzma
import os
import sys
import zipfile
import zlib

from fedjax_sim.cli.commands import COMMANDS
from fedjax_sim.cli.parser import make_parser
from fedjax_sim.errors import UserError
from fedjax_sim.options import shown

DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, UnicodeError)
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
LONGEST = 900  # characters of a sentence


def expected(problem: BaseException) -> str | None:
    """The sentence for a failure that no program can rule out; None for a mistake of this one.

    >>> expected(OSError(28, "No space left on device", "runs/a/rounds.csv"))
    "'runs/a/rounds.csv': No space left on device"
    >>> expected(MemoryError())
    'there is not enough memory; use fewer clients, a smaller model, batch or chunk, or --state-on
    host'
    >>> expected(KeyError("a")) is None
    True
    """
    if isinstance(problem, UserError):
        return str(problem)
    if isinstance(problem, MemoryError) or any(
        word in first_line(problem) for word in OUT_OF_MEMORY
    ):
        return (
            "there is not enough memory; use fewer clients, a smaller model, batch or chunk, or"
            " --state-on host"
        )
    if isinstance(problem, OSError):
        reason = problem.strerror or first_line(problem) or type(problem).__name__
        return (
            f"'{shown(os.fsdecode(problem.filename), 200)}': {reason}"
            if is_path(problem.filename)
            else reason
        )
    if isinstance(problem, DAMAGED):
        return f"a file cannot be read: {first_line(problem) or type(problem).__name__}"
    if isinstance(problem, RecursionError):
        return "the input is nested too deeply"
    return None


def is_path(name: object) -> bool:
    return isinstance(name, (str, bytes))


def first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [""])[0]


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    argv = sys.argv[1:] if argv is None else argv
    try:
        if any("\0" in word for word in argv):
            raise UserError("an argument holds a zero byte")
        args = make_parser().parse_args(argv)
        for file in getattr(args, "imports", ()):
            from fedjax_sim.runner.own import load_file

            load_file(file)
        if getattr(args, "preset", None):
            from fedjax_sim.cli.preset import with_preset

            args = make_parser().parse_args(with_preset(argv, args))
        if "method" in args and args.method is None:
            raise UserError(
                f"{args.command} needs a METHOD or a --preset (see fedjax-sim {args.command}"
                " --help)"
            )
        args.words = argv
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
