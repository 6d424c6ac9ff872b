"""What a round costs on an accelerator that this machine does not have, as its compiler estimates
it. A cost model: nothing is timed.

    python -m benchmarks.accelerators --device v5e --workloads W1,W4
    python -m benchmarks.accelerators --device h100 --methods fedavg,ditto --against lax
    --pool-times 10 --top 10 python -m benchmarks.accelerators --device v5e:2x4 --workloads W3
    --against REVISION --json out.json

Compiled are the whole round as users run it (one round, the state given away, all clients of the
round side by side) and an evaluation of the global model; beside it the naive vmapped program
(`jax_naive`). See README.md for the columns.
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

from benchmarks import device_programs as compiled_as
from benchmarks.device_programs import ROOT, library
from benchmarks.workloads import WORKLOADS, Workload

PROGRAMS = ("ours", "naive")
# our program with one setting changed, by the name that --against takes
VARIANTS: dict[str, dict[str, str]] = {
    form: {"conv": form} for form in ("lax", "select", "patches", "block", "winograd")
}
VARIANTS["bfloat16"] = {"activations": "bfloat16"}
UNCHANGED = 0.02  # a step's cycles and bytes, with a larger pool
Row = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- rows ----------------------------------------------------------------------------------------
def measure(
    workload: Workload, method: str, program: str, device: Any, options: argparse.Namespace
) -> Row:
    """One row: compile and read."""
    more = VARIANTS.get(program, {})
    row = {"device": device.name, "workload": workload.name, "method": method, "program": program}
    started = time.perf_counter()
    if program == "naive":
        done = compiled_as.naive(workload, device)
    else:
        done = compiled_as.ours(workload, method, device, **more)
    row["compile_s"] = time.perf_counter() - started
    row |= compiled_as.figures(
        done, device, workload, compiled_as.longest(workload, program == "naive"), options.top
    )
    if options.hlo:
        name = "-".join([device.name.replace(":", "_"), workload.name, method, program])
        pathlib.Path(options.hlo, f"{name}.txt").write_text(done.as_text())
    if program != "naive" and not options.round_only:
        row["evaluation"] = compiled_as.evaluation_figures(
            compiled_as.evaluation(workload, method, device, **more), device
        )
    if program == "ours" and options.pool_times > 1:
        larger = compiled_as.figures(
            compiled_as.ours(workload, method, device, options.pool_times),
            device,
            workload,
            row["steps"],
        )
        row["pool"] = pool_check(row, larger, options.pool_times, compiled_as.pool_mb(workload))
    return row


def pool_check(row: Row, larger: Row, times: int, pool_mb: float) -> Row:
    """How much a step changes with a pool `times` as large as one of `pool_mb`.

    Neither may a step's cycles grow, nor what its kernels touch or what is copied beside them.
    Cycles may become fewer, and the MB of main memory others: a pool that does not fit into the
    core's own memory leaves room there.
    """
    # less is noise
    least = {"cycles_per_step": 1e4, "mb_per_step": 1.0, "mb_touched_per_step": 1.0}
    found: Row = {"times": times}
    for name, few in least.items():
        if row[name] is not None:
            found[name] = (larger[name] - row[name]) / max(row[name], few)
    copied = larger["mb_fetched_per_step"] - row["mb_fetched_per_step"]
    grows = max(found["mb_touched_per_step"], found.get("cycles_per_step", 0)) > UNCHANGED
    found["ok"] = not grows and copied < (times - 1) * pool_mb / 2
    return found


def time_it(workload: Workload, method: str, program: str, name: str) -> Row:
    row = {"device": name, "workload": workload.name, "method": method, "program": program}
    return row | {
        "rounds_per_second": compiled_as.rounds_per_second(workload, method, program),
        "timed": True,
    }


def all_rows(options: argparse.Namespace, chosen: Sequence[Workload], result: Row) -> None:
    """Fill `result`; written down after every program."""
    for name in options.device.split(","):
        kind, topology = library().parse(name)
        timed = not topology and library().here(kind.platform)
        for workload in chosen:
            for method in options.methods.split(","):
                for program in programs(options, method, bool(topology), timed):
                    say(f"{name} {workload.name} {method} {program} …")
                    try:
                        if timed:
                            row = time_it(workload, method, program, name)
                        else:
                            row = measure(
                                workload, method, program, library().target_device(name), options
                            )
                        result["rows"].append(row)
                    except (
                        Exception
                    ) as problem:  # one program less: the others are still worth their time
                        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
                        say(f"  {reason}")
                        result["absent"].append(
                            f"{name} {workload.name} {method} {program}: {reason}"
                        )
                        if options.debug:
                            raise
                    write(options, result)


def write(options: argparse.Namespace, result: Row) -> None:
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1))


def programs(options: argparse.Namespace, method: str, mesh: bool, timed: bool) -> list[str]:
    """What there is of a method: the naive program is FedAvg's, on one device."""
    found = ["ours"] if "ours" in options.programs.split(",") else []
    found += [options.against] if options.against in VARIANTS and not timed else []
    return found + (
        ["naive"]
        if "naive" in options.programs.split(",") and method == "fedavg" and not mesh
        else []
    )


