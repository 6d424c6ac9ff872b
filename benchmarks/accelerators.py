"""What a round costs on an accelerator that is not there, as its own compiler sees it. A cost model, not a stopwatch.

    python -m benchmarks.accelerators --device v5e --workloads W1,W4
    python -m benchmarks.accelerators --device h100 --workloads W4 --methods fedavg,ditto --against lax --top 10

Compiled are the whole round as users run it (one round, the state given away, all clients of the round side by side) and
an evaluation of the global model; beside it the naive vmapped program (`jax_naive`). See README.md for the columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import hlo
from benchmarks.models import multiply_adds
from benchmarks.workloads import WORKLOADS, Workload, make_data, plan, steps_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = 10_000  # examples of the evaluation


def library() -> Any:
    """This tree's `fedjax_sim.accelerators`, whichever tree's fedjax_sim it then works with."""
    spec = importlib.util.spec_from_file_location("fedjax_sim.accelerators", ROOT / "fedjax_sim" / "accelerators.py")
    assert spec is not None and spec.loader is not None
    if spec.name not in sys.modules:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules[spec.name]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- programs -----------------------------------------------------------------------------------------------------
def set_up(workload: Workload, method: str, device: Any, pool_times: int = 1, **more: Any) -> Any:
    """Our run of a workload, laid out for `device`."""
    from benchmarks.peers import ours
    from fedjax_sim.platform import lowering_for
    from fedjax_sim.runner.prepare import prepare

    fed, cohorts = ours.federation(workload, pool_times, TESTS if more.get("evaluations") else 1)
    config = ours.configuration(workload, method, **more)
    layout = library().layout_on(device, workload.cohort_limit or workload.per_round)
    with lowering_for(device.platform):
        return prepare(config, fed=fed, capacity=1, cohorts=tuple(map(tuple, cohorts)), layout=layout)


def compile_ours(workload: Workload, method: str, device: Any, pool_times: int = 1, **more: Any) -> Any:
    """Our round, compiled."""
    setup = set_up(workload, method, device, pool_times, **more)
    state, data = library().placed(setup.simulation, setup.net, device)
    return library().compile_for(device, setup.simulation.round, (state, data))


def compile_evaluation(workload: Workload, method: str, device: Any, **more: Any) -> Any:
    """Our evaluation of the global model on `TESTS` examples, compiled."""
    setup = set_up(workload, method, device, evaluations=("global",), **more)
    state, data = library().placed(setup.simulation, setup.net, device)
    return library().compile_for(device, setup.simulation.evaluate, (state, data), donate=False)


def compile_naive(workload: Workload, device: Any) -> Any:
    """`jax_naive`'s round, compiled; the weights are given away as ours are."""
    from jax.sharding import SingleDeviceSharding

    from benchmarks.peers import jax_naive

    program, arguments, _ = jax_naive.build(workload)
    shapes = library().abstract(arguments(0), SingleDeviceSharding(device.devices[0]))
    return library().compile_for(device, program, shapes)


# ---- figures ------------------------------------------------------------------------------------------------------
def longest(workload: Workload, whole_federation: bool = False) -> int:
    """Steps of the longest client: of round 0, or of all (what the naive program is padded to)."""
    if whole_federation:
        return max(steps_of(n, workload) for n in workload.sizes)
    return max(steps_of(one.examples, workload) for one in plan(workload, make_data(workload), 0))


def memory_of(compiled: Any) -> dict[str, float]:
    """MB of 10^6 bytes, from the compiler's account."""
    stats = compiled.memory_analysis()
    names = {"scratch_mb": "temp", "argument_mb": "argument", "output_mb": "output", "alias_mb": "alias"}
    return {ours: getattr(stats, f"{theirs}_size_in_bytes") / 1e6 for ours, theirs in names.items()}


