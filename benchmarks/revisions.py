"""Old and new in turn: rounds of fedjax_sim from two source trees on the same machine.

    git worktree add ../before REVISION
    python -m benchmarks.revisions --old ../before [--workloads W1,W4] [--pairs 5] [--best-of 3]
    [--json FILE]

For every workload two processes are kept alive, each running the peer `ours` of its own tree, and
asked for the same rounds in turn (new, old, old, new, …). A pair is the best of a few such rounds
of each side; reported is the ratio new ÷ old of every pair, its median and an interval, as in
`rounds_per_second`. Below 1 the new tree is faster. FEDJAX_SIM_CHUNK and FEDJAX_SIM_DEVICES hold
for both; without them each tree chooses for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.peers import PEERS
from benchmarks.peers.protocol import ROOT, PeerError, Worker
from benchmarks.rounds_per_second import BUSY, median_interval, say
from benchmarks.workloads import WORKLOADS, Workload, from_text

SIDES = ("new", "old")


def time_pairs(workers: dict[str, Any], pairs: int, best_of: int) -> list[dict[str, float]]:
    """[{new: seconds, old: seconds}] per pair, each the best of `best_of` rounds; who goes first
    alternates."""
    found, index = [], 0
    for _ in range(pairs):
        best = dict.fromkeys(SIDES, float("inf"))
        for _ in range(best_of):
            for side in SIDES if index % 2 == 0 else SIDES[::-1]:
                best[side] = min(best[side], workers[side].round(index))
            index += 1
        found.append(best)
    return found


def compare(pairs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Ratios new ÷ old of the pairs, their median and its interval, and what that says.

    >>> compare([{"new": 1.0, "old": 2.0}] * 5)["verdict"]
    'faster'
    """
    ratios = [pair["new"] / pair["old"] for pair in pairs]
    low, high, coverage = median_interval(ratios)
    best = {side: min(pair[side] for pair in pairs) for side in SIDES}
    return {
        "best_s": best,
        "ratio_of_best": best["new"] / best["old"],
        "ratios": ratios,
        "median": statistics.median(ratios),
        "low": low,
        "high": high,
        "coverage": coverage,
        "verdict": "slower" if low > 1 else "faster" if high < 1 else "no difference seen",
    }


def measure(
    workload: Workload, trees: dict[str, pathlib.Path], pythons: dict[str, str], options: Any
) -> dict[str, Any]:
    """Both sides of one workload: start, take turns, end."""
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for side in SIDES:
            say(f"{workload.name} {side}: starting …")
            log = (
                pathlib.Path(options.logs, f"{side}-{workload.name}.log") if options.logs else None
            )
            try:
                workers[side] = Worker(
                    PEERS["ours"][0], workload, pythons[side], log=log, root=trees[side]
                )
            except PeerError as problem:
                raise PeerError(f"{side}: {problem}") from problem
            stack.callback(workers[side].close)
        pairs = time_pairs(workers, options.pairs, options.best_of)
        ready = {side: worker.ready for side, worker in workers.items()}
        peaks = {side: worker.peak_rss_mb for side, worker in workers.items()}
    return {
        "workload": workload.name,
        **compare(pairs),
        "pairs": pairs,
        "compile_s": {side: ready[side]["compile_s"] for side in SIDES},
        "peak_rss_mb": peaks,
        "versions": {side: ready[side]["versions"] for side in SIDES},
    }


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"{'':8} {'old s':>9} {'new s':>9} {'best':>6}   {'new ÷ old: median [interval]':40} "
        f"{'compile s old, new':>18} {'peak MB old, new':>17}"
    ]
    for row in result["rows"]:
        spread = (
            f"{row['median']:.3f} [{row['low']:.3f}, {row['high']:.3f}; "
            f"{100 * row['coverage']:.0f} %, {len(row['ratios'])} pairs]"
        )
        both = lambda values, form: ", ".join(f"{values[side]:{form}}" for side in ("old", "new"))
        lines.append(
            f"{row['workload']:8.8} {row['best_s']['old']:9.4f} {row['best_s']['new']:9.4f}"
            f" {row['ratio_of_best']:6.3f}   {spread:40} {both(row['compile_s'], '.1f'):>18}"
            f" {both(row['peak_rss_mb'], '.0f'):>17}  {row['verdict']}"
        )
    lines += [f"{one['workload']:8.8} not measured: {one['reason']}" for one in result["absent"]]
    facts = result["machine"]
    busy = " (BUSY: do not quote the ratios)" if facts["load_average"][0] > BUSY else ""
    lines.append(
        f"{facts['processor']}, {facts['cores']} cores; load before the run"
        f" {facts['load_average']}{busy}"
    )
    return "\n".join(lines)


