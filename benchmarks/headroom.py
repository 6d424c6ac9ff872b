"""Is there anything to win by redistribution? Rules that need no learning, an oracle and the
baselines, paired with `full` on identical draws.

    python -m benchmarks.headroom --scale small --data-dir DATA --out docs/results
    python -m benchmarks.headroom --scale smoke --out FOLDER          the embedded digits, a minute
    python -m benchmarks.headroom --system pfedrlla …                 the other systems

Four goals: accuracy of the global model (mean of the last evaluations), mean of the clients' own
models, their worst tenth, and accuracy of the global model when half of the bytes of `full` are
spent. Learning rates (of `full`, constant and cosine, and of every baseline) and the best rule of a
goal are chosen on federations of their own, made of other images. Finished runs are lines of
headroom-SCALE.jsonl: a stopped table resumes where it was. Written: headroom.json and headroom.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import headroom_page, ledger
from benchmarks.headroom_oracle import branch_gains, oracle_curves
from benchmarks.headroom_runs import (
    SCALES,
    Program,
    Scale,
    Variant,
    federation,
    goals,
    half_of_full,
    run_variants,
    simulation,
)
from fedjax_sim.errors import UserError

SYSTEMS = ("fedpolicy", "pfedrlla", "qbandit")
# row -> rule; what every participant sends is `all`, or with `taken` only what it took
TAKES = {
    "full": "",
    "backbone": "keep_head",
    "head": "keep_backbone",
    "random": "keep_head: chance<0.3333; keep_backbone: chance>0.6667",
    "few classes < 1.5 keep head": "keep_head: effective_classes<1.5",
    "few classes < 2.5 keep head": "keep_head: effective_classes<2.5",
    "few classes < 4 keep head": "keep_head: effective_classes<4",
    "many classes > 2.5 keep head": "keep_head: effective_classes>2.5",
    "small < 0.5 keep head": "keep_head: relative_size<0.5",
    "large > 1.5 keep head": "keep_head: relative_size>1.5",
    "away > 10 rounds keep head": "keep_head: staleness>10",
    "here < 4 rounds ago keep head": "keep_head: staleness<4",
    "backbone before 0.3": "keep_head: progress<0.3",
    "backbone after 0.5": "keep_head: progress>0.5",
    "backbone after 0.8": "keep_head: progress>0.8",
    "20 % keep head": "keep_head: chance<0.2",
    "keep backbone after 0.8": "keep_backbone: progress>0.8",
    "20 % keep backbone": "keep_backbone: chance<0.2",
    "few classes < 2.5 keep backbone": "keep_backbone: effective_classes<2.5",
}
SENDS = {
    "few classes < 1.5 withhold head": "withhold_head: effective_classes<1.5",
    "few classes < 2.5 withhold head": "withhold_head: effective_classes<2.5",
    "few classes < 1.5 send nothing": (
        "withhold_head: effective_classes<1.5; withhold_backbone: effective_classes<1.5"
    ),
    "small < 0.5 withhold head": "withhold_head: relative_size<0.5",
    "small < 0.5 send nothing": (
        "withhold_head: relative_size<0.5; withhold_backbone: relative_size<0.5"
    ),
    "20 % withhold head": "withhold_head: chance<0.2",
    "backbone, head weighs 1/√(1+staleness)": "keep_head; discount: 0.5",
    "backbone, head weighs 1/(1+staleness)": "keep_head; discount: 1",
    "few < 2.5 keep head, it weighs 1/(1+staleness)": (
        "keep_head: effective_classes<2.5; discount: 1"
    ),
}
# one call of the program
C3E = (
    "full",
    "backbone",
    "backbone, `taken`",
    "few classes < 2.5 keep head",
    "few classes < 1.5 keep head, `taken`",
    "few classes < 2.5 keep head, `taken`",
    "few classes < 4 keep head, `taken`",
    "many classes > 2.5 keep head, `taken`",
    "small < 0.5 keep head, `taken`",
    "away > 10 rounds keep head, `taken`",
    "backbone after 0.8, `taken`",
    "20 % keep head, `taken`",
    "keep backbone after 0.8, `taken`",
    "few classes < 2.5 withhold head",
    "small < 0.5 send nothing",
    "random",
)
BASELINES = ("fedper", "ditto", "fedrod")
SCHEDULES = ("constant", "cosine")
ORACLES = (0.0, 0.5, 1.0)  # w of the objective
BRANCHES = (0.2, 0.5, 0.8)  # of the rounds


def ruled(loss: str = "ce", weights: str = "uniform", width: int = 16) -> Program:
    """Every rule in one program; the rule of the options is replaced variant by variant."""
    options = dict(agent="rule", rule="keep_head; keep_head", weights=weights)
    return Program("fedpolicy", tuple(options.items()), loss, width)


def ruled_variants(schedule: str, rate: float) -> list[Variant]:
    """All rules at a rate; rules that keep something also with `taken`."""
    cosine = schedule == "cosine"
    every = [Variant(row, rule, rate, cosine) for row, rule in {**TAKES, **SENDS}.items()]
    return every + [
        Variant(f"{row}, `taken`", rule, rate, cosine, True) for row, rule in TAKES.items() if rule
    ]


class Table:
    """The finished runs, and those that are made."""

    def __init__(self, scale: Scale, data_dir: str | None, path: pathlib.Path):
        self.scale, self.data_dir, self.path = scale, data_dir, path
        self.runs = ledger.read(path)
        self.keys = {self.key(run) for run in self.runs}

    @staticmethod
    def key(run: dict[str, Any]) -> tuple:
        return tuple(run[k] for k in ("data", "alpha", "seed", "tuning", "part", "row", "rate"))

    def add(self, where: dict[str, Any], part: str, row: str, rate: float, **found: Any) -> None:
        run = dict(where, part=part, row=row, rate=rate, **found)
        self.runs.append(run)
        self.keys.add(self.key(run))
        ledger.append(self.path, run)

    def run(
        self, where: dict[str, Any], part: str, program: Program, variants: list[Variant]
    ) -> None:
        """Run the variants of a program on one federation if any is not there yet (all or none: the
        program has one width)."""
        missing = [
            one
            for one in variants
            if self.key(dict(where, part=part, row=one.row, rate=one.rate)) not in self.keys
        ]
        if not missing:
            return
        began = time.perf_counter()
        compiled = simulation(self.scale, program, where["data"], self.data_dir)
        found = run_variants(self.scale, compiled, self.fed(where), variants, where["seed"])
        budget = half_of_full(self.scale, compiled.sim)
        for variant, curves in zip(variants, found, strict=True):
            if variant in missing:
                scores = goals(curves, budget, self.scale.last)
                self.add(
                    where, part, variant.row, variant.rate, **scores, bytes=curves["bytes"][-1]
                )
        print(f"{where} {part}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)

    def fed(self, where: dict[str, Any]) -> Any:
        return federation(
            self.scale, where["data"], self.data_dir, where["alpha"], where["seed"], where["tuning"]
        )

    def best_rate(self, where: dict[str, Any], part: str, goal: str) -> float:
        """Of the rates of `full` tried on the tuning federations of a setting."""
        found: dict[float, list[float]] = {}
        for run in self.runs:
            fits = run["tuning"] and all(run[k] == where[k] for k in ("data", "alpha"))
            if fits and run["part"] == part and run["row"] == f"rate {run['rate']:g}":
                found.setdefault(run["rate"], []).append(run[goal])
        return max(found, key=lambda rate: float(np.mean(found[rate])))


def settings(scale: Scale) -> Iterator[dict[str, Any]]:
    for data in scale.datasets:
        for alpha in scale.alphas:
            yield dict(data=data, alpha=alpha)


def tune(table: Table, where: dict[str, Any], seed: int) -> None:
    """Learning rates of `full` under both schedules, and of `full` with the method's own loss."""
    at = dict(where, seed=seed, tuning=True)
    for schedule in SCHEDULES:
        variants = [
            Variant(f"rate {rate:g}", "", rate, schedule == "cosine") for rate in table.scale.rates
        ]
        table.run(at, schedule, ruled(), variants)
    variants = [Variant(f"rate {rate:g}", "", rate) for rate in table.scale.rates]
    table.run(at, "c3e", ruled("c3e"), variants)