def figures(compiled: Any, device: Any, steps: int) -> dict[str, Any]:
    """Everything that is read from a compiled program of one round with `steps` local steps."""
    kind, root = device.kind, hlo.tree(hlo.parse(compiled.as_text()))
    hlo.fill(root, steps)
    whole, (one, runs) = hlo.total(root), hlo.step(root, steps)
    tpu = kind.platform == "tpu"
    loops = [
        {"op_name": loop.op_name, "known": loop.known, "trips": loop.filled, "source": loop.source, "role": loop.role,
         "started": times}
        for _, loop, times in hlo.walk(root)
    ]  # fmt: skip
    micro = lambda count: 1e6 * count / kind.bandwidth
    return {
        "steps": steps,
        "step_runs": runs,
        "cycles_per_step": one.cycles if tpu else None,
        "cycles_per_round": whole.cycles if tpu else None,
        "kernels_per_step": one.kernels,
        "kernels_per_round": whole.kernels,
        "mb_per_step": one.bytes / 1e6,
        "mb_per_round": whole.bytes / 1e6,
        "mb_per_step_simple": one.simple_bytes / 1e6,
        "mb_per_round_simple": whole.simple_bytes / 1e6,
        "roofline_us_per_step": micro(one.bytes),
        "roofline_us_per_round": micro(whole.bytes),
        "cycles_us_per_step": 1e6 * one.cycles / kind.clock if tpu else None,
        "host_syncs_per_round": 0 if tpu else whole.syncs,
        "decisions_per_round": whole.syncs,
        "unknown_loops": sum(not loop["known"] for loop in loops),
        "conditionals": conditionals(root),
        "loops": loops,
        "collectives": [{"op": op, "mb": size / 1e6, "per_round": n} for (op, size), n in whole.collectives.items()],
        "root": root,
        **memory_of(compiled),
    }


def conditionals(node: hlo.Node) -> int:
    """Conditionals in the text of a program."""
    inner = [loop.body for loop in node.loops] + [branch for several in node.branches for branch in several]
    return len(node.branches) + sum(map(conditionals, inner))


def share_of_peak(row: dict[str, Any], workload: Workload, kind: Any) -> float:
    """Floating-point operations of a step as the network is written, over what the device could do in its time.

    The time is that of the cycles on a TPU, and of the bytes on a GPU: there it is an upper bound.
    """
    clients = workload.cohort_limit or workload.per_round
    flops = 2.0 * multiply_adds(workload) * workload.batch * clients
    micro = row["cycles_us_per_step"] if row["cycles_us_per_step"] is not None else row["roofline_us_per_step"]
    return flops / kind.peak / (1e-6 * max(micro, 1e6 * flops / kind.peak))


def measure(workload: Workload, method: str, program: str, device: Any, build: Callable[[], Any], top: int) -> dict[str, Any]:
    """One row: compile and read."""
    say(f"{device.name} {workload.name} {method} {program}: compiling …")
    started = time.perf_counter()
    compiled = build()
    row = {"device": device.name, "workload": workload.name, "method": method, "program": program}
    row |= figures(compiled, device, longest(workload, program == "naive"))
    root = row.pop("root")
    row |= {"compile_s": time.perf_counter() - started, "share_of_peak": share_of_peak(row, workload, device.kind)}
    return row | ({"top": hlo.expensive(root, row["steps"], top)} if top else {})


