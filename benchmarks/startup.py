"""What passes before the first result: imports, data, weights, tracing, compiling, the first
segment; cold and warm.

    python -m benchmarks.startup [--methods fedavg,fedpolicy] [--models lenet5] [--dataset digits]
    [--repeat 1] [--json FILE]

Every measurement is a process of its own that does what `fedjax-sim run METHOD --model MODEL` does,
with a clock between the parts. *Cold* starts with an empty cache folder, *warm* again with the same
one. Columns are processor seconds (all threads) and wall seconds; on a busy machine only the former
mean something. HLO lines and fusions are those of the compiled rounds, programs is how many XLA
compiled or fetched on the way; `same` says whether initial weights compiled for one use equal the
fully compiled ones bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

PARTS = (
    "imports",
    "data",
    "initial weights",
    "set-up",
    "state",
    "trace and lower",
    "compile",
    "first segment",
    "warm round",
)
ROUNDS = 3  # timed after the first segment
SPAWNED = (  # when the parent started this process: the interpreter's own start counts
    "FEDJAX_SIM_STARTUP_SPAWNED"
)


class Clock:
    """Processor and wall seconds by part; a part inside another is taken out of it."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}  # name -> [processor, wall]
        self.inner = [0.0, 0.0]

    def add(self, name: str, seconds: Sequence[float]) -> None:
        row = self.parts.setdefault(name, [0.0, 0.0])
        for i, s in enumerate(seconds):
            row[i] += s

    def time(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """`call(…)`, its seconds added to part `name`.

        >>> clock = Clock()
        >>> clock.time("outer", lambda: clock.time("inner", sum, [1, 2]))
        3
        >>> list(clock.parts)
        ['inner', 'outer']
        """
        before, self.inner = self.inner, [0.0, 0.0]
        began = time.process_time(), time.time()
        result = call(*arguments, **options)
        spent = [time.process_time() - began[0], time.time() - began[1]]
        self.add(name, [s - i for s, i in zip(spent, self.inner, strict=True)])
        self.inner = [b + s for b, s in zip(before, spent, strict=True)]
        return result


def start(settings: dict[str, Any], check_weights: bool = False) -> dict[str, Any]:
    """One start, in this process; see the module's text."""
    clock = Clock()

    def imports() -> Any:
        import jax
        import jax.numpy

        import fedjax_sim.cli.main
        import fedjax_sim.models.factory
        import fedjax_sim.report.text
        import fedjax_sim.runner.execute  # noqa: F401

        return jax

    jax = clock.time("imports", imports)
    # the interpreter's own start
    clock.add("imports", [time.process_time() - clock.parts["imports"][0], 0.0])
    if SPAWNED in os.environ:
        clock.parts["imports"][1] = time.time() - float(os.environ[SPAWNED])
    from fedjax_sim.engine import layout as layouts
    from fedjax_sim.experiment import Experiment
    from fedjax_sim.runner import prepare as preparing
    from fedjax_sim.runner.compilation import use_compilation_cache, want_host_devices

    programs: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            programs.append(seconds) if event.endswith("backend_compile_duration") else None
        )
    )
    config = Experiment.of(**settings)
    want_host_devices(config)
    use_compilation_cache()
    originals = {name: getattr(preparing, name) for name in ("load_federation", "initial_net")}
    parts = {"load_federation": "data", "initial_net": "initial weights"}
    try:
        for name, original in originals.items():
            setattr(
                preparing,
                name,
                lambda *a, part=parts[name], f=original: jax.block_until_ready(
                    clock.time(part, f, *a)
                ),
            )
        setup = clock.time("set-up", preparing.prepare, config, measure=False)
    finally:
        for name, original in originals.items():
            setattr(preparing, name, original)
    sim = setup.simulation

    def first_state() -> tuple[Any, Any]:
        return jax.block_until_ready(
            layouts.place(sim.layout, sim.init(config.training.seed, setup.net), sim.data)
        )

    state, data = clock.time("state", first_state)
    lowered = clock.time("trace and lower", lambda: sim.run.lower(state, data, jax.numpy.int32(1)))
    program = clock.time("compile", lowered.compile)
    number = len(programs)
    state = clock.time(
        "first segment", lambda: jax.block_until_ready(program(state, data, jax.numpy.int32(1)))
    )[0]
    began = time.process_time(), time.time()
    jax.block_until_ready(program(state, data, jax.numpy.int32(ROUNDS)))
    clock.add(
        "warm round", [(time.process_time() - began[0]) / ROUNDS, (time.time() - began[1]) / ROUNDS]
    )
    text = program.as_text()
    out = dict(
        parts=clock.parts,
        hlo_lines=text.count("\n"),
        fusions=text.count(" fusion("),
        programs=number,
    )
    if check_weights:
        out["same"] = same_weights(sim.env.model, config.training.seed)
    return out