def measure(table: Table, where: dict[str, Any], seed: int, tuning: bool) -> None:
    """All rows of one federation."""
    at = dict(where, seed=seed, tuning=tuning)
    rates = {part: table.best_rate(where, part, "global") for part in (*SCHEDULES, "c3e")}
    for schedule in SCHEDULES:
        table.run(at, schedule, ruled(), ruled_variants(schedule, rates[schedule]))
    few = [variant for variant in ruled_variants("constant", rates["c3e"]) if variant.row in C3E]
    table.run(at, "c3e", ruled("c3e"), few)
    sized = [Variant("full, weights by size", "", rates["constant"])]
    table.run(at, "constant", ruled(weights="size", width=1), sized)
    width = len(table.scale.rates)
    for name in BASELINES:
        variants = [Variant(f"{name} {rate:g}", "", rate) for rate in table.scale.rates]
        table.run(at, "baselines", Program(name, width=width), variants)


def consult(table: Table, where: dict[str, Any], seed: int) -> None:
    """The oracle on one federation, and what is left of its gain some rounds later."""
    at = dict(where, seed=seed, tuning=False)
    compiled = simulation(table.scale, ruled(), at["data"], table.data_dir)
    for schedule in SCHEDULES:
        rate = table.best_rate(where, schedule, "global")
        rows = [f"oracle w={weight:g}" for weight in ORACLES]
        missing = [
            row
            for row in rows
            if table.key(dict(at, part=schedule, row=row, rate=rate)) not in table.keys
        ]
        if not missing:
            continue
        began = time.perf_counter()
        given = table.scale, compiled, table.fed(at), seed, rate, rate * (schedule == "constant")
        found, later = oracle_curves(*given, ORACLES), branch_gains(*given, BRANCHES)
        budget = half_of_full(table.scale, compiled.sim)
        for row, curves in zip(rows, found, strict=True):
            if row not in missing:
                continue
            scores = goals(curves, budget, table.scale.last)
            extra = dict(branches=later) if row == rows[0] else {}
            table.add(at, schedule, row, rate, **scores, bytes=curves["bytes"][-1], **extra)
        print(f"{at} {schedule} oracle: {time.perf_counter() - began:.1f} s", file=sys.stderr)


