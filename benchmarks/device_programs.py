"""Programs compiled for a device that need not be there, and what is read from them. Used by
`benchmarks.accelerators`.

The library may be another revision's: only what is imported inside functions is taken from it, and
this tree's `fedjax_sim/accelerators.py` works with it.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
import sys
import time
from typing import Any

from benchmarks import hlo
from benchmarks.models import multiply_adds
from benchmarks.workloads import Workload, make_data, plan, steps_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = 10_000  # examples of the evaluation


def library() -> Any:
    """This tree's `fedjax_sim.accelerators`, whichever tree's fedjax_sim it then works with."""
    name = "fedjax_sim.accelerators"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "fedjax_sim" / "accelerators.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


# ---- programs ------------------------------------------------------------------------------------
def set_up(workload: Workload, method: str, device: Any, pool_times: int = 1, **more: Any) -> Any:
    """Our run of a workload, laid out for `device`: all clients of a round side by side."""
    from benchmarks.peers import ours
    from fedjax_sim.methods import controlled
    from fedjax_sim.platform import lowering_for
    from fedjax_sim.runner.prepare import prepare

    validates = controlled(method) or method == "fedfomo"
    fed, cohorts = ours.federation(
        workload, pool_times, TESTS if more.get("evaluations") else 1, validates
    )
    layout = library().layout_on(device, workload.cohort_limit or workload.per_round)
    with lowering_for(device.platform):
        config = ours.configuration(workload, method, **more)
        return prepare(
            config, fed=fed, capacity=1, cohorts=tuple(map(tuple, cohorts)), layout=layout
        )


def ours(workload: Workload, method: str, device: Any, pool_times: int = 1, **more: Any) -> Any:
    """Our round, compiled."""
    setup = set_up(workload, method, device, pool_times, **more)
    placed = library().placed(setup.simulation, setup.net, device)
    return library().compile_for(device, setup.simulation.round, placed)


def evaluation(workload: Workload, method: str, device: Any, **more: Any) -> Any:
    """Our evaluation of the global model on `TESTS` examples, compiled."""
    setup = set_up(workload, method, device, evaluations=("global",), **more)
    placed = library().placed(setup.simulation, setup.net, device)
    return library().compile_for(device, setup.simulation.evaluate, placed, donate=False)


def naive(workload: Workload, device: Any) -> Any:
    """`jax_naive`'s round, compiled; the weights are given away as ours are."""
    from jax.sharding import SingleDeviceSharding

    from benchmarks.peers import jax_naive

    program, arguments, _ = jax_naive.build(workload)
    shapes = library().abstract(arguments(0), SingleDeviceSharding(device.devices[0]))
    return library().compile_for(device, program, shapes)


# ---- figures -------------------------------------------------------------------------------------
def longest(workload: Workload, whole_federation: bool = False) -> int:
    """Steps of the longest client: of round 0, or of all (what the naive program is padded to)."""
    if whole_federation:
        return max(steps_of(n, workload) for n in workload.sizes)
    return max(steps_of(one.examples, workload) for one in plan(workload, make_data(workload), 0))


def pool_mb(workload: Workload) -> float:
    """The examples of a workload, as the device holds them."""
    return sum(workload.sizes) * math.prod(workload.shape) / 1e6


def memory_of(compiled: Any) -> dict[str, float]:
    """MB of 10^6 bytes on each device, from the compiler's account."""
    stats = compiled.memory_analysis()
    names = {
        "scratch_mb": "temp",
        "argument_mb": "argument",
        "output_mb": "output",
        "alias_mb": "alias",
    }
    return {ours: getattr(stats, f"{theirs}_size_in_bytes") / 1e6 for ours, theirs in names.items()}


