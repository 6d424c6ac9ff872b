"""Rounds per second and peak memory of fedjax_sim as one thing grows: each point in a process of
its own.

    python -m benchmarks.scaling [--axes cohort,clients,skew,chunk,devices] [--model mlp|lenet5]
    [--quick]
                                 [--json FILE] [--out DIR]

    cohort    participants per round, of 500 clients
    clients   N with 20 per round: stateless (fedavg), and with a model per client (ditto)
    skew      client sizes, equal or from a Dirichlet partition of the same pool, everybody takes
              part
    chunk     clients side by side on one device
    devices   host devices, made of the cores there are; more devices than cores cannot be faster

The data are synthetic. Time is the best of several rounds without evaluation; compilation is apart.
`--out` gets one figure per axis. benchmarks/README.md says how to read them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.workloads import Workload, label_counts, make_data


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement: what is varied, its value, and the whole set-up it stands for."""

    axis: str
    value: float  # on the figure's horizontal axis
    label: str  # what the table says
    series: str = "fedavg"  # which line of the figure; also the method
    clients: int = 100
    cohort: int = 20
    examples: int = 60  # per client, on average
    dirichlet: float = 0.0  # concentration of the sizes; 0: equal
    chunk: int = 1
    devices: int = 1
    model: str = "mlp"
    batch: int = 10
    rounds: int = 7


def points(axis: str, model: str, quick: bool) -> list[Point]:
    """The points of one axis; quick: a few small ones, a smoke run.

    >>> [p.cohort for p in points("cohort", "mlp", quick=False)]
    [10, 20, 50, 100, 200, 500]
    """
    base = Point(axis, 0, "", model=model, devices=min(machine.cores(), 2))
    base = dataclasses.replace(base, examples=20, rounds=2) if quick else base
    some, everybody, side = (20, 8, (1, 4)) if quick else (500, 64, (1, 2, 4, 8, 16, 32, 64))
    vary = lambda **changes: dataclasses.replace(base, **changes)
    if axis == "cohort":
        return [
            vary(value=m, label=f"{m} of {some}", clients=some, cohort=m)
            for m in ((4, 20) if quick else (10, 20, 50, 100, 200, 500))
        ]
    if axis == "clients":
        sizes = (
            {"fedavg": (20, 60), "ditto": (20, 40)}
            if quick
            else {"fedavg": (100, 1_000, 10_000), "ditto": (100, 300, 1_000)}
        )
        return [
            vary(
                value=n,
                label=f"{n:,} {'stateful' if method == 'ditto' else 'stateless'}",
                clients=n,
                series=method,
                examples=20,
            )
            for method, all_sizes in sizes.items()
            for n in all_sizes
        ]
    if axis == "skew":
        number, terms = (20, (0.0, 0.1)) if quick else (100, (0.0, 1.0, 0.3, 0.1, 0.05))
        return [
            vary(
                value=i,
                label="equal" if not a else f"Dirichlet {a:g}",
                dirichlet=a,
                clients=number,
                cohort=number,
                series=f"fedavg, chunk {chunk}",
                chunk=chunk,
            )
            for chunk in ((4,) if quick else (1, 4))
            for i, a in enumerate(terms)
        ]
    if axis == "chunk":
        return [
            vary(value=c, label=f"{c} side by side", chunk=c, cohort=everybody, devices=1)
            for c in side
        ]
    return [
        vary(value=d, label=f"{d} host devices", devices=d, cohort=everybody)
        for d in ((1, 2) if quick else (1, 2, 4, 8))
    ]


AXES = {
    "cohort": "participants per round",
    "clients": "clients N",
    "skew": "client sizes",
    "chunk": "clients side by side (chunk)",
    "devices": "host devices",
}


# ---- one point, in its own process ---------------------------------------------------------------
def workload_of(point: Point) -> Workload:
    pool = point.clients * point.examples
    return Workload(
        point.axis,
        (28, 28, 1),
        point.model,
        clients=point.clients,
        per_round=point.cohort,
        batch=point.batch,
        examples=0 if point.dirichlet else point.examples,
        dirichlet=point.dirichlet,
        pool=pool if point.dirichlet else 0,
    )


