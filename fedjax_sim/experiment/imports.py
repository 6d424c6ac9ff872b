"""Files of the user that register methods, models, agents or datasets (`--import FILE.py`)."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import traceback

from fedjax_sim.errors import UserError, first_line
from fedjax_sim.options import shown


def load_file(text: str) -> None:
    """Run a Python file once, so that it registers its names; it can import modules beside it."""
    path = pathlib.Path(text).expanduser()
    if not path.is_file():
        raise UserError(f"--import '{shown(text, 200)}': there is no such file")
    name = f"own_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(
            f"--import '{shown(text, 200)}' is not a Python file; its name must end in .py"
        )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        if isinstance(problem, UserError):
            raise
        inside = [
            t.lineno
            for t in traceback.extract_tb(problem.__traceback__)
            if pathlib.Path(t.filename) == path.resolve()
        ]
        where = f", line {inside[-1]}" if inside else ""
        raise UserError(
            f"--import '{shown(text, 200)}'{where}: {type(problem).__name__}:"
            f" {shown(first_line(problem), 300)}"
        ) from problem
    finally:
        sys.path.remove(str(path.resolve().parent))