def whole(root: hlo.Node, kind: Any) -> dict[str, Any]:
    """What one execution of a program costs."""
    cost, tpu = hlo.total(root), kind.platform == "tpu"
    loops = [
        {
            "op_name": loop.op_name,
            "known": loop.known,
            "trips": loop.filled,
            "source": loop.source,
            "role": loop.role,
        }
        | {"started": times}
        for _, loop, times in hlo.walk(root)
    ]
    return {
        "cycles_per_round": cost.cycles if tpu else None,
        "kernels_per_round": cost.kernels,
        "unpriced_per_round": cost.unpriced,
        "mb_per_round": cost.bytes / 1e6,
        "mb_per_round_simple": cost.simple_bytes / 1e6,
        "roofline_us_per_round": 1e6 * cost.bytes / kind.bandwidth,
        "host_syncs_per_round": 0.0 if tpu else cost.syncs,  # a TPU decides by itself
        "decisions_per_round": cost.syncs,
        "unknown_loops": sum(not loop["known"] for loop in loops),
        "conditionals": conditionals(root),
        "loops": loops,
        "collectives": [
            {"op": op, "mb": size / 1e6, "per_round": n}
            for (op, size), n in cost.collectives.items()
        ],
    }


def conditionals(node: hlo.Node) -> int:
    """Conditionals in the text of a program."""
    inner = [loop.body for loop in node.loops] + [
        branch for several in node.branches for branch in several
    ]
    return len(node.branches) + sum(map(conditionals, inner))


def one_step(root: hlo.Node, steps: int, workload: Workload, device: Any) -> dict[str, Any]:
    """What a local step of all clients of the round costs."""
    kind, (cost, runs) = device.kind, hlo.step(root, steps)
    tpu = kind.platform == "tpu"
    memory_s, cycles_s = cost.bytes / kind.bandwidth, cost.cycles / kind.clock
    clients = -(-(workload.cohort_limit or workload.per_round) // len(device.devices))
    flops_s = 2.0 * multiply_adds(workload) * workload.batch * clients / kind.peak
    return {
        "steps": steps,
        "step_runs": runs,
        "cycles_per_step": cost.cycles if tpu else None,
        "cycles_us_per_step": 1e6 * cycles_s if tpu else None,
        "kernels_per_step": cost.kernels,
        "unpriced_per_step": cost.unpriced,
        "mb_per_step": cost.bytes / 1e6,
        "mb_per_step_simple": cost.simple_bytes / 1e6,
        "mb_touched_per_step": cost.touched / 1e6,
        "mb_fetched_per_step": cost.fetched / 1e6,
        "roofline_us_per_step": 1e6 * max(memory_s, flops_s),
        "share_of_peak": flops_s / max(cycles_s if tpu else memory_s, flops_s),
    }


def figures(
    compiled: Any, device: Any, workload: Workload, steps: int, top: int = 0
) -> dict[str, Any]:
    """Everything that is read from a compiled round with `steps` local steps."""
    root = hlo.tree(hlo.parse(compiled.as_text()))
    hlo.fill(root, steps)
    found = one_step(root, steps, workload, device) | whole(root, device.kind) | memory_of(compiled)
    return found | ({"top": hlo.expensive(root, steps, top)} if top else {})


def evaluation_figures(compiled: Any, device: Any) -> dict[str, Any]:
    """The same of an evaluation, as a whole."""
    root = hlo.tree(hlo.parse(compiled.as_text()))
    hlo.fill(root, 1)
    found = {
        name.replace("_per_round", ""): value for name, value in whole(root, device.kind).items()
    }
    return {**found, **memory_of(compiled), "examples": TESTS}


# ---- a device that is there ----------------------------------------------------------------------
def rounds_per_second(workload: Workload, method: str, program: str, rounds: int = 5) -> float:
    """Rounds per second on the device that JAX uses here: the best of a few, after one that is not
    timed."""
    from benchmarks.peers import jax_naive, ours

    peer = ours.prepare(workload, method) if program == "ours" else jax_naive.prepare(workload)
    best = float("inf")
    for index in range(1 + rounds):
        started = time.perf_counter()
        peer.round(index)
        best = min(best, time.perf_counter() - started) if index else best
    return 1 / best