def of_revision(options: argparse.Namespace) -> Row:
    """The rows of our program with another revision's library, which a process of its own reads
    from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", options.against, "fedjax_sim", "agents"],
            capture_output=True,
            check=True,
        )
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        call = [
            sys.executable,
            "-m",
            "benchmarks.accelerators",
            "--programs",
            "ours",
            "--json",
            f"{folder}/rows.json",
        ]
        call += [
            "--device",
            options.device,
            "--workloads",
            options.workloads,
            "--methods",
            options.methods,
        ]
        call += [
            "--top",
            str(options.top),
            "--pool-times",
            str(options.pool_times),
            *["--round-only"] * options.round_only,
        ]
        paths = os.pathsep.join([folder, str(ROOT)])  # its library, our benchmark
        subprocess.run(
            call, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL
        )
        found = pathlib.Path(folder, "rows.json")
        result = (
            json.loads(found.read_text())
            if found.exists()
            else {"rows": [], "absent": ["its process gave no answer"]}
        )
    result["rows"] = [row | {"program": options.against} for row in result["rows"]]
    result["absent"] = [f"{options.against}: {reason}" for reason in result["absent"]]
    return result


# ---- as text -------------------------------------------------------------------------------------
def short(value: float | None) -> str:
    """
    >>> short(10_190_000), short(7315), short(None), short(19.17)
    ('10.19M', '7.3k', '–', '19.2')
    """
    if value is None:
        return "–"
    return (
        f"{value / 1e6:.2f}M"
        if value >= 1e6
        else f"{value / 1e3:.1f}k"
        if value >= 5e3
        else f"{value:.3g}"
    )


COLUMNS: dict[str, Callable[[Row], str]] = {
    "cycles/step": lambda r: short(r["cycles_per_step"]),
    "done": lambda r: f"×{r['step_runs']:.3g}",
    "cycles/round": lambda r: short(r["cycles_per_round"]),
    "unpriced": lambda r: f"{r['unpriced_per_step']:.3g}",
    "kernels/step": lambda r: f"{r['kernels_per_step']:.4g}",
    "kernels/round": lambda r: f"{r['kernels_per_round']:.0f}",
    "MB/step": lambda r: f"{r['mb_per_step']:.1f}",
    "(simple)": lambda r: f"{r['mb_per_step_simple']:.1f}",
    "µs/step": lambda r: f"{r['roofline_us_per_step']:.1f}",
    "MB/round": lambda r: f"{r['mb_per_round']:.0f}",
    "µs/round": lambda r: f"{r['roofline_us_per_round']:.0f}",
    "loops?": lambda r: f"{r['unknown_loops']}",
    "conds": lambda r: f"{r['conditionals']}",
    "syncs": lambda r: f"{r['host_syncs_per_round']:.0f}",
    "scratch MB": lambda r: f"{r['scratch_mb']:.1f}",
    "args MB": lambda r: f"{r['argument_mb']:.1f}",
    "alias MB": lambda r: f"{r['alias_mb']:.2f}",
    "peak %": lambda r: f"{100 * r['share_of_peak']:.2f}",
    "compile s": lambda r: f"{r['compile_s']:.0f}",
}
NAMES = ("device", "workload", "method", "program")


def columns(cells: list[list[str]]) -> str:
    """Rows below their head, the names flush left, numbers flush right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    place = lambda i, cell: cell.ljust(widths[i]) if i < len(NAMES) else cell.rjust(widths[i])
    return "\n".join("  ".join(place(i, cell) for i, cell in enumerate(row)) for row in cells)