def tree_problem(tree: pathlib.Path, python: str) -> str:
    """Why `tree` cannot be measured, in one sentence; empty if it can."""
    if not (tree / "benchmarks" / "peers" / "ours.py").is_file():
        return f"'{tree}' is not a checkout with benchmarks/peers/ours.py"
    if not os.access(python, os.X_OK):
        return f"'{python}' is not an executable Python"
    where = subprocess.run(
        [python, "-c", "import fedjax_sim; print(fedjax_sim.__file__)"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    found = where.stdout.strip() or "nothing"
    if where.returncode or tree not in pathlib.Path(found).resolve().parents:
        return f"in '{tree}' Python imports fedjax_sim from {found}"
    return ""


def arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[Workload], dict[str, pathlib.Path]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.revisions",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    parser.add_argument(
        "--old", required=True, metavar="FOLDER", help="another checkout, the one to compare with"
    )
    parser.add_argument("--new", default=str(ROOT), metavar="FOLDER", help="this tree unless given")
    parser.add_argument(
        "--old-python", default=sys.executable, metavar="PYTHON", help="where its packages differ"
    )
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="comma-separated, or one as JSON"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--best-of", type=int, default=3, help="rounds of each side in a pair")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything here, after every workload"
    )
    parser.add_argument("--logs", metavar="DIR", help="keep what the workers print")
    options = parser.parse_args(argv)
    if options.workloads.startswith("{"):
        chosen = [from_text(options.workloads)]
    else:
        for name in options.workloads.split(","):
            if name not in WORKLOADS:
                parser.error(f"unknown workload '{name}'; allowed: {', '.join(WORKLOADS)}")
        chosen = [WORKLOADS[name] for name in options.workloads.split(",")]
    for option, value in (("--pairs", options.pairs), ("--best-of", options.best_of)):
        if value < 1:
            parser.error(f"{option} {value} must be at least 1")
    trees = {"new": pathlib.Path(options.new).resolve(), "old": pathlib.Path(options.old).resolve()}
    for side, python in (("new", sys.executable), ("old", options.old_python)):
        if problem := tree_problem(trees[side], python):
            parser.error(f"--{side}: {problem}")
    if options.logs:
        pathlib.Path(options.logs).mkdir(parents=True, exist_ok=True)
    return options, chosen, trees


def main(argv: Sequence[str] | None = None) -> int:
    options, chosen, trees = arguments(argv)
    pythons = {"new": sys.executable, "old": options.old_python}
    result: dict[str, Any] = {"rows": [], "absent": [], "machine": machine.facts()}
    try:
        for workload in chosen:
            try:
                result["rows"].append(measure(workload, trees, pythons, options))
            except PeerError as problem:
                say(f"{workload.name}: {problem}")
                result["absent"].append({"workload": workload.name, "reason": str(problem)})
            if options.json:
                pathlib.Path(options.json).write_text(json.dumps(result, indent=1))
    except KeyboardInterrupt:
        say("interrupted; this is what was measured")
    print(table(result))
    return 0 if not result["absent"] else 1


if __name__ == "__main__":
    sys.exit(main())
