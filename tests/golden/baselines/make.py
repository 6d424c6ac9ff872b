"""Golden values of the baselines from plain PyTorch loops:  python tests/golden/baselines/make.py
[method ...]

writes values.npz beside this file (only the named methods are renewed);  --check  runs the
self-checks instead.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Iterator

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != HERE]
from golden.baselines import common, settings  # noqa: E402

VALUES = HERE / "values.npz"


def run(method: str) -> dict[str, np.ndarray]:
    """The arrays of a method; `fedala_top` is a second setting of the file fedala.py."""
    module = importlib.import_module(f"golden.baselines.{method.removesuffix('_top')}")
    setting = common.load()
    return module.run(setting, method) if method.endswith("_top") else module.run(setting)


def flatten(tree: dict) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{rest}", leaf) for rest, leaf in flatten(value))
        else:
            yield name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "methods", nargs="*", help=f"some of {', '.join(settings.OPTIONS)}; default all"
    )
    parser.add_argument("--check", action="store_true", help="run the self-checks, write nothing")
    args = parser.parse_args()
    unknown = sorted(set(args.methods) - set(settings.OPTIONS))
    if unknown:
        parser.error(
            f"unknown methods {', '.join(unknown)}; known are {', '.join(settings.OPTIONS)}"
        )
    methods = args.methods or list(settings.OPTIONS)
    if args.check:
        common.check(common.load())
        for module in dict.fromkeys(m.removesuffix("_top") for m in methods):
            importlib.import_module(f"golden.baselines.{module}").check(common.load())
            print(f"{module}: as expected")
        return
    stored: dict[str, np.ndarray] = {}
    if args.methods and VALUES.exists():
        with np.load(VALUES) as file:
            stored = {name: file[name] for name in file.files if name.split("/")[0] not in methods}
    given = {
        "initial": settings.initial(),
        "policy": settings.policy(),
        "class_means": settings.class_means(),
    }
    stored |= {f"settings/{name}": value for name, value in flatten(given)}
    for method in methods:
        stored |= {f"{method}/{name}": value for name, value in run(method).items()}
    np.savez_compressed(VALUES, **{name: stored[name] for name in sorted(stored)})  # type: ignore[arg-type]
    print(f"{VALUES.name}: {len(stored)} arrays, {VALUES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
