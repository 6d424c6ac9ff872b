"""Does a controller pay? FedPolicy's policies and rewards on real Fashion-MNIST in the paper's setting, three seeds.

    python -m benchmarks.fedpolicy_table --data-dir DATA --out FOLDER [--partition dirichlet:0.1] [--rows full,sac,…]
    python -m benchmarks.fedpolicy_table --out FOLDER --table

LeNet-5, 100 clients, 10 per round, E = 5, B = 64, lr 0.01, momentum 0.9, weight decay 5e-4, C3E for every row, evaluated
after every round; seeds 0, 1, 2 (fixed beforehand) change initial weights, cohorts, shuffles and draws, not the partition.
Test data choose nothing: `by val` is the round that was best on the server's validation rows. Every finished run is
appended to FOLDER/runs.jsonl, with the hash of its configuration (data, model, options, seed) and its rounds, and skipped
the next time, so that a stopped table goes on. `--table` prints what is there, one table per setting with every row of it,
also those that were not run, and writes FOLDER/fedpolicy.md, FOLDER/fedpolicy.csv and FOLDER/front.png, accuracy against
bytes.

An agent that learns also explores, and both are in its row. Its row `…, greedy` is a second run with the same seed, in which
the agent that the first one ended with takes its best action from round 1 on and learns nothing. Differences to `random` are
taken seed by seed. Share of the gain: of what `full` is ahead of `random`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from agents.registry import LEARNERS
from agents.sac import LOG_ALPHA_BOUNDS
from benchmarks import ledger
from fedjax_sim.data.federation import Federation
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.runner.config import Config
from fedjax_sim.runner.driver import Result
from fedjax_sim.runner.prepare import load_federation, prepare, want_host_devices
from fedjax_sim.runner.seeds import run_seeds

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
GREEDY = ", greedy"
# what makes a table: runs that differ in one of these are in different ones
SETTING = ("dataset", "data", "partition", "model", "num_clients", "cohort", "epochs", "rounds")
BASE, MOST = "random", "full"  # what a row is compared with, and what there is to win


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


def learns(row: str) -> bool:
    return ROWS[row].get("agent", "sac") in LEARNERS


def all_rows() -> list[str]:
    """In the order of the table: an agent's greedy row below its own."""
    return [name for row in ROWS for name in ((row, row + GREEDY) if learns(row) else (row,))]


def at_the_clip(temperature: float | None) -> bool:
    """Whether SAC's temperature wanted to go further than it may.

    >>> at_the_clip(148.4131), at_the_clip(0.02), at_the_clip(None)
    (True, False, False)
    """
    return temperature is not None and any(abs(np.log(temperature) - bound) < 1e-3 for bound in LOG_ALPHA_BOUNDS)


