"""Q-bandit on real MNIST and CIFAR-10: exceedances and accuracy of the learner beside FedAvg, random and compliant policies.

    python -m benchmarks.qbandit --data-dir DATA [--data-dir MORE] --out FOLDER      # goes on where it was stopped
    python -m benchmarks.qbandit --out FOLDER --table                                # what is there so far

A fixed subset of 5,000 training examples (`mnist:train=5000`), Dirichlet α ∈ {1, 5}, 10 clients with the budgets of Table 1,
everybody in every round, 100 rounds, B = 64, lr 0.01, momentum 0.9 (the paper does not say), cnn6, crop and flip on
CIFAR-10. Seeds change initial weights, shuffles and the agent's draws, not subset and partition. Accuracy is on a fixed
subset of the standard test set (`--test`, 0: all of it): the mean over the clients' composed models, and the server's.

    fedavg          E = 1, all layers                   random         uniform over the 36 actions
    compliant       the largest depth and epochs within budget
    clipped         the learner, its actions cut to the budgets
    learner-round   reward: the paper's sum over clients
    learner-client  reward: each client's own terms     also: layers-round, layers-client, epochs-round, epochs-client

Conditions beyond the paper are options: --vary 0.5:20, --stragglers 0.3:0.2, --dropout 0.2.
Writes FOLDER/runs.jsonl (a line per finished run), FOLDER/rounds/*.csv (every round of each), FOLDER/layer_distance.csv
and .png (FedAvg: mean ‖w_k^ℓ − w_g^ℓ‖ per layer and round).
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import ledger
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.runner.config import Config
from fedjax_sim.runner.driver import Result, drive
from fedjax_sim.runner.prepare import load_federation, prepare, want_host_devices
from fedjax_sim.runner.seeds import with_seed

ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {"agent": "full"},
    "random": {"agent": "random"},
    "compliant": {"agent": "compliant"},
    "clipped": {"clip": True},
    "learner-round": {"scope": "round"},
    "learner-client": {"scope": "client"},
    "layers-round": {"control": "layers", "scope": "round"},
    "layers-client": {"control": "layers", "scope": "client"},
    "epochs-round": {"control": "epochs", "scope": "round"},
    "epochs-client": {"control": "epochs", "scope": "client"},
}
TABLE = "fedavg,random,compliant,clipped,learner-round,learner-client"
# (compute, communication) exceedances of the paper's learner in 100 rounds; its baseline counts 400 everywhere
PUBLISHED = {
    ("cifar10", 1.0): {"joint": (296, 321), "layers": (None, 351), "epochs": (332, None)},
    ("cifar10", 5.0): {"joint": (322, 396), "layers": (None, 359), "epochs": (339, None)},
    ("mnist", 1.0): {"joint": (331, 353), "layers": (None, 361), "epochs": (352, None)},
    ("mnist", 5.0): {"joint": (300, 386), "layers": (None, 346), "epochs": (336, None)},
}
# of 100 rounds with the budgets of Table 1
EXPECTED = {"fedavg": (400, 800), "random": (366.7, 383.3), "compliant": (0, 0)}
LAST = 30  # rounds of the second pair of counts, when the agent hardly explores any more
SETTING = ("rounds", "train", "test", "model", "channels", "hidden", "batch_size", "lr", "momentum")
SETTING += ("vary", "stragglers", "dropout", "clients")


# ---- running ------------------------------------------------------------------------------------------------------
def config_of(args: argparse.Namespace, dataset: str, alpha: float, row: str) -> Config:
    sizes = [f"{name}={n}" for name, n in (("train", args.train), ("test", args.test)) if n]
    spec = f"{dataset}:{','.join(sizes)}" if sizes else dataset
    return Config(
        method="qbandit",
        options=ROWS[row] | {"vary": args.vary},
        dataset=spec,
        data_dir=folder_of(args.data_dir, dataset),
        partition=f"dirichlet:{alpha:g}",
        protocol="qbandit",
        clients=args.clients,
        participation="1",
        model=args.model,
        model_options={name: getattr(args, name) for name in ("channels", "hidden") if getattr(args, name)},
        rounds=args.rounds,
        epochs=1.0,
        batch_size=args.batch_size,
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=0.0,
        dropout=args.dropout,
        stragglers=args.stragglers,
        eval_every=args.evaluate_every,
        evaluations=("global", "personal@global"),
        probe=row == "fedavg",  # distances per layer
        devices=args.devices,
    )


def folder_of(folders: list[str], dataset: str) -> str | None:
    """The first of the data folders that has the dataset."""
    found = [f for f in folders if (pathlib.Path(f) / f"{dataset}.npz").exists()]
    return (found or folders or [None])[0]


def key_of(args: argparse.Namespace, dataset: str, alpha: float, row: str, seed: int) -> dict[str, Any]:
    """What tells one run from another."""
    return dict(dataset=dataset, alpha=alpha, row=row, seed=seed) | {name: getattr(args, name) for name in SETTING}


def figures(result: Result) -> dict[str, Any]:
    """The figures of one finished run."""
    rounds, end = result.rounds, result.rows[-1]
    count = lambda name, rows: int(sum(r[name] for r in rows))
    return dict(
        exceed_compute=count("exceed_compute", rounds),
        exceed_comm=count("exceed_comm", rounds),
        last_compute=count("exceed_compute", rounds[-LAST:]),
        last_comm=count("exceed_comm", rounds[-LAST:]),
        client_acc=end["personal_at_global_mean"],
        global_acc=end["global_acc"],
        bytes=end["bytes_down"] + end["bytes_up"],
        pairwise_distance=rounds[-1]["pairwise_distance"],
        mean_epochs=float(np.mean([v for r in rounds for k, v in r.items() if k.startswith("epochs_")])),
        mean_depth=float(np.mean([v for r in rounds for k, v in r.items() if k.startswith("depth_")])),
        diverged=count("diverged", rounds),
        seconds_per_round=result.summary["seconds_per_round"],
        evaluations=[
            {k: v for k, v in r.items() if k in ("round", "global_acc", "personal_at_global_mean")} for r in result.rows
        ],
    )


def run_missing(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every run that is not in the file yet, as soon as it is done; the seeds of one row share a compiled program."""
    there = ledger.read(args.out / "runs.jsonl")
    for dataset in args.datasets:
        for alpha in args.alphas:
            fed = None
            for row in args.rows:
                keys = [key_of(args, dataset, alpha, row, seed) for seed in args.seeds]
                keys = [key for key in keys if not any(key.items() <= run.items() for run in there)]
                if not keys:
                    continue
                config = config_of(args, dataset, alpha, row)
                fed = load_federation(config) if fed is None else fed
                setup, program = prepare(config, fed=fed, measure=False), None
                for key in keys:
                    (result,) = drive([with_seed(setup, key["seed"])], [None], program=program)
                    program = result.program
                    write_rounds(args.out / "rounds" / f"{name_of(key)}.csv", result.rounds)
                    yield key | figures(result)