def fill(table: Table, oracle_seeds: int) -> None:
    """Every run of the table that is missing."""
    scale = table.scale
    for where in settings(scale):
        for seed in range(scale.tuning):
            tune(table, where, seed)
        for seed in range(scale.tuning):
            measure(table, where, seed, True)
    for seed in range(scale.seeds):
        for where in settings(scale):
            measure(table, where, seed, False)
            if seed < oracle_seeds:
                consult(table, where, seed)


def main(given: list[str] | None = None) -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--system", choices=SYSTEMS, default="fedpolicy")
    chosen, rest = first.parse_known_args(given)
    if chosen.system != "fedpolicy":
        raise SystemExit(importlib.import_module(f"benchmarks.headroom_{chosen.system}").main(rest))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=tuple(SCALES), default="small")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", default="docs/results", help="folder of headroom.json and .md")
    parser.add_argument("--work", default=None, help="folder of the finished runs; default: --out")
    parser.add_argument("--oracle-seeds", type=int, default=10)
    parser.add_argument("--only-page", action="store_true", help="write from what is finished")
    args = parser.parse_args(rest)
    out, work = pathlib.Path(args.out), pathlib.Path(args.work or args.out)
    table = Table(SCALES[args.scale], args.data_dir, work / f"headroom-{args.scale}.jsonl")
    try:
        if not args.only_page:
            fill(table, args.oracle_seeds)
        out.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(row) for row in headroom_page.numbers(table.runs))
        (out / "headroom.json").write_text(f"[\n{rows}\n]\n")
        headroom_page.write(out / "headroom.md", args.scale, table.scale, table.runs)
    except UserError as problem:
        raise SystemExit(f"benchmarks.headroom: {problem}") from None


if __name__ == "__main__":
    main()