# ---- for people ---------------------------------------------------------------------------------------------------
def short(value: float | None) -> str:
    """
    >>> short(10_190_000), short(7315), short(None), short(0.5)
    ('10.19M', '7.3k', '–', '0.5')
    """
    if value is None:
        return "–"
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e4 or (value >= 1e3 and value % 1) or value >= 5e3 else f"{value:.4g}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "cycles/step": lambda r: short(r["cycles_per_step"]),
    "done": lambda r: f"×{r['step_runs']:.3g}",
    "cycles/round": lambda r: short(r["cycles_per_round"]),
    "kernels/step": lambda r: f"{r['kernels_per_step']:.4g}",
    "kernels/round": lambda r: f"{r['kernels_per_round']:.0f}",
    "MB/step": lambda r: f"{r['mb_per_step']:.1f}",
    "(simple)": lambda r: f"{r['mb_per_step_simple']:.1f}",
    "µs/step": lambda r: f"{r['roofline_us_per_step']:.1f}",
    "MB/round": lambda r: f"{r['mb_per_round']:.0f}",
    "unknown loops": lambda r: f"{r['unknown_loops']}",
    "conds": lambda r: f"{r['conditionals']}",
    "syncs/round": lambda r: f"{r['host_syncs_per_round']:.0f}",
    "scratch MB": lambda r: f"{r['scratch_mb']:.1f}",
    "args MB": lambda r: f"{r['argument_mb']:.1f}",
    "alias MB": lambda r: f"{r['alias_mb']:.2f}",
    "peak %": lambda r: f"{100 * r['share_of_peak']:.2f}",
    "compile s": lambda r: f"{r['compile_s']:.0f}",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["device", "workload", "method", "program", *COLUMNS]
    cells = [[r["device"], r["workload"], r["method"], r["program"], *(f(r) for f in COLUMNS.values())] for r in rows]
    widths = [max(len(row[i]) for row in [heads, *cells]) for i in range(len(heads))]
    line = lambda row: "  ".join(
        cell.ljust(width) if i < 4 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "\n".join(map(line, [heads, *cells]))


def details(row: dict[str, Any]) -> str:
    """Loops without a trip count and how they were counted, collectives, the most expensive instructions of a step."""
    name = f"{row['device']} {row['workload']} {row['method']} {row['program']}"
    lines = [
        f"  loop without a trip count, counted {one['trips']} × {one['started']:g} ({one['source']}): {one['op_name'][-80:]}"
        for one in row["loops"]
        if not one["known"]
    ]
    lines += [f"  {one['op']} of {one['mb']:.3f} MB, {one['per_round']:g} per round" for one in row["collectives"]]
    lines += [
        f"  {short(one['cycles']) if row['cycles_per_step'] is not None else '':>8} {one['mb']:9.2f} MB  {one['op']} "
        f"{one['shape'][:50]}  {one['op_name'][-90:]}"
        for one in row.get("top", [])
    ]
    return "\n".join([name, *lines]) if lines else ""


# ---- the command --------------------------------------------------------------------------------------------------
def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Workload]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerators", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--device", default="v5e", help="v5e, v5p, v6e, h100, a100; several: comma-separated")
    parser.add_argument("--workloads", default="W1,W2,W4", help="comma-separated")
    parser.add_argument("--methods", default="fedavg", help="comma-separated")
    parser.add_argument("--against", default="", metavar="lax|REVISION", help="our program with conv=lax beside")
    parser.add_argument("--programs", default="ours,naive", help="ours, naive")
    parser.add_argument("--top", type=int, default=0, metavar="K", help="the K most expensive instructions of a step")
    parser.add_argument("--json", metavar="FILE", help="write everything here, after every program")
    options = parser.parse_args(argv)
    for name in options.workloads.split(","):
        if name not in WORKLOADS:
            parser.error(f"unknown workload '{name}'; allowed: {', '.join(WORKLOADS)}")
    for name in options.device.split(","):
        try:
            library().parse(name)
        except ValueError as problem:
            parser.error(str(problem))
    return options, [WORKLOADS[name] for name in options.workloads.split(",")]


def programs(options: argparse.Namespace, workload: Workload, method: str, device: Any) -> dict[str, Callable[[], Any]]:
    """What is compiled for one workload and method, by name."""
    wanted = options.programs.split(",")
    found: dict[str, Callable[[], Any]] = {}
    if "ours" in wanted:
        found["ours"] = lambda: compile_ours(workload, method, device)
    if options.against == "lax":
        found["lax"] = lambda: compile_ours(workload, method, device, conv="lax")
    if "naive" in wanted and method == "fedavg":
        found["naive"] = lambda: compile_naive(workload, device)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options, chosen = arguments(argv)
    library().quiet_environment()
    rows: list[dict[str, Any]] = []
    for name in options.device.split(","):
        device = library().target_device(name)
        for workload in chosen:
            for method in options.methods.split(","):
                for program, build in programs(options, workload, method, device).items():
                    rows.append(measure(workload, method, program, device, build, options.top))
                    if options.json:
                        pathlib.Path(options.json).write_text(json.dumps({"rows": rows}, indent=1))
    print(table(rows))
    print("\n".join(filter(None, map(details, rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