def name_of(key: dict[str, Any]) -> str:
    """A file name for one run: what it is, and every setting that is not the default, so that two never share a file.

    >>> name_of(dict(dataset="mnist", alpha=1.0, row="fedavg", seed=0, vary="0.5:20", model="cnn6", dropout=0.1))
    'mnist-a1-fedavg-s0-vary0.5_20-dropout0.1'
    """
    usual = vars(make_parser().parse_args([]))
    extra = [f"-{k}{key[k]}".replace(":", "_") for k in SETTING if k in key and key[k] != usual[k]]
    return f"{key['dataset']}-a{key['alpha']:g}-{key['row']}-s{key['seed']}{''.join(extra)}"


def write_rounds(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


# ---- showing ------------------------------------------------------------------------------------------------------
def table(runs: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Markdown, one block per dataset and α: mean ± standard deviation over the seeds that are there."""
    setting = {name: getattr(args, name) for name in SETTING}
    runs = [r for r in runs if setting.items() <= r.items()]
    if not runs:
        return f"no run with this setting yet: {', '.join(f'{k} {v}' for k, v in setting.items())}"
    tests = f"{args.test} examples of the test set" if args.test else "the standard test set"
    size = "".join(f", {name} {value}" for name in ("channels", "hidden") if (value := getattr(args, name)))
    data = f"{args.train or 'all'} training examples; accuracy on {tests}"
    lines = [f"{args.rounds} rounds, {args.clients} clients, {args.model}{size}, {data}."]
    for dataset, alpha in dict.fromkeys((r["dataset"], r["alpha"]) for r in runs):
        block = [r for r in runs if (r["dataset"], r["alpha"]) == (dataset, alpha)]
        head = ["policy", "seeds", "compute", "comm", f"last {LAST}: compute", "comm", "clients %", "server %"]
        head += ["epochs", "depth", "GB", "pairwise distance", "s/round"]
        lines += ["", f"{dataset}, α = {alpha:g}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in [name for name in ROWS if any(r["row"] == name for r in block)]:
            lines.append(line_of(row, [r for r in block if r["row"] == row]))
        scale = args.rounds / 100
        told = [f"{name} {a * scale:.1f} / {b * scale:.1f}" for name, (a, b) in EXPECTED.items()]
        lines += ["", f"expected from the budgets, compute / comm: {', '.join(told)}"]
        found = PUBLISHED.get((dataset, alpha), {})
        shown = lambda pair: ", ".join(f"{w} 400 → {n}" for w, n in zip(("compute", "comm"), pair, strict=True) if n)
        lines += [
            f"published, 100 rounds: {'; '.join(f'{control} {shown(pair)}' for control, pair in found.items())}"
        ] * bool(found)
    return "\n".join(lines)


def line_of(row: str, runs: list[dict[str, Any]]) -> str:
    def cell(name: str, scale: float = 1.0, digits: int = 1) -> str:
        values = scale * np.array([r[name] for r in runs], float)
        spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
        return f"{values.mean():.{digits}f}{spread}"

    cells = [f"`{row}`", str(len(runs))]
    cells += [cell(name) for name in ("exceed_compute", "exceed_comm", "last_compute", "last_comm")]
    cells += [cell("client_acc", 100, 2), cell("global_acc", 100, 2), cell("mean_epochs", 1, 2), cell("mean_depth", 1, 2)]
    cells += [cell("bytes", 2**-30, 3), cell("pairwise_distance", 1, 2), cell("seconds_per_round", 1, 2)]
    return "| " + " | ".join(cells) + " |"


def layer_distances(runs: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the FedAvg runs: per dataset, α, round and layer the distance of the clients to the server, mean over seeds."""
    setting = {name: getattr(args, name) for name in SETTING} | {"row": "fedavg"}
    found: dict[tuple, list[float]] = {}
    for run in runs:
        path = args.out / "rounds" / f"{name_of(run)}.csv"
        if not setting.items() <= run.items() or not path.exists():
            continue
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                for name in (n for n in line if n.startswith("layer_dist_")):
                    at = (run["dataset"], run["alpha"], int(line["round"]), name.removeprefix("layer_dist_"))
                    found.setdefault(at, []).append(float(line[name]))
    columns = ("dataset", "alpha", "round", "layer")
    return [dict(zip(columns, at, strict=True)) | dict(distance=float(np.mean(v)), seeds=len(v)) for at, v in found.items()]


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """One panel per dataset and α, one line per layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((r["dataset"], r["alpha"]) for r in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), squeeze=False, layout="constrained")
    for axis, (dataset, alpha) in zip(axes[0], panels, strict=True):
        here = [r for r in rows if (r["dataset"], r["alpha"]) == (dataset, alpha)]
        for layer in dict.fromkeys(r["layer"] for r in here):
            line = sorted((r["round"], r["distance"]) for r in here if r["layer"] == layer)
            axis.plot(*zip(*line, strict=True), label=layer)
        axis.set(title=f"{dataset}, α = {alpha:g}", xlabel="round")
    axes[0][0].set_ylabel("mean distance of clients to the server")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show(args: argparse.Namespace) -> None:
    runs = ledger.read(args.out / "runs.jsonl")
    print(table(runs, args))
    distances = layer_distances(runs, args)
    if not distances:
        return
    write_rounds(args.out / "layer_distance.csv", distances)
    try:
        draw(distances, args.out / "layer_distance.png")
    except ImportError:
        print("layer_distance.png needs matplotlib: pip install 'fedjax-sim[report]'", file=sys.stderr)


# ---- the command line ---------------------------------------------------------------------------------------------
def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda kind: lambda text: [kind(word) for word in text.split(",") if word]
    parser.add_argument("--data-dir", action="append", default=[], metavar="DIR", help="may be given several times")
    parser.add_argument("--datasets", type=words(str), default=["mnist", "cifar10"])
    parser.add_argument("--alphas", type=words(float), default=[1.0, 5.0])
    parser.add_argument("--rows", type=words(str), default=TABLE.split(","))
    parser.add_argument("--seeds", type=words(int), default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--train", type=int, default=5000, help="training examples, 0: all")
    parser.add_argument("--test", type=int, default=2000, help="test examples, 0: all")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--model", default="cnn6")
    parser.add_argument("--channels", default="", metavar="8x8x16x16", help="of the convolutions, for a smaller network")
    parser.add_argument("--hidden", default="", metavar="64", help="width of the hidden layers, likewise")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--vary", default="0", help="budgets that swing: v or v:period")
    parser.add_argument("--stragglers", default="0", help="p or p:least")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/qbandit"))
    parser.add_argument("--table", action="store_true", help="only show what is there")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        for row in args.rows:
            lookup("row", row, ROWS)
        if not args.table:
            args.out.mkdir(parents=True, exist_ok=True)
            want_host_devices(config_of(args, "digits", 1.0, "fedavg"))
            for found in run_missing(args):
                ledger.append(args.out / "runs.jsonl", found)
                told = f"compute {found['exceed_compute']}, comm {found['exceed_comm']}"
                print(f"{name_of(found)}: {told}, {found['seconds_per_round']:.2f} s/round", file=sys.stderr, flush=True)
    except UserError as problem:
        print(f"benchmarks.qbandit: {problem}", file=sys.stderr)
        return 2
    show(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