def identity(config: Config, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another; config: as it was prepared, with the fingerprint of the data."""
    known = dict(dataset=args.dataset, data=config.data_fingerprint, partition=args.partition, model=args.model)
    known |= dict(num_clients=args.clients, cohort=args.cohort, epochs=args.epochs, rounds=args.rounds)
    return dict(key=f"{config.hash()}-{args.rounds}", row=row, seed=config.seed, **known)


def figures(args: argparse.Namespace, result: Result) -> dict[str, Any]:
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
    """Run what is missing, one row after another, each with its greedy one where an agent learns."""
    base = base_config(args)
    want_host_devices(base)
    fed = load_federation(base)
    for name in args.rows:
        for seed in args.seeds:
            one_row(args, fed, name, dataclasses.replace(base, options=lookup("row", name, ROWS), seed=seed))


def one_row(args: argparse.Namespace, fed: Federation, name: str, config: Config) -> None:
    """One run of a row and its greedy one, unless they are in the file; the agent lies in a folder between the two."""
    file = pathlib.Path(args.out) / "runs.jsonl"
    setup = prepare(config, fed=fed, loaded=True, measure=False)
    known = identity(setup.config, name, args)
    greedy = known | dict(row=name + GREEDY, key=f"{known['key']}-greedy")
    done = {run.get("key") for run in ledger.read(file)}
    missing = [one["key"] for one in (known, greedy)[: 1 + learns(name)] if one["key"] not in done]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        (result,) = run_seeds(setup, 1, folder)
        if known["key"] in missing:
            note(file, known | figures(args, result))
        if greedy["key"] in missing:
            more = dict(options=config.options | {"greedy": True}, start_from=f"{folder}/seed-{config.seed}:agent")
            setup = prepare(dataclasses.replace(config, **more), fed=fed, loaded=True, measure=False)
            note(file, greedy | figures(args, run_seeds(setup, 1, None)[0]))


def note(file: pathlib.Path, found: dict[str, Any]) -> None:
    ledger.append(file, found)
    best = f"best {found['best']:.2f} by val {found['by_val']:.2f} last ten {found['last_ten']:.2f}"
    print(
        f"{found['row']} seed {found['seed']}: {best}, {found['seconds_per_round']:.2f} s a round",
        file=sys.stderr,
        flush=True,
    )


COLUMNS = ("best", "by_val", "last", "last_ten", "clients", "worst", "gib", "reward")
COMPARED = ("best", "last_ten")


def finished(out: pathlib.Path) -> list[dict[str, Any]]:
    """The runs of the file; those of a version that did not write down on what data they were are left out."""
    runs = ledger.read(out / "runs.jsonl")
    known = [run for run in runs if "key" in run]
    if len(known) < len(runs):
        print(f"{len(runs) - len(known)} runs without a key, of an older version, are left out", file=sys.stderr)
    return known


def spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def paired(same: list[dict[str, Any]], others: list[dict[str, Any]], column: str) -> np.ndarray:
    """Differences to the others, seed by seed; seeds that only one of them has are left out."""
    theirs = {r["seed"]: r[column] for r in others}
    return np.array([r[column] - theirs[r["seed"]] for r in same if r["seed"] in theirs])


def pooled(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, a line per setting and row of the table; seeds = 0: not run."""
    out = []
    for setting in dict.fromkeys(tuple(r[name] for name in SETTING) for r in runs):
        here = [r for r in runs if tuple(r[name] for name in SETTING) == setting]
        of = {name: [r for r in here if r["row"] == name] for name in all_rows()}
        for name, same in of.items():
            line: dict[str, Any] = dict(zip(SETTING, setting, strict=True)) | dict(row=name, seeds=len(same))
            out.append(line | (means(same, of[BASE], of[MOST]) if same else {}))
    return out


def means(same: list[dict[str, Any]], base: list[dict[str, Any]], most: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the seeds of one row."""
    row: dict[str, Any] = {}
    for column in COLUMNS:
        values = np.array([r[column] for r in same])
        row |= {column: values.mean(), f"{column}_std": spread(values)}
    for column in COMPARED:
        apart = paired(same, base, column)
        if len(apart):
            row |= {f"{column}_ahead": apart.mean(), f"{column}_ahead_std": spread(apart)}
            most_there_is = paired(most, base, column)
            if len(most_there_is) and most_there_is.mean() != 0:
                row[f"{column}_gain"] = apart.mean() / most_there_is.mean()
    for column in ("share_full", "share_backbone", "share_head", "entropy", "best_val"):
        row[column] = float(np.mean([r[column] for r in same]))
    live = [r["live_least"] for r in same if r["live_least"] is not None]
    row["live_least"] = min(live) if live else None
    for name in ("sensitivity", "value_error", "temperature"):
        row[name] = float(np.mean([r["agent"].get(name, np.nan) for r in same]))
    row["at_the_clip"] = sum(at_the_clip(r["agent"].get("temperature")) for r in same)
    return row


HEADS = ("policy", "seeds", "best", "by val", "last", "last ten", "best − random", "last ten − random", "share of the gain")
HEADS += ("clients", "GiB", "Σ reward", "full/backbone/head %", "H(π)/log 3", "least live units", "temperature")


def cells(r: dict[str, Any]) -> list[str]:
    """One line of the table."""
    if not r["seeds"]:
        return [r["row"], "0", "not run", *[""] * (len(HEADS) - 3)]
    pm = lambda c: f"{r[c]:.2f} ± {r[c + '_std']:.2f}" if c in r else "–"
    shares = "/".join(f"{100 * r[f'share_{n}']:.0f}" for n in ("full", "backbone", "head"))
    clipped = f", at its clip in {r['at_the_clip']} of {r['seeds']}" if r["at_the_clip"] else ""
    return [
        r["row"],
        str(r["seeds"]),
        *(pm(c) for c in ("best", "by_val", "last", "last_ten", "best_ahead", "last_ten_ahead")),
        f"{100 * r['last_ten_gain']:.0f} %" if "last_ten_gain" in r else "–",
        pm("clients"),
        f"{r['gib']:.3f}",
        f"{r['reward']:.2f}",
        shares,
        "–" if np.isnan(r["entropy"]) else f"{r['entropy']:.2f}",
        "–" if r["live_least"] is None else f"{100 * r['live_least']:.0f} %",
        "–" if np.isnan(r["temperature"]) else f"{r['temperature']:.3g}{clipped}",
    ]


def title(r: dict[str, Any]) -> str:
    who = f"{r['cohort']} of {r['num_clients']} clients, {r['epochs']:g} epochs, {r['rounds']} rounds"
    return f"{r['dataset']}, {r['partition']}, {r['model']}, {who}"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one table per setting."""
    text = []
    for name in dict.fromkeys(map(title, rows)):
        text += [name, "", "| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
        text += ["| " + " | ".join(cells(r)) + " |" for r in rows if title(r) == name]
        text.append("")
    return "\n".join(text)


def front(rows: list[dict[str, Any]], file: pathlib.Path) -> None:
    """Accuracy (last ten rounds) against bytes, one picture per setting side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = list(dict.fromkeys(map(title, rows)))
    figure, axes = plt.subplots(1, len(settings), figsize=(6 * len(settings), 4.5), squeeze=False, layout="constrained")
    for ax, setting in zip(axes[0], settings, strict=True):
        for r in (r for r in rows if title(r) == setting and r["seeds"]):
            i = all_rows().index(r["row"])  # the same look in every picture
            style = dict(color=f"C{i % 10}", marker="os^Dv"[i // 10])
            ax.errorbar(r["gib"], r["last_ten"], r["last_ten_std"], linestyle="", capsize=3, label=r["row"], **style)
        ax.set(xlabel="traffic, GiB", ylabel="global accuracy, last ten, %")
        ax.set_title(setting, fontsize=8)
    known = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), loc="outside right center", fontsize=7)
    figure.savefig(file, dpi=200)
    plt.close(figure)


def report(out: pathlib.Path) -> str:
    rows = pooled(finished(out))
    if not rows:
        raise UserError(f"there are no finished runs in '{out}'")
    text = table(rows)
    (out / "fedpolicy.md").write_text(text)
    with open(out / "fedpolicy.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
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
