"""Seconds per federated round: fedjax_sim against its peers, in turn on the same machine.

    python -m benchmarks.rounds_per_second [--workloads W1,W4] [--peers torch,pfl] [--pairs 5]
    [--json FILE]

For every workload and peer the driver keeps two processes alive, ours and the peer's, and asks them
for the same round in turn (ours, peer, peer, ours, …). Reported is the ratio of the two times of
each pair, its median and an interval, beside the plain times; compilation is apart.
`benchmarks/README.md` explains every column.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.models import multiply_adds
from benchmarks.peers import PEERS
from benchmarks.peers.protocol import PeerError, Worker
from benchmarks.workloads import WORKLOADS, Workload, from_text, make_data, round_totals

# peer ÷ ours must be at least this
BARS: dict[str, dict[str, float]] = {
    "W1": {
        "torch": 3,
        "torch_procs": 2.1,
        "jax_naive": 10,
        "flower": 2.5,
        "pfl": 2.5,
        "fedjax": 2.5,
    },
    "W2": {
        "torch": 1.3,
        "torch_procs": 1.15,
        "jax_naive": 20,
        "flower": 1.2,
        "pfl": 1.2,
        "fedjax": 1.2,
    },
    "W3": {
        "torch": 1.3,
        "torch_procs": 1.15,
        "jax_naive": 20,
        "flower": 1.2,
        "pfl": 1.2,
        "fedjax": 1.2,
    },
    "W4": {"torch": 12, "torch_procs": 6, "jax_naive": 4, "flower": 80, "fedjax": 5},
    "W5": {"torch": 1.7, "torch_procs": 1.3, "jax_naive": 10},
    "W6": {"torch": 3, "torch_procs": 2.1, "jax_naive": 10},
}
GEMM_AIMS = {"W1": 0.40, "W2": 0.60}  # share of the GEMM peak that ours aims at
BUSY = 0.5  # load average above which the ratios are not to be trusted
# clients that are run; the time is scaled to the whole cohort
EXTRAPOLATED = {("jax_naive", "W3"): 20}


def median_interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float, float]:
    """(low, high, coverage): the tightest pair of order statistics that covers the median with
    `confidence`.

    The i-th smallest and i-th largest of n independent values enclose their median with probability
    1 − 2 Σ_{k<i} C(n, k) / 2^n. With too few values for the confidence asked: the whole range, and
    what it covers.

    >>> median_interval([2.0, 3.0, 1.0, 5.0, 4.0])
    (1.0, 5.0, 0.9375)
    """
    ordered, n = sorted(values), len(values)
    cover = lambda i: 1 - 2 * sum(math.comb(n, k) for k in range(i)) / 2**n
    i = max((i for i in range(1, n // 2 + 1) if cover(i) >= confidence), default=1)
    return ordered[i - 1], ordered[n - i], max(cover(i), 0.0)


@dataclasses.dataclass
class Timing:
    """Rounds of one peer on one workload."""

    peer: str
    workload: str
    seconds: list[float] = dataclasses.field(default_factory=list)
    compile_s: float = 0.0
    setup_s: float = 0.0
    peak_rss_mb: float = 0.0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    extrapolated_from: int = 0
    steps: list[int] = dataclasses.field(default_factory=list)  # of each timed round
    examples: list[int] = dataclasses.field(default_factory=list)

    def row(self, workload: Workload, peak_gflops: float) -> dict[str, Any]:
        best, median = min(self.seconds), statistics.median(self.seconds)
        per_step = statistics.median(s / n for s, n in zip(self.seconds, self.steps, strict=True))
        flops = 2 * multiply_adds(workload)
        rate = statistics.median(
            e * flops / s for s, e in zip(self.seconds, self.examples, strict=True)
        )
        return {
            "peer": self.peer,
            "workload": self.workload,
            "s_per_round": median,
            "s_per_round_best": best,
            "rounds": len(self.seconds),
            "compile_s": self.compile_s,
            "setup_s": self.setup_s,
            "peak_rss_mb": self.peak_rss_mb,
            "s_per_step": per_step,
            "gflops": rate / 1e9,
            "share_of_gemm_peak": rate / 1e9 / peak_gflops if peak_gflops else None,
            "extrapolated_from_clients": self.extrapolated_from or None,
            "versions": self.versions,
            "seconds": self.seconds,
        }


class Bench:
    """One run of the driver: processes, timings and the order in which everything was asked."""

    def __init__(self, options: argparse.Namespace, pythons: dict[str, str]):
        self.options, self.pythons = options, pythons
        self.rows: list[dict[str, Any]] = []
        self.ratios: list[dict[str, Any]] = []
        self.order: list[dict[str, Any]] = []
        self.absent: list[dict[str, str]] = []
        self.facts = machine.facts()  # with the load before anything of ours runs
        if (load := self.facts["load_average"][0]) > BUSY:
            say(
                f"the machine is busy (load {load}): threaded peers suffer most, so do not quote"
                " these ratios"
            )
        self.gemm: dict[str, float] = {} if options.no_gemm else machine.gemm_in_own_process()

    @property
    def peak(self) -> float:
        return max(self.gemm.values(), default=0.0)

    def start(self, peer: str, workload: Workload) -> tuple[Worker, Timing] | None:
        few = EXTRAPOLATED.get((peer, workload.name), 0)
        run = dataclasses.replace(workload, cohort_limit=few)
        log = (
            pathlib.Path(self.options.logs, f"{peer}-{workload.name}.log")
            if self.options.logs
            else None
        )
        say(f"{workload.name} {peer}: starting …")
        try:
            worker = Worker(PEERS[peer][0], run, self.pythons.get(peer, sys.executable), log=log)
        except PeerError as problem:
            say(f"{workload.name} {peer}: cannot run: {problem}")
            self.absent.append({"peer": peer, "workload": workload.name, "reason": str(problem)})
            return None
        ready = worker.ready
        return worker, Timing(
            peer,
            workload.name,
            compile_s=ready["compile_s"],
            setup_s=ready["setup_s"],
            versions=ready["versions"],
            extrapolated_from=few,
        )

    def time_round(
        self, worker: Worker, timing: Timing, workload: Workload, data: Any, index: int
    ) -> float:
        scale = workload.per_round / timing.extrapolated_from if timing.extrapolated_from else 1.0
        seconds = worker.round(index) * scale
        steps, examples = round_totals(workload, data, index)
        timing.seconds.append(seconds)
        timing.steps.append(steps)
        timing.examples.append(examples)
        say(f"{workload.name} {timing.peer}: round {index} in {seconds:.3f} s")
        timing.peak_rss_mb = max(timing.peak_rss_mb, worker.peak_rss_mb)
        self.order.append(
            {"workload": workload.name, "peer": timing.peer, "round": index, "seconds": seconds}
        )
        return seconds

    def run(self, workload: Workload, peers: Sequence[str]) -> None:
        data, reference = make_data(workload), self.options.reference
        ours = self.start(reference, workload)
        try:
            for peer in (p for p in peers if p != reference):
                theirs = self.start(peer, workload)
                if theirs is None:
                    continue
                try:
                    self.pair(workload, data, ours, theirs)
                except PeerError as problem:
                    say(f"{workload.name} {peer}: failed: {problem}")
                    self.absent.append(
                        {"peer": peer, "workload": workload.name, "reason": str(problem)}
                    )
                finally:
                    theirs[0].close()
                if theirs[1].seconds:
                    self.rows.append(theirs[1].row(workload, self.peak))
                self.save()
            if ours and not ours[1].seconds:
                for index in range(self.options.pairs):
                    self.time_round(ours[0], ours[1], workload, data, index)
        finally:
            if ours:
                ours[0].close()
                if ours[1].seconds:
                    self.rows.append(ours[1].row(workload, self.peak))
            self.save()

    def save(self) -> None:
        """After every peer, so that an interrupted run keeps what it has."""
        if self.options.json:
            pathlib.Path(self.options.json).write_text(json.dumps(self.result(), indent=1))

    def pair(self, workload: Workload, data: Any, ours: Any, theirs: Any) -> None:
        ratios, started = [], time.perf_counter()
        for index in range(self.options.pairs):
            turn = [ours, theirs] if index % 2 == 0 else [theirs, ours]  # who goes first alternates
            took = {
                id(one): self.time_round(one[0], one[1], workload, data, index)
                for one in turn
                if one
            }
            if ours:
                ratios.append(took[id(theirs)] / took[id(ours)])
            if time.perf_counter() - started > self.options.budget and index >= 2:
                say(
                    f"{workload.name} {theirs[1].peer}: stopping after {index + 1} pairs, over the"
                    " budget"
                )
                break
        if not ratios:
            return
        low, high, coverage = median_interval(ratios)
        median = statistics.median(ratios)
        bar = (
            BARS.get(workload.name, {}).get(theirs[1].peer)
            if self.options.reference == "ours"
            else None
        )
        self.ratios.append(
            {
                "workload": workload.name,
                "peer": theirs[1].peer,
                "reference": ours[1].peer,
                "median": median,
                "low": low,
                "high": high,
                "coverage": coverage,
                "pairs": ratios,
                "bar": bar,
                "met": None if bar is None else median >= bar,
            }
        )

    def result(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "ratios": self.ratios,
            "absent": self.absent,
            "order": self.order,
            "machine": {**self.facts, "gemm_gflops": self.gemm},
            "bars": BARS,
            "gemm_aims": GEMM_AIMS,
        }


# ---- printing ------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    ratios = {(r["workload"], r["peer"]): r for r in result["ratios"]}
    lines = [
        f"{'':4} {'peer':12} {'best s':>9} {'median s':>9} {'compile s':>9} {'peak MB':>8} "
        f"{'ms/step':>8} {'GEMM %':>7}   ratio to the reference: median [interval]"
    ]
    for row in result["rows"]:
        share = (
            "" if row["share_of_gemm_peak"] is None else f"{100 * row['share_of_gemm_peak']:.1f}"
        )
        text = (
            f"{row['workload']:4.4} {row['peer']:12} {row['s_per_round_best']:9.3f} "
            f"{row['s_per_round']:9.3f} {row['compile_s']:9.1f} {row['peak_rss_mb']:8.0f} "
            f"{1e3 * row['s_per_step']:8.2f} {share:>7}"
        )
        if ratio := ratios.get((row["workload"], row["peer"])):
            text += (
                f"   {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}; "
                f"{100 * ratio['coverage']:.0f} %, {len(ratio['pairs'])} pairs]"
            )
            if ratio["bar"] is not None:
                text += f"  bar {ratio['bar']}: {'met' if ratio['met'] else 'NOT MET'}"
        elif (
            row["peer"] == "ours"
            and row["workload"] in GEMM_AIMS
            and row["share_of_gemm_peak"] is not None
        ):
            aim = GEMM_AIMS[row["workload"]]
            text += (
                f"   aim {aim:.0%} of GEMM:"
                f" {'met' if row['share_of_gemm_peak'] >= aim else 'NOT MET'}"
            )
        if row["extrapolated_from_clients"]:
            text += f"  (extrapolated from {row['extrapolated_from_clients']} clients)"
        lines.append(text)
    lines += [
        f"{a['workload']:4.4} {a['peer']:12} not measured: {a['reason']}" for a in result["absent"]
    ]
    facts = result["machine"]
    lines.append(
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']} GB; "
        f"load before the run {facts['load_average']}"
        f"{' (BUSY: do not quote the ratios)' if facts['load_average'][0] > BUSY else ''}; "
        f"GEMM {facts['gemm_gflops'] or 'not measured'} GFLOPS (float32)"
    )
    lines.append(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    return "\n".join(lines)


def arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[Workload], list[str], dict[str, str]]:
    """(options, workloads, peers, the Python of each peer that has its own)."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounds_per_second",
        description=__doc__.splitlines()[0] if __doc__ else "",
        epilog="; ".join(f"{n}: {what[1]}" for n, what in PEERS.items()),
    )
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="comma-separated, or one as JSON"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--reference", default="ours", help="the peer all ratios are taken to")
    parser.add_argument("--pairs", type=int, default=5, help="rounds of each peer")
    parser.add_argument(
        "--budget",
        type=float,
        default=600,
        help="seconds per peer and workload; at least 3 pairs are run",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything here, after every peer")
    parser.add_argument("--logs", metavar="DIR", help="keep what the peers print")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="the Python in which a peer is installed (also FEDJAX_SIM_PEER_<NAME>)",
    )
    parser.add_argument("--no-gemm", action="store_true", help="do not measure the GEMM peak")
    options = parser.parse_args(argv)

    def known(names: list[str], table: dict[str, Any], kind: str) -> list[str]:
        for name in names:
            if name not in table:
                parser.error(f"unknown {kind} '{name}'; allowed: {', '.join(table)}")
        return names

    if options.workloads.startswith("{"):
        chosen = [from_text(options.workloads)]
    else:
        chosen = [
            WORKLOADS[name] for name in known(options.workloads.split(","), WORKLOADS, "workload")
        ]
    peers = known(options.peers.split(","), PEERS, "peer")
    known([options.reference], PEERS, "peer")
    key_of = {name: f"FEDJAX_SIM_PEER_{name.upper()}" for name in PEERS}
    pythons = {name: os.environ[key] for name, key in key_of.items() if key in os.environ}
    for pair in options.peer_python:
        name, _, python = pair.partition("=")
        known([name], PEERS, "peer")
        pythons[name] = python
    for name, python in pythons.items():
        if not os.access(python, os.X_OK):
            parser.error(f"the Python of peer '{name}' is not executable: '{python}'")
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs} must be at least 1")
    if options.logs:
        pathlib.Path(options.logs).mkdir(parents=True, exist_ok=True)
    return options, chosen, peers, pythons


def main(argv: Sequence[str] | None = None) -> int:
    options, chosen, peers, pythons = arguments(argv)
    bench = Bench(options, pythons)
    try:
        for workload in chosen:
            bench.run(workload, peers)
    except KeyboardInterrupt:
        say("interrupted; this is what was measured")
    print(table(bench.result()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