def same_weights(model: Any, seed: int) -> bool:
    """Whether `initial_weights` equals a full compilation of the model's `init`, bit for bit."""
    import jax
    import numpy as np

    from fedjax_sim.models import initial_weights

    key = jax.random.key(seed)
    return jax.tree.all(
        jax.tree.map(np.array_equal, initial_weights(model, key), jax.jit(model.init)(key))
    )


def measure(
    settings: dict[str, Any], cache: pathlib.Path, check_weights: bool = False
) -> dict[str, Any]:
    """`start` in a process of its own that keeps its programs in `cache`."""
    call = [sys.executable, "-m", "benchmarks.startup", "--one", json.dumps(settings)]
    environment = {**os.environ, "FEDJAX_SIM_CACHE": str(cache), SPAWNED: str(time.time())}
    done = subprocess.run(
        call + ["--check"] * check_weights, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{settings} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def total(row: dict[str, Any], which: int) -> float:
    """Processor (0) or wall (1) seconds until the first segment is done."""
    return sum(seconds[which] for part, seconds in row["parts"].items() if part != "warm round")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Parts down, runs across: processor seconds / wall seconds."""
    heads = [f"{r['method']} {r['model']} {r['cache']}" for r in rows]
    width = max(18, *map(len, heads))
    lines = [" " * 17 + "".join(f"{h:>{width + 2}}" for h in heads)]
    show = lambda values: "".join(f"{v:>{width + 2}}" for v in values)
    pair = lambda seconds: f"{seconds[0]:.2f} / {seconds[1]:.2f}"
    for part in PARTS[:-1]:
        lines.append(f"{part:<17}" + show(pair(r["parts"].get(part, (0, 0))) for r in rows))
    lines.append(f"{'first result':<17}" + show(pair((total(r, 0), total(r, 1))) for r in rows))
    lines.append(f"{PARTS[-1]:<17}" + show(pair(r["parts"][PARTS[-1]]) for r in rows))
    for name in ("hlo_lines", "fusions", "programs", "same"):
        lines.append(f"{name.replace('_', ' '):<17}" + show(str(r.get(name, "")) for r in rows))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--methods", default="fedavg,fedpolicy")
    parser.add_argument("--models", default="lenet5")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument(
        "--repeat", type=int, default=1, help="the best of so many starts, by processor seconds"
    )
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--one", default=None, metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument(
        "--check", action="store_true", help="also compare initial weights with a full compilation"
    )
    args = parser.parse_args(arguments)
    if args.one is not None:
        print(json.dumps(start(json.loads(args.one), args.check)))
        return 0
    if args.repeat < 1:
        parser.error(f"--repeat {args.repeat} is too small; allowed: 1 or more")
    from fedjax_sim.errors import UserError, lookup
    from fedjax_sim.methods import METHODS
    from fedjax_sim.models import MODELS

    try:
        for kind, names, known in (
            ("method", args.methods, METHODS),
            ("model", args.models, MODELS),
        ):
            for name in names.split(","):
                lookup(kind, name, known)
    except UserError as problem:
        parser.error(str(problem))
    rows = []
    for model in args.models.split(","):
        for method in args.methods.split(","):
            settings = dict(method=method, model=model, dataset=args.dataset)
            turns: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
            for _ in range(args.repeat):
                with tempfile.TemporaryDirectory() as folder:
                    for found in turns.values():
                        found.append(measure(settings, pathlib.Path(folder), args.check))
            rows += [
                dict(settings, cache=cache, **min(found, key=lambda row: total(row, 0)))
                for cache, found in turns.items()
            ]
    print("processor / wall seconds")
    print(table(rows))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
