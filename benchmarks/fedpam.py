"""FedPAM beside its baselines on real CIFAR-10, under the protocol of its table, and how fast it is with 200 clients.

    python -m benchmarks.fedpam --data-dir DATA [--minutes 20] [--methods fedavg,ditto,fedpam|all] [--out FOLDER]

N = 20, Dirichlet 0.1, cnn4, official train and test merged and 75/25 per client, everybody in every round, B = 10,
lr 0.005, momentum 0.5 (the paper gives no value), E = 1. `all` are FedPAM and the 14 baselines of its table, each scored by
the models that its clients predict with; methods that fine-tune at evaluation do so at the end only. Every method gets
`--minutes` of the clock for its rounds and evaluations (compilation is not in it), at least one round, and runs the same
partition, initial weights and shuffles. The published figures are of 200 rounds; the rounds that were run are printed
beside ours. Then `--large-rounds` rounds with `--large-clients` clients.
Writes FOLDER/runs.jsonl (a line per finished method: started again, it does what is missing), FOLDER/fedpam.json
(everything) and FOLDER/fedpam.csv (a row per evaluated round).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks import ledger, published
from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.methods import METHODS, make_method
from fedjax_sim.runner.config import Config
from fedjax_sim.runner.prepare import Setup, load_federation, prepare, want_host_devices

# what the paper leaves open about its baselines
OPTIONS: dict[str, dict[str, Any]] = {"ditto": {"lam": 1.0}, "fedrep": {"head_epochs": 1.0}, "fedprox": {"mu": 0.001}}
BASELINES = tuple(name for name in published.FEDPAM if name != "fedpam")
SETTING = ("dataset", "partition", "model", "lr", "momentum", "seed", "chunk", "devices")  # with method and clients: one run


def base_config(args: argparse.Namespace) -> Config:
    return Config(
        dataset=args.dataset,
        data_dir=args.data_dir,
        partition=args.partition,
        protocol="pfllib",
        norm="pfllib",
        model=args.model,
        bn_stats="local",
        clients=args.clients,
        participation="1",
        rounds=200,
        epochs=1.0,
        batch_size=10,
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=0.0,
        seed=args.seed,
        chunk=args.chunk,
        devices=args.devices,
    )


NOTHING: dict[str, Any] = dict(mean=None, std=None, pooled=None)  # a model that is not there, or not asked now


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def accuracy(score: dict[str, Any]) -> dict[str, float]:
    """Over clients: the mean, the deviation, and of all examples together."""
    correct, count = (np.asarray(score["accuracy"][name], np.float64) for name in ("correct", "count"))
    each = correct / np.maximum(count, 1)
    return dict(mean=float(each.mean()), std=float(each.std()), pooled=float(correct.sum() / count.sum()))


def for_method(config: Config, name: str, options: dict[str, Any]) -> Config:
    """`config` with the method and the evaluations that it has: its clients' own models, and the common one."""
    common = ("global@clients",) if make_method(name, **options).has_global_model else ()
    return dataclasses.replace(config, method=name, options=options, evaluations=("personal", *common))


def silent(sim: Any, state: Any, x: Any) -> float | None:
    """Share of the common model's features that are 0 for every one of the images x: dead units; None without a model."""
    if not sim.method.has_global_model:
        return None
    z, _ = sim.env.model.features(sim.method.global_model(sim.described, state.server), x, train=False)
    return float((np.asarray(z) <= 0).all(0).mean())