def measure(point: Point) -> dict[str, Any]:
    """Seconds per round (best), compile time, steps, and the memory of this process."""
    import jax

    from fedjax_sim.data.federation import Federation
    from fedjax_sim.engine.layout import place
    from fedjax_sim.experiment import Experiment
    from fedjax_sim.runner.compilation import want_host_devices
    from fedjax_sim.runner.facts import facts
    from fedjax_sim.runner.prepare import prepare

    workload = workload_of(point)
    config = Experiment.of(
        point.series.split(",")[0],
        model=point.model,
        clients=point.clients,
        rounds=10**6,
        eval_every=10**6,
        participation=f"{point.cohort}/{point.clients}",
        epochs=1,
        batch_size=point.batch,
        lr=0.01,
        momentum=0.0,
        weight_decay=0.0,
        evaluations=(),
        chunk=str(point.chunk),
        devices=str(point.devices),
    )
    want_host_devices(config)
    raw = make_data(workload)
    cuts = [np.arange(a, b) for a, b in zip(raw.start[:-1], raw.start[1:], strict=True)]
    fed = Federation.from_arrays(
        raw.pixels,
        raw.labels,
        {"train": cuts},
        test=(raw.pixels[:1], raw.labels[:1]),
        classes=10,
        mean=0.5,
        std=0.5,
        name=point.axis,
    )
    del raw
    setup = prepare(config, fed=fed, capacity=1)
    sim = setup.simulation
    state, data = place(sim.layout, sim.init(0, setup.net), sim.data)
    began = time.perf_counter()
    one = jax.jit(sim.round, donate_argnums=0).lower(state, data).compile()
    compile_s = time.perf_counter() - began
    state, log = jax.block_until_ready(one(state, data))  # not timed: pages are touched
    seconds, needed, executed = [], 0, 0
    for _ in range(point.rounds):
        began = time.perf_counter()
        state, log = jax.block_until_ready(one(state, data))
        seconds.append(time.perf_counter() - began)
        needed, executed = needed + int(log["steps_needed"]), executed + int(log["steps_executed"])
    sizes = label_counts(workload).sum(1)
    bytes_of = facts(setup)
    return {
        **dataclasses.asdict(point),
        "s_per_round": min(seconds),
        "s_per_round_all": seconds,
        "rounds_per_s": 1 / min(seconds),
        "compile_s": compile_s,
        "steps_per_round": needed / point.rounds,
        "executed_over_needed": executed / needed,
        "s_per_step": min(seconds) * point.rounds / needed,
        "smallest_client": int(sizes.min()),
        "largest_client": int(sizes.max()),
        "state_mb": bytes_of["state"] / 1e6,
        "data_mb": bytes_of["data"] / 1e6,
        "peak_rss_mb": machine.peak_rss_mb(os.getpid()),
    }


def in_own_process(point: Point) -> dict[str, Any]:
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.scaling",
            "--measure",
            json.dumps(dataclasses.asdict(point)),
        ],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{point.axis} {point.label} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- as text -------------------------------------------------------------------------------------
def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'axis':8} {'point':22} {'method':16} {'rounds/s':>9} {'ms/round':>9} {'ms/step':>8}"
        f" {'exec/need':>9} {'compile s':>9} {'state MB':>8} {'peak MB':>8}"
    ]
    lines += [
        f"{r['axis']:8} {r['label']:22} {r['series']:16} {r['rounds_per_s']:9.2f}"
        f" {1e3 * r['s_per_round']:9.2f} {1e3 * r['s_per_step']:8.3f}"
        f" {r['executed_over_needed']:9.3f} {r['compile_s']:9.1f} {r['state_mb']:8.1f}"
        f" {r['peak_rss_mb']:8.0f}"
        for r in rows
    ]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], axis: str, folder: pathlib.Path) -> pathlib.Path:
    """Rounds per second and peak memory against one axis (for skew also the wasted steps)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = [("rounds_per_s", "rounds per second"), ("peak_rss_mb", "peak memory (MB)")]
    columns += [("executed_over_needed", "executed ÷ needed steps")] if axis == "skew" else []
    figure, axes = plt.subplots(
        1, len(columns), figsize=(4.6 * len(columns), 3.6), constrained_layout=True
    )
    mine = [r for r in rows if r["axis"] == axis]
    for plot, (column, title) in zip(axes, columns, strict=True):
        for series in dict.fromkeys(r["series"] for r in mine):
            line = [r for r in mine if r["series"] == series]
            plot.plot(
                [r["value"] for r in line], [r[column] for r in line], marker="o", label=series
            )
        plot.set(title=title, xlabel=AXES[axis])
        ticks = {r["value"]: r["label"] if axis == "skew" else f"{r['value']:,}" for r in mine}
        if axis != "skew":
            plot.set_xscale("log")
            if column == "rounds_per_s":
                plot.set_yscale("log")
        plot.set_xticks(list(ticks), list(ticks.values()), rotation=30 if axis == "skew" else 0)
        plot.set_xticks([], minor=True)
        if column == "peak_rss_mb" or axis == "skew":
            plot.set_ylim(0, 1.1 * max(r[column] for r in mine))
        plot.grid(alpha=0.3)
    if len({r["series"] for r in mine}) > 1:
        axes[0].legend()
    path = folder / f"scaling_{axis}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--axes", default=",".join(AXES), help=f"comma-separated, of {', '.join(AXES)}"
    )
    parser.add_argument("--model", default="mlp", choices=("mlp", "lenet5"))
    parser.add_argument("--quick", action="store_true", help="a smoke run: few and small points")
    parser.add_argument("--json", metavar="FILE", help="write everything here, after every point")
    parser.add_argument("--out", metavar="DIR", help="folder for the figures, one per axis")
    parser.add_argument("--measure", metavar="POINT", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(measure(Point(**json.loads(options.measure)))))
        return 0
    chosen = options.axes.split(",")
    for axis in chosen:
        if axis not in AXES:
            parser.error(f"unknown axis '{axis}'; allowed: {', '.join(AXES)}")
    facts, rows = machine.facts(), []
    for point in [p for axis in chosen for p in points(axis, options.model, options.quick)]:
        rows.append(in_own_process(point))
        print(
            f"{point.axis} {point.label}: {rows[-1]['rounds_per_s']:.2f} rounds/s",
            file=sys.stderr,
            flush=True,
        )
        if options.json:
            text = json.dumps({"rows": rows, "machine": facts, "quick": options.quick}, indent=1)
            pathlib.Path(options.json).write_text(text)
    print(table(rows))
    if options.out:
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        for axis in chosen:
            print(f"figure: {draw(rows, axis, folder)}")
    print(
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']} GB; load before the"
        f" run {facts['load_average']}; "
        + ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