def table(result: Row) -> str:
    """The result as text."""
    estimated = [row for row in result["rows"] if not row.get("timed")]
    timed = [row for row in result["rows"] if row.get("timed")]
    name = lambda row: [str(row[part]) for part in NAMES]
    lines = []
    if estimated:
        lines.append(
            columns(
                [
                    [*NAMES, *COLUMNS],
                    *([*name(r), *(f(r) for f in COLUMNS.values())] for r in estimated),
                ]
            )
        )
    if timed:
        lines.append(
            columns(
                [
                    [*NAMES, "rounds/s"],
                    *([*name(r), f"{r['rounds_per_second']:.2f}"] for r in timed),
                ]
            )
        )
    lines += [text for row in estimated if (text := details(row))]
    return "\n".join([*lines, *(f"not compiled: {reason}" for reason in result["absent"])])


def details(row: Row) -> str:
    """How loops without a trip count were counted; the evaluation, the pool, collectives, the
    dearest instructions."""
    lines = [
        f"  loop without a trip count, started {one['started']:g} × and counted as {one['trips']}"
        f" turns ({one['source']}): {one['op_name'][-80:]}"
        for one in row["loops"]
        if not one["known"]
    ]
    if "evaluation" in row:
        e = row["evaluation"]
        lines.append(
            f"  evaluation of {e['examples']:,} examples: {short(e['cycles'])} cycles,"
            f" {e['kernels']:.0f} kernels, {e['mb']:.0f} MB, {e['unknown_loops']} loops without a"
            f" trip count, scratch {e['scratch_mb']:.1f} MB"
        )
    if "pool" in row:
        lines.append(f"  {pool_line(row['pool'])}")
    lines += [
        f"  {one['op']} of {one['mb']:.3f} MB, {one['per_round']:g} per round"
        for one in row["collectives"]
    ]
    lines += [
        f"  {short(one['cycles']) if row['cycles_per_step'] is not None else '':>8}"
        f" {one['mb']:9.2f} MB  {one['op']} {one['shape'][:50]}  {one['op_name'][-90:]}"
        for one in row.get("top", [])
    ]
    return "\n".join([" ".join(str(row[part]) for part in NAMES), *lines]) if lines else ""


def pool_line(pool: Row) -> str:
    """
    >>> pool_line(
    ...     {
    ...         "times": 10,
    ...         "cycles_per_step": 0.003,
    ...         "mb_per_step": 0.0,
    ...         "mb_touched_per_step": 0.0,
    ...         "ok": True,
    ...     }
    ... )
    'pool x10: step cycles +0.3 %, step MB +0.0 %, touched +0.0 % ok'
    """
    names = {
        "cycles_per_step": "step cycles",
        "mb_per_step": "step MB",
        "mb_touched_per_step": "touched",
    }
    change = ", ".join(
        f"{word} {100 * pool[name]:+.1f} %" for name, word in names.items() if name in pool
    )
    moved = any(abs(pool.get(name, 0)) > UNCHANGED for name in names)
    verdict = ("ok, only placed differently" if moved else "ok") if pool["ok"] else "GROWS"
    return f"pool x{pool['times']}: {change} {verdict}"


