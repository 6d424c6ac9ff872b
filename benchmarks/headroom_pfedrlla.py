"""Do the weights of heads matter? Rules for pFedRLLA's heads, compared on the same draws.

    python -m benchmarks.headroom_pfedrlla [--data-dir DATA] [--out docs/results] [--seeds 5]
    [--scale small|smoke] [--rules even,weighted,…]

Small federations: images averaged over squares of four pixels, a network of one hidden layer, its
classifier the head; 20 clients of s classes each, four per round, 40 rounds of two epochs. The
figure is the accuracy of each client's resident model on its own test rows, after local training:
the mean over all clients and the last evaluations. Differences are to equal weights (`even`), seed
by seed. Finished runs are not repeated.

V_k^p of the paper's reward needs an encoder. `similarity:p` = exp(p cos) uses the same similarities
of the heads themselves.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import headroom_small as small

RULES = ("even", "weighted", "local", "similarity:2", "similarity:5", "similarity:10",
         "same_classes:1", "same_classes:4", "gradient", "bandit", "pairs")  # fmt: skip
SCALES: dict[str, dict[str, Any]] = {
    "small": dict(
        settings={"cifar10, 2 classes": ("cifar10", 4, 2), "cifar10, 5 classes": ("cifar10", 4, 5),
                  "mnist, 2 classes": ("mnist", 4, 2)},
        clients=20, cohort=4, rounds=40, every=5, last=3, hidden=32, rows=40,
    ),
    "smoke": dict(
        settings={"digits, 2 classes": ("digits", 2, 2)},
        clients=6, cohort=3, rounds=2, every=1, last=1, hidden=8, rows=10,
    ),
}  # fmt: skip


def federations(scale: dict[str, Any], name: str, data_dir: str | None, seeds: int) -> list:
    dataset, pool, each = scale["settings"][name]
    data = small.images(dataset, data_dir, pool)
    # unequal clients, the same sizes for every seed
    rows = [scale["rows"] * (1 + k % 3) for k in range(scale["clients"])]
    sizes = [(n, max(4, n // 4), max(8, n // 2)) for n in rows]
    out = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, each])
        shares = small.few_classes(scale["clients"], 10, each, rng)
        out.append(small.federation(data, shares, sizes, rng, test=200))
    return out


def program(scale: dict[str, Any], rule: str, fed: Any) -> small.Program:
    return small.Program(
        "pfedrlla",
        fed,
        "resident",
        head=rule,
        head_layers="last",
        model="mlp",
        model_options={"hidden": (scale["hidden"],)},
        participation=f"{scale['cohort']}/{scale['clients']}",
        rounds=scale["rounds"],
        epochs=2,
        batch_size=20,
        lr=0.05,
        momentum=0.5,
        weight_decay=0.0,
        eval_every=scale["every"],
        chunk=str(scale["cohort"]),
    )


def measure(args: argparse.Namespace, path: pathlib.Path) -> dict[str, Any]:
    scale, found = SCALES[args.scale], small.read(path)
    for name in scale["settings"]:
        feds = federations(scale, name, args.data_dir, args.seeds)
        for rule in args.rules.split(","):
            values = found.setdefault(name, {}).setdefault(rule, [])
            if len(values) >= args.seeds:
                continue
            compiled = program(scale, rule, feds[0])
            for seed in range(len(values), args.seeds):
                values.append(compiled.run(feds[seed], seed, scale["last"])[0])
            small.write(path, found)
            print(f"{name}: {rule}: {[round(value, 2) for value in values]}", flush=True)
    return found


def lines(found: dict[str, Any], scale: str) -> list[str]:
    """The tables in Markdown."""
    out = [f"`python -m benchmarks.headroom_pfedrlla --scale {scale} --data-dir DATA`: see its"
           " docstring for the setting. Accuracy of the clients' resident models on their own test"
           " rows, after local training, mean of the last evaluations; paired differences with"
           " 95 % intervals over seeds."]  # fmt: skip
    for name, rules in found.items():
        out += ["", f"## {name}", "", *small.table(rules, "even")]
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = small.parser("Do the weights of heads matter?", SCALES)
    parser.add_argument("--rules", default=",".join(RULES))
    title = "What can be won by weights of heads (pFedRLLA)"
    return small.main(parser.parse_args(argv), "pfedrlla", title, measure, lines)


if __name__ == "__main__":
    sys.exit(main())