def some_images(setup: Setup, count: int = 512) -> jax.Array:
    """The first test images of the clients, normalised as in training."""
    fed = setup.fed
    rows = np.concatenate([fed.client_rows(k, "test") for k in range(fed.num_clients)])
    rows = rows[:: max(1, len(rows) // count)][:count]
    x = np.asarray(fed.x)[rows].astype(np.float32) * np.asarray(fed.scale)
    return jax.numpy.asarray((x - np.asarray(fed.mean)) / np.asarray(fed.std), setup.simulation.env.dtype)


def trained(setup: Setup, minutes: float, most: int, evaluate_every: int) -> dict[str, Any]:
    """Rounds until the time is up or `most` are done; evaluated every so many rounds and at the end."""
    sim, method = setup.simulation, setup.config.method
    state, data = layouts.place(sim.layout, sim.init(setup.config.seed, setup.net), sim.data)
    began = time.perf_counter()
    step = jax.jit(sim.round, donate_argnums=0).lower(state, data).compile()
    score = sim.evaluate.lower(state, data).compile() if evaluate_every else None  # type: ignore[attr-defined]
    adapt = sim.adapt if evaluate_every and sim.method.adapts else None
    compiled, began = time.perf_counter() - began, time.perf_counter()
    images = some_images(setup)
    rows: list[dict[str, Any]] = []
    seconds: list[float] = []
    log: dict[str, Any] = {}
    while len(seconds) < most:
        at = time.perf_counter()
        state, log = step(state, data)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - at)
        spent = time.perf_counter() - began
        last = len(seconds) == most or spent + seconds[-1] > 60 * minutes
        if score is not None and (last or len(seconds) % evaluate_every == 0):
            result = layouts.as_numpy(score(state, data))
            if adapt is not None and last:
                result |= layouts.as_numpy(adapt(state, data))
            row = dict(method=method, round=len(seconds), seconds=sum(seconds))
            for mode, name in (("personal", "personal"), ("global@clients", "global")):
                row |= {f"{name}_{k}": v for k, v in (accuracy(result[mode]) if mode in result else NOTHING).items()}
            row |= dict(
                train_loss=float(log["train_loss"]),
                train_accuracy=float(log["train_accuracy"]),
                diverged=int(log["diverged"]),
                adjust_distance=float(log["adjust_distance"]) if "adjust_distance" in log else None,
                silent_features=silent(sim, state, images),
            )
            rows.append(row)
            now = f"{method} round {row['round']}: personal {percent(row['personal_mean'])} %, {seconds[-1]:.1f} s a round"
            print(now, file=sys.stderr, flush=True)
        if last:
            break
    return dict(
        method=method,
        clients=setup.fed.num_clients,
        options=setup.config.options,
        layout=dict(chunk=sim.layout.chunk, devices=sim.layout.devices),
        compile_seconds=compiled,
        rounds=len(seconds),
        round_seconds=seconds,
        rounds_per_second=len(seconds) / sum(seconds),
        steps_per_round=int(log["steps_needed"]),
        private_parameters=int(log.get("private_parameters", 0)),
        rows=rows,
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    base = base_config(args)
    want_host_devices(base)
    names = [*BASELINES, "fedpam"] if args.methods == "all" else [name for name in args.methods.split(",") if name]
    out: dict[str, Any] = dict(setting=vars(args), runs=[], large=[])

    file = pathlib.Path(args.out) / "runs.jsonl"

    def each(config: Config, minutes: float, most: int, evaluate_every: int) -> list[dict[str, Any]]:
        fed = None
        done = []
        for name in names:
            options = {**OPTIONS.get(name, {}), **args.options.get(name, {})}
            key = {k: getattr(args, k) for k in SETTING} | dict(minutes=minutes, most=most, evaluate_every=evaluate_every)
            key |= dict(method=name, clients=config.clients, options=options)
            found = next((run for run in ledger.read(file) if key.items() <= run.items()), None)
            if found is None:
                fed = fed or load_federation(config)
                setup = prepare(for_method(config, name, options), fed=fed, measure=False)
                found = trained(setup, minutes, most, evaluate_every) | key
                ledger.append(file, found)
            done.append(found)
        return done

    if args.minutes:
        out["runs"] = each(base, args.minutes, args.rounds, args.evaluate_every)
    if args.large_rounds:
        large = dataclasses.replace(base, clients=args.large_clients)
        out["large"] = each(large, args.large_minutes, args.large_rounds, 0)
    return out


def table(out: dict[str, Any]) -> str:
    """Ours beside the published figures, and the speed with many clients."""
    head = f"{'method':9s} {'rounds':>6s} {'personal %':>11s} {'best %':>7s} {'pooled %':>9s} {'global %':>9s}"
    lines = [f"{head} {'published %':>12s} {'s/round':>8s} {'private':>8s} {'silent %':>9s}"]
    for run in out["runs"]:
        last = run["rows"][-1]
        best = max(row["personal_mean"] for row in run["rows"] if row["personal_mean"] is not None)
        theirs = published.fedpam(run["method"], run["dataset"], run["partition"], run["clients"])
        lines.append(
            f"{run['method']:9s} {run['rounds']:6d} {percent(last['personal_mean']):>11s} {percent(best):>7s} "
            f"{percent(last['personal_pooled']):>9s} {percent(last['global_mean']):>9s} "
            f"{'-' if theirs is None else f'{theirs:.2f}':>12s} {1 / run['rounds_per_second']:8.2f} "
            f"{run['private_parameters']:8d} {percent(last['silent_features']):>9s}"
        )
    if out["runs"]:
        lines.append(
            "personal: mean over clients of their test accuracy, with the models that they predict with; published: the same"
        )
        lines.append("after 200 rounds; global: the common model on their test rows;")
        lines.append("silent: share of the common model's features that are 0 on all of 512 test images")
    for run in out["large"]:
        lines.append(
            f"N = {run['clients']}: {run['method']:8s} {run['rounds_per_second']:8.4f} rounds/s "
            f"({run['rounds']} rounds of {run['steps_per_round']} steps)"
        )
    return "\n".join(lines)


def write(out: dict[str, Any], folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fedpam.json").write_text(json.dumps(out, indent=1))
    rows = [row for run in out["runs"] for row in run["rows"]]
    if rows:
        with open(folder / "fedpam.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--partition", default="dirichlet:0.1")
    parser.add_argument("--model", default="cnn4")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument(
        "--methods", default="fedavg,ditto,fedpam", help="joined by commas; all: FedPAM and its 14 baselines"
    )
    parser.add_argument("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE", dest="sets")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="per method; 0: only the large federation")
    parser.add_argument("--rounds", type=int, default=200, help="most rounds per method")
    parser.add_argument("--evaluate-every", type=int, default=1, metavar="K")
    parser.add_argument("--large-clients", type=int, default=200)
    parser.add_argument("--large-rounds", type=int, default=3, help="rounds with many clients; 0: none")
    parser.add_argument("--large-minutes", type=float, default=10.0, help="at most, per method")
    parser.add_argument("--chunk", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--out", default="runs/fedpam", metavar="FOLDER")
    return parser


def read_options(sets: list[str]) -> dict[str, dict[str, str]]:
    """METHOD.OPTION=VALUE -> {method: {option: value}}."""
    out: dict[str, dict[str, str]] = {}
    for item in sets:
        left, equals, value = item.partition("=")
        name, dot, option = left.partition(".")
        if not (equals and dot and option) or name not in METHODS:
            raise UserError(f"--set '{item}' cannot be read; use METHOD.OPTION=VALUE, e.g. fedpam.lam=10")
        out.setdefault(name, {})[option] = value
    return out


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        if not (args.minutes >= 0 and args.rounds >= 1 and args.evaluate_every >= 1 and args.large_rounds >= 0):
            raise UserError(
                f"minutes {args.minutes:g}, rounds {args.rounds}, evaluate-every {args.evaluate_every}, large-rounds "
                f"{args.large_rounds}: minutes and large-rounds must be at least 0, the others at least 1"
            )
        args.options = read_options(args.sets)
        out = measure(args)
    except UserError as problem:
        print(f"benchmarks.fedpam: {problem}", file=sys.stderr)
        return 2
    print(table(out))
    write(out, pathlib.Path(args.out))
    print(f"written: {args.out}/fedpam.json, {args.out}/fedpam.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