# ---- the command ---------------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerators",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    known = ", ".join(library().DEVICES)
    p.add_argument(
        "--device",
        default="v5e",
        help=f"comma-separated: {known}; with a topology, as v5e:2x4, a mesh",
    )
    p.add_argument(
        "--workloads", default="W1,W2,W4", help=f"comma-separated: {', '.join(WORKLOADS)}"
    )
    p.add_argument("--methods", default="fedavg", help="comma-separated")
    p.add_argument(
        "--programs", default=",".join(PROGRAMS), help=f"comma-separated: {', '.join(PROGRAMS)}"
    )
    text = (
        "also our program with another form of convolution, bfloat16 activations, or the library of"
        " another revision"
    )
    p.add_argument("--against", default="", metavar=f"{'|'.join(VARIANTS)}|REVISION", help=text)
    text = "also with a pool so many times as large: a step must not change"
    p.add_argument("--pool-times", type=int, default=1, metavar="K", help=text)
    p.add_argument(
        "--top",
        type=int,
        default=0,
        metavar="K",
        help="the K most expensive instructions of a step",
    )
    p.add_argument("--round-only", action="store_true", help="compile no evaluation")
    p.add_argument("--hlo", metavar="FOLDER", help="keep the compiled texts there")
    p.add_argument("--json", metavar="FILE", help="write everything here, after every program")
    p.add_argument(
        "--debug",
        action="store_true",
        help="a program that does not compile ends everything, with its traceback",
    )
    return p


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Workload]]:
    asked = parser()
    options = asked.parse_args(argv)
    from fedjax_sim.methods import METHODS

    for what, allowed in (("workloads", WORKLOADS), ("methods", METHODS), ("programs", PROGRAMS)):
        for name in getattr(options, what).split(","):
            if name not in allowed:
                asked.error(f"unknown {what[:-1]} '{name}'; allowed: {', '.join(allowed)}")
    for option, value in (("--pool-times", options.pool_times), ("--top", options.top + 1)):
        if value < 1:
            asked.error(
                f"{option} {value} is too small; allowed:"
                f" {'1' if option == '--pool-times' else '0'} or more"
            )
    try:
        for name in options.device.split(","):
            library().parse(name)
    except ValueError as problem:
        asked.error(str(problem))
    if options.against not in ("", *VARIANTS):
        found = subprocess.run(
            [
                "git",
                "-C",
                str(ROOT),
                "rev-parse",
                "--verify",
                "--quiet",
                f"{options.against}^{{commit}}",
            ],
            capture_output=True,
        )
        if found.returncode:
            allowed = f"{', '.join(VARIANTS)}, or a revision"
            asked.error(
                f"--against '{options.against}' is no revision that git knows here; allowed:"
                f" {allowed}"
            )
    if options.hlo:
        pathlib.Path(options.hlo).mkdir(parents=True, exist_ok=True)
    return options, [WORKLOADS[name] for name in options.workloads.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    options, chosen = arguments(argv)
    platforms = [library().parse(name)[0].platform for name in options.device.split(",")]
    library().quiet_environment(on_cpu=not any(map(library().here, platforms)))
    result: Row = {"rows": [], "absent": []}
    try:
        all_rows(options, chosen, result)
        if options.against not in ("", *VARIANTS):
            other = of_revision(options)
            result = {part: result[part] + other[part] for part in result}
            write(options, result)
    except KeyboardInterrupt:
        say("interrupted; this is what there is")
    print(table(result))
    grows = any(not row["pool"]["ok"] for row in result["rows"] if "pool" in row)
    return 1 if result["absent"] or grows else 0


if __name__ == "__main__":
    sys.exit(main())
