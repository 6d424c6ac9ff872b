"""Does a controller pay? FedPolicy's policies and rewards on real Fashion-MNIST in the paper's setting, three seeds.

    python -m benchmarks.fedpolicy_table --data-dir DATA --out FOLDER [--partition dirichlet:0.1] [--rows full,sac,…]
    python -m benchmarks.fedpolicy_table --out FOLDER --table

LeNet-5, 100 clients, 10 per round, E = 5, B = 64, lr 0.01, momentum 0.9, weight decay 5e-4, C3E for every row, evaluated
after every round; seeds 0, 1, 2 (fixed beforehand) change initial weights, cohorts, shuffles and draws, not the partition.
Test data choose nothing: `by val` is the round that was best on the server's validation rows. Every finished run is
appended to FOLDER/runs.jsonl and skipped the next time, so that a stopped table goes on. `--table` prints what is there
and writes FOLDER/fedpolicy.md, FOLDER/fedpolicy.csv and FOLDER/front.png, accuracy against bytes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np

from benchmarks import ledger
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.runner.config import Config
from fedjax_sim.runner.driver import Result
from fedjax_sim.runner.prepare import load_federation, prepare, want_host_devices
from fedjax_sim.runner.seeds import run_seeds, with_seed

# what each row asks of `fedpolicy`
ROWS: dict[str, dict[str, Any]] = {
    "full": {"agent": "full"},
    "backbone": {"agent": "backbone"},
    "head": {"agent": "head"},
    "random": {"agent": "random"},
    "oracle": {"agent": "oracle"},
    "sac": {},
    "trpo": {"agent": "trpo"},
    "a2c": {"agent": "a2c"},
    "ppo": {"agent": "ppo"},
    "dqn": {"agent": "dqn"},
    "sac, λ 1": {"lam": 1.0},
    "sac, local": {"reward": "local"},
    "sac, global": {"reward": "global"},
    "sac, contribution": {"reward": "contribution"},
    "sac, mixture λ 1": {"reward": "mixture", "lam": 1.0},
    "sac, S' at participation": {"next_state": "participation"},
    "sac, Adam 0.05": {"agent.lr": 0.05},
    "sac, SGD 0.05": {"agent.lr": 0.05, "agent.optimizer": "sgd"},
}
GIB = 2**30


def base_config(args: argparse.Namespace) -> Config:
    return Config(
        method="fedpolicy",
        dataset=args.dataset,
        data_dir=args.data_dir,
        partition=args.partition,
        protocol="fedpolicy",
        model=args.model,
        clients=args.clients,
        participation=f"{args.cohort}/{args.clients}",
        rounds=args.rounds,
        epochs=args.epochs,
        batch_size=64,
        lr=0.01,
        momentum=0.9,
        weight_decay=5e-4,
        loss="c3e",
        eval_every=1,
        evaluations=("global", "personal"),
        seed=0,
        chunk=args.chunk,
        devices=args.devices,
    )


def figures(row: str, args: argparse.Namespace, result: Result) -> dict[str, Any]:
    """One run: the reported accuracies in %, bytes in GiB, what the controller did, and the curve."""
    acc = np.array([r["global_acc"] for r in result.rows])
    val = np.array([r["val_acc"] for r in result.rows])
    total = {n: sum(r[n] for r in result.rounds) for n in ("action_full", "action_backbone", "action_head")}
    last, decisions = result.rounds[-1], max(sum(total.values()), 1)
    agent: dict[str, float] = {n.removeprefix("agent_"): v for n, v in last.items() if n.startswith("agent_")}
    later = result.rounds[args.rounds // 5 :]  # the first transitions are too few to tell anything from
    live = (
        [min(r[f"agent_live_{n}"] for n in ("policy", "critic") if f"agent_live_{n}" in r) for r in later] if agent else []
    )
    return dict(
        row=row,
        partition=args.partition,
        seed=result.summary["seed"],
        rounds=len(result.rounds),
        best=100 * acc.max(),
        by_val=100 * acc[int(val.argmax())],
        best_val=100 * val.max(),
        last=100 * acc[-1],
        last_ten=100 * acc[-10:].mean(),
        clients=100 * result.rows[-1]["client_mean"],
        worst=100 * result.rows[-1]["client_worst10"],
        gib=(result.rows[-1]["bytes_down"] + result.rows[-1]["bytes_up"]) / GIB,
        reward=float(np.sum([r["reward"] for r in result.rounds])),
        **{name.replace("action_", "share_"): count / decisions for name, count in total.items()},
        entropy=float(np.mean([r["agent_entropy"] for r in later if "agent_entropy" in r] or [np.nan])),
        live_least=min(live) if live else None,
        agent=agent,
        seconds_per_round=result.summary["seconds_per_round"],
        curve=[round(100 * float(a), 2) for a in acc],
        gib_curve=[round((r["bytes_down"] + r["bytes_up"]) / GIB, 4) for r in result.rows],
    )


def measure(args: argparse.Namespace) -> None:
    """Run what is missing, one row after another, seeds through one compiled program."""
    file, base = pathlib.Path(args.out) / "runs.jsonl", base_config(args)
    want_host_devices(base)
    fed = load_federation(base)
    for name in args.rows:
        finished = {(r["row"], r["partition"], r["rounds"], r["seed"]) for r in ledger.read(file)}
        missing = [s for s in args.seeds if (name, args.partition, args.rounds, s) not in finished]
        if not missing:
            continue
        setup = prepare(dataclasses.replace(base, options=lookup("row", name, ROWS)), fed=fed, measure=False)
        for seed in missing:
            (result,) = run_seeds(with_seed(setup, seed), 1, None)
            found = figures(name, args, result)
            ledger.append(file, found)
            now = (
                f"{name} seed {seed}: best {found['best']:.2f} by val {found['by_val']:.2f} last ten {found['last_ten']:.2f}"
            )
            print(f"{now}, {found['seconds_per_round']:.2f} s a round", file=sys.stderr, flush=True)


COLUMNS = ("best", "by_val", "last", "last_ten", "clients", "worst", "gib", "reward")


def pooled(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, a row per (partition, row)."""
    out = []
    for partition in dict.fromkeys(r["partition"] for r in runs):
        for name in (n for n in ROWS if any(r["row"] == n and r["partition"] == partition for r in runs)):
            same = [r for r in runs if r["row"] == name and r["partition"] == partition]
            row: dict[str, Any] = dict(partition=partition, row=name, seeds=len(same), rounds=same[0]["rounds"])
            for column in COLUMNS:
                values = np.array([r[column] for r in same])
                row |= {column: values.mean(), f"{column}_std": values.std(ddof=1) if len(values) > 1 else 0.0}
            for column in ("share_full", "share_backbone", "share_head", "entropy", "best_val"):
                row[column] = float(np.mean([r[column] for r in same]))
            live = [r["live_least"] for r in same if r["live_least"] is not None]
            row["live_least"] = min(live) if live else None
            row["sensitivity"] = float(np.mean([r["agent"].get("sensitivity", np.nan) for r in same]))
            row["value_error"] = float(np.mean([r["agent"].get("value_error", np.nan) for r in same]))
            row["temperature"] = float(np.mean([r["agent"].get("temperature", np.nan) for r in same]))
            out.append(row)
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one table per partition."""
    text = []
    for partition in dict.fromkeys(r["partition"] for r in rows):
        head = [
            "policy",
            "seeds",
            "best",
            "by val",
            "last",
            "last ten",
            "clients",
            "GiB",
            "Σ reward",
            "full/backbone/head %",
        ]
        head += ["H(π)/log 3", "least live units"]
        text += [f"{partition}, {rows[0]['rounds']} rounds", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for r in (r for r in rows if r["partition"] == partition):
            pm = lambda c, r=r: f"{r[c]:.2f} ± {r[c + '_std']:.2f}"
            shares = "/".join(f"{100 * r[f'share_{n}']:.0f}" for n in ("full", "backbone", "head"))
            cells = [r["row"], str(r["seeds"]), *(pm(c) for c in ("best", "by_val", "last", "last_ten", "clients"))]
            cells += [f"{r['gib']:.3f}", f"{r['reward']:.2f}", shares]
            cells += ["–" if np.isnan(r["entropy"]) else f"{r['entropy']:.2f}"]
            cells += ["–" if r["live_least"] is None else f"{100 * r['live_least']:.0f} %"]
            text.append("| " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def front(rows: list[dict[str, Any]], file: pathlib.Path) -> None:
    """Accuracy (last ten rounds) against bytes, one picture per partition side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    partitions = list(dict.fromkeys(r["partition"] for r in rows))
    figure, axes = plt.subplots(1, len(partitions), figsize=(6 * len(partitions), 4.5), squeeze=False, layout="constrained")
    for ax, partition in zip(axes[0], partitions, strict=True):
        for r in (r for r in rows if r["partition"] == partition):
            i = list(ROWS).index(r["row"])  # the same look in every picture
            style = dict(color=f"C{i % 10}", marker="os^Dv"[i // 10])
            ax.errorbar(r["gib"], r["last_ten"], r["last_ten_std"], linestyle="", capsize=3, label=r["row"], **style)
        ax.set(
            title=f"{partition}, {rows[0]['rounds']} rounds", xlabel="traffic, GiB", ylabel="global accuracy, last ten, %"
        )
    known = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), loc="outside right center", fontsize=7)
    figure.savefig(file, dpi=200)
    plt.close(figure)


def report(out: pathlib.Path) -> str:
    rows = pooled(ledger.read(out / "runs.jsonl"))
    if not rows:
        raise UserError(f"there are no finished runs in '{out}'")
    text = table(rows)
    (out / "fedpolicy.md").write_text(text)
    with open(out / "fedpolicy.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    front(rows, out / "front.png")
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion_mnist")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--partition", default="dirichlet:0.1")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=105)
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=list(ROWS), help="joined by semicolons")
    parser.add_argument("--chunk", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--out", required=True)
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        if not args.table:
            measure(args)
        print(report(pathlib.Path(args.out)))
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
