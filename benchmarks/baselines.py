"""Every method in one comparable table: a subset of MNIST, 20 clients, Dirichlet 0.1, seeds fixed beforehand.

    python -m benchmarks.baselines --data-dir DATA [--methods fedavg,fedcp:lam=0,…] [--rounds 30] [--seeds 3] [--out FOLDER]

6,000 examples of MNIST, the same in every run; official train and test are merged and split 75/25 per client, everybody
takes part in every round, E = 1, B = 32, every method at its own defaults, lr 0.02 and momentum 0.9 (--lr, --momentum)
unless it has its own. Seeds 0, 1, 2, … change initial weights and shuffles, not the partition. Accuracy is that of the
model each client would use, on its own test rows after the last round: mean over clients, and mean of the worst tenth.
Differences to local training and to FedAvg are paired: by seed and client, with a 95 % bootstrap interval over the
clients' mean differences. Bytes are per round and participant. A method that needs rows this protocol does not have is
named, not run.
Writes FOLDER/baselines.csv and FOLDER/baselines.json.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np

from fedjax_sim.data.protocols import federate
from fedjax_sim.data.sources import Dataset, load
from fedjax_sim.errors import UserError
from fedjax_sim.methods import METHODS
from fedjax_sim.runner.config import UNSAID, Config
from fedjax_sim.runner.facts import facts
from fedjax_sim.runner.files import write_json
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.runner.seeds import run_seeds

REFERENCES = ("local", "fedavg")
DRAWS = 2000  # of the bootstrap


def subset(data: Dataset, examples: int) -> Dataset:
    """The same `examples` rows of a dataset every time, five of six from its training part."""
    rng = np.random.default_rng(6000)
    train, test = examples - examples // 6, examples // 6
    if len(data.y_train) < train or len(data.y_test) < test:
        raise UserError(f"examples {examples} is more than '{data.name}' has; allowed: up to {6 * len(data.y_train) // 5}")
    a, b = rng.permutation(len(data.y_train))[:train], rng.permutation(len(data.y_test))[:test]
    return dataclasses.replace(
        data, x_train=data.x_train[a], y_train=data.y_train[a], x_test=data.x_test[b], y_test=data.y_test[b]
    )


def run_method(name: str, args: argparse.Namespace, fed: Any) -> dict[str, Any]:
    """One method (NAME or NAME:option=value:…), all seeds: per-client accuracies [seeds, N] and what it costs."""
    method, *given = name.split(":")
    config = Config(
        method=method,
        options=dict(item.split("=", 1) for item in given),
        model=args.model,
        participation="1",
        rounds=args.rounds,
        eval_every=args.rounds,
        epochs=1.0,
        batch_size=32,
        weight_decay=0.0,
        evaluations=("personal",),
        seed=0,
        **{k: v for k in UNSAID if (v := getattr(args, k)) is not None},
    )
    setup = prepare(config, fed=fed)
    sizes = facts(setup)
    results = run_seeds(setup, args.seeds, None)
    accuracy = np.stack([r.clients["personal_correct"][-1] / np.maximum(r.clients["personal_count"], 1) for r in results])
    wire = setup.simulation.method.wire(setup.simulation.env, setup.net)
    several = setup.participation.high
    total = [sizes["down"] / several, sizes["up"] / several]
    return dict(
        method=name,
        lr=setup.config.lr,
        momentum=setup.config.momentum,
        accuracy=accuracy,
        down=total[0] - wire.beside_down // 8,
        up=total[1] - wire.beside_up // 8,
        down_total=total[0],
        up_total=total[1],
        client_state=sizes["per_client"],
        seconds=float(np.mean([r.summary["seconds_per_round"] for r in results])),
        diverged=int(sum(r.summary["diverged"] for r in results)),
    )


def interval(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """(mean, low, high) of paired differences [seeds, N] in points; clients are drawn with replacement.

    >>> interval(np.full((2, 5), 0.75), np.full((2, 5), 0.5))
    (25.0, 25.0, 25.0)
    """
    gain = 100 * (ours - theirs).mean(0)  # [N]: seeds of one client are not independent
    rng = np.random.default_rng(0)
    means = gain[rng.integers(0, len(gain), (DRAWS, len(gain)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(gain.mean()), float(low), float(high)


def row(found: dict[str, Any], references: dict[str, np.ndarray]) -> dict[str, Any]:
    """The figures of one method."""
    accuracy = found["accuracy"]
    worst = np.sort(accuracy, 1)[:, : max(1, -(-accuracy.shape[1] // 10))].mean(1)
    means = 100 * accuracy.mean(1)
    out = dict(method=found["method"], mean=means.mean(), std=means.std(ddof=1) if len(means) > 1 else 0.0)
    out["worst"] = 100 * worst.mean()
    for name, theirs in references.items():
        out[f"vs_{name}"], out[f"vs_{name}_low"], out[f"vs_{name}_high"] = interval(accuracy, theirs)
    keys = ("lr", "momentum", "down", "up", "down_total", "up_total", "client_state", "seconds", "diverged")
    return {k: v if isinstance(v, str) else round(float(v), 4) for k, v in (out | {k: found[k] for k in keys}).items()}


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table; differences in points with their intervals, bytes in kB (1 kB = 1,000 bytes)."""
    names = [n for n in REFERENCES if rows and f"vs_{n}" in rows[0]]
    head = ["method", "mean %", "worst 10 % of clients", *(f"vs {n}" for n in names), "down / up, kB", "total down / up, kB"]
    head += ["state per client, kB", "s/round"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    kb = lambda *values: " / ".join(f"{v / 1000:.1f}" for v in values)
    for r in rows:
        cells = [f"`{r['method']}`", f"{r['mean']:.2f} ± {r['std']:.2f}", f"{r['worst']:.2f}"]
        cells += [f"{r[f'vs_{n}']:+.2f} [{r[f'vs_{n}_low']:+.2f}, {r[f'vs_{n}_high']:+.2f}]" for n in names]
        cells += [kb(r["down"], r["up"]), kb(r["down_total"], r["up_total"]), kb(r["client_state"]), f"{r['seconds']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    data = subset(load(args.dataset, data_dir=args.data_dir), args.examples)
    fed = federate(data, args.partition, args.clients, "pfllib", norm="pfllib", batch_size=32)
    found: dict[str, dict[str, Any]] = {}
    for name in [*REFERENCES, *(m for m in args.methods if m not in REFERENCES)]:
        try:
            found[name] = run_method(name, args, fed)
            print(f"{name}: {100 * found[name]['accuracy'].mean():.2f} %", file=sys.stderr, flush=True)
        except UserError as problem:
            print(f"{name} was not run: {problem}", file=sys.stderr, flush=True)
    references = {name: found[name]["accuracy"] for name in REFERENCES}
    rows = [row(one, references) for one in found.values()]
    return sorted(rows, key=lambda r: -r["mean"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--examples", type=int, default=6000)
    parser.add_argument("--partition", default="dirichlet:0.1")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=None, help="of all methods")
    parser.add_argument("--momentum", type=float, default=None, help="of all methods")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/baselines"))
    args = parser.parse_args(argv)
    try:
        rows = compare(args)
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items() if k != "data_dir"}
    write_json(args.out / "baselines.json", dict(settings=settings, rows=rows))
    with (args.out / "baselines.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))
    print(json.dumps(settings))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
