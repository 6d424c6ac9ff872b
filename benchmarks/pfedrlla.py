"""pFedRLLA: the evidence, part by part. Finished rows go to FOLDER/PART.jsonl and are not computed again.

    python -m benchmarks.pfedrlla --part heatmap,embeddings,alive,cost,table,three_seeds --out FOLDER [--data-dir DATA]

heatmap      9 designed clients in 3 groups: the agent's weights after pre-training, r3 beside uniform weights, reward curve,
             and what other weights would have been worth (`pfedrlla_landscape`)
embeddings   heads of 5 designed groups: silhouettes of MHAE and of PCA, scatter, reconstruction loss
alive        DDPG as published and as shipped on the designed groups: live units, entropy, dependence on the state
cost         the server's parts (agent, MHAE, projections) and validation as shares of local training, CIFAR-10, cnn4
table        CIFAR-10, pathological s = 2 and 5, N = 100, 10 %, E = 1: local, fedavg and pfedrlla (pre-trained on s = 4), or
             any --methods, --minutes each, beside the published figures of 500 rounds, before and after local
             training; curves; the reward's landscape at its end
three_seeds  the pre-trained agent against data-size weights and even weights on the head, seeds 0, 1, 2, --rounds each

Accuracy (AP) is of all clients with what each holds, as its method predicts (evaluation `resident`), on their own test rows.
BP: the same after the round's participants have got their models and before they train, as the authors measure it. Methods
that fine-tune at evaluation do so at the end: what their clients hold (AP), and the common model (FT).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import ledger, published
from benchmarks import pfedrlla_cost as costs
from benchmarks import pfedrlla_designed as designed
from benchmarks.fedpolicy import Stepper
from benchmarks.pfedrlla_landscape import landscape
from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.methods import make_method
from fedjax_sim.runner.config import Config
from fedjax_sim.runner.directory import RunDirectory
from fedjax_sim.runner.execute import execute
from fedjax_sim.runner.prepare import Setup, load_federation, prepare, want_host_devices

SEEDS = (0, 1, 2)
PRETRAINED = "agent.learner,agent.rounds,server.encoder,server.frame"
AS_PUBLISHED = {"lr": 1e-3, "critic_lr": 1e-3, "logit_penalty": 0.0, "action_scale": 1.0, "critic_steps": 0}


class Rows:
    """Finished rows of one part, by name."""

    def __init__(self, folder: pathlib.Path, part: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{part}.jsonl"
        self.done: dict[str, dict[str, Any]] = {row["name"]: row for row in ledger.read(self.path)}

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.done:
            self.done[name] = {"name": name, **make()}
            ledger.append(self.path, self.done[name])
        return self.done[name]

    def table(self, columns: list[str]) -> None:
        """The rows as FOLDER/PART.csv and on the screen."""
        with open(self.path.with_suffix(".csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, ["name", *columns], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.done.values())
        for row in self.done.values():
            cells = ((c, row.get(c)) for c in columns)
            print(
                f"{row['name']:28s} " + "  ".join(f"{c} {v:.4g}" if isinstance(v, float) else f"{c} {v}" for c, v in cells)
            )


def figure(path: pathlib.Path, draw: Callable[[Any], None], wide: int = 1) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(1, wide, figsize=(5 * wide, 4), layout="constrained")
    draw(axes)
    made.savefig(path, dpi=120)
    plt.close(made)


# ---- designed federations -----------------------------------------------------------------------------------------
DIAGNOSTICS = (
    "reward",
    "r3",
    "val_mixed",
    "weight_self",
    "weight_entropy",
    "embedding_cosine",
    "encoder_loss",
    "encoder_live",
    "agent_live_policy",
    "agent_live_critic",
    "agent_sensitivity",
    "agent_value_error",
)


def small(args: argparse.Namespace) -> dict[str, Any]:
    return {"side": args.side, "embedding": args.embedding, "random_rounds": min(50, args.designed_rounds // 3)}


def pretrained_groups(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """3 groups of 3 clients, pre-trained: the agent's weights, and the diagnostics at the end (means of 10 rounds)."""
    fed, group = designed.grouped(3, 3), np.repeat(np.arange(3), 3)
    result = designed.trained(fed, args.designed_rounds, **small(args), **more)
    found = designed.allocation(result)
    last = {k: statistics.fmean(row[k] for row in result.rounds[-10:]) for k in DIAGNOSTICS}
    last["round_r3"] = last.pop("r3")  # of the actions taken, noise and all; r3 below is the policy's
    return dict(
        **designed.heatmap_figures(found, group),
        **designed.run_silhouettes(result, group),
        **last,
        rounds=args.designed_rounds,
        accuracy=result.rows[-1]["resident_mean"],
        weights=found["weights"].tolist(),
        wanted=found["wanted"].tolist(),
        peers=found["peers"].tolist(),
        curve=[row["reward"] for row in result.rounds],
        encoder_curve=[row["encoder_loss"] for row in result.rounds],
        encoder_peak=max(row["encoder_loss"] for row in result.rounds[args.designed_rounds // 2 :]),
        landscape=landscape(result.setup, result.state, group),
    )


LISTS = ("name", "weights", "wanted", "peers", "curve", "encoder_curve", "landscape")  # of a row: not for its table


def show_landscape(title: str, rows: list[dict[str, Any]]) -> None:
    """One line per rule: what it is worth."""
    print(f"{title}: what weights are worth, mean over participants, before training")
    for row in rows:
        print("  " + "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v:10s}" for k, v in row.items()))


def show_landscapes(rows: Rows) -> None:
    for name, row in rows.done.items():
        if "landscape" in row:
            show_landscape(name, row["landscape"])


def heatmap(args: argparse.Namespace, out: pathlib.Path) -> None:
    rows = Rows(out, "heatmap")
    row = rows.get("reward (1, 1, 2)", lambda: pretrained_groups(args))
    rows.get("r3 alone (0, 0, 2)", lambda: pretrained_groups(args, beta1=0.0, beta2=0.0))
    rows.table([k for k in row if k not in LISTS])
    show_landscapes(rows)

    def draw(axes: Any) -> None:
        for axis, name in zip(axes, ("weights", "wanted"), strict=False):
            axis.imshow(np.asarray(row[name]).T, cmap="viridis", vmin=0)
            axis.set(title=f"{name} (last row: itself)", xlabel="target client", ylabel="weighed client")
        axes[2].plot(row["curve"], alpha=0.3)
        kernel = min(20, len(row["curve"]))
        average = np.convolve(row["curve"], np.ones(kernel) / kernel, "valid")
        axes[2].plot(np.arange(kernel - 1, len(row["curve"])), average)
        axes[2].set(xlabel="round", ylabel="reward (mean of the round; moving average)")

    figure(out / "heatmap.png", draw, 3)


def embeddings(args: argparse.Namespace, out: pathlib.Path) -> None:
    rows, group = Rows(out, "embeddings"), np.repeat(np.arange(5), 6)
    heads: list[Any] = []

    def make(basis: str) -> dict[str, Any]:
        if not heads:
            heads.append(designed.trained_heads(designed.grouped(5, 6), 10.0))
        nets, layers = heads[0]
        found = designed.embeddings(nets, layers, group, args.encoder_steps, args.side, args.embedding, basis)
        flat = {k: v.tolist() for k, v in found.pop("points").items() if k.endswith("_2d")}
        return dict(points=flat, **found.pop("silhouette"), **found)

    shared = rows.get("five groups, basis=shared", lambda: make("shared"))
    own = rows.get("five groups, basis=own", lambda: make("own"))
    rows.table([k for k in shared if k not in ("name", "points", "losses", "held_out")])
    for row in (shared, own):
        for which in ("losses", "held_out"):
            first, best, last = row[which][0], row[which][row["passes"] - 1], row[which][-1]
            print(f"{row['name']}: {which} {first:.5f}, pass {row['passes']} {best:.5f}, pass {len(row[which])} {last:.5f}")

    def draw(axes: Any) -> None:
        for axis, row, name in zip(axes, (shared, own, shared), ("mhae", "mhae", "pca"), strict=True):
            points = np.asarray(row["points"][f"{name}_2d"])
            axis.scatter(*points.T, c=group, cmap="tab10")
            title = "PCA of the weights" if name == "pca" else row["name"].replace("five groups,", "MHAE,")
            axis.set(title=f"{title}: silhouette {row[name]:.2f}\n(of these two components {row[name + '_2d']:.2f})")

    figure(out / "embeddings.png", draw, 3)


def alive(args: argparse.Namespace, out: pathlib.Path) -> None:
    rows = Rows(out, "alive")
    published = {f"agent.{k}": v for k, v in AS_PUBLISHED.items()}
    rows.get("as shipped", lambda: pretrained_groups(args))
    rows.get("as published", lambda: pretrained_groups(args, **published))
    rows.get("as published, tanh", lambda: pretrained_groups(args, **published, **{"agent.tanh_logits": True}))
    rows.get("encoder's rate 0.001", lambda: pretrained_groups(args, encoder_lr=1e-3))
    rows.table(["accuracy", "same", "other", "itself", *(k for k in DIAGNOSTICS if k != "r3"), "round_r3", "encoder_peak"])


# ---- CIFAR-10 -----------------------------------------------------------------------------------------------------
def base_config(args: argparse.Namespace, classes: int, **more: Any) -> Config:
    return Config(
        **dict(
            dataset=args.dataset,
            data_dir=args.data_dir,
            partition=f"pathological:{classes}",
            protocol="pfedrlla",
            norm="pfllib",
            model=args.model,
            clients=args.clients,
            participation="0.1",
            rounds=500,
            epochs=1.0,
            batch_size=64,
            lr=args.lr,
            momentum=0.5,
            weight_decay=0.0,
            evaluations=("resident",),
            chunk=args.chunk,
            devices=args.devices,
            probe=True,
        )
        | more
    )


def of_agent(args: argparse.Namespace) -> dict[str, Any]:
    return {"side": args.side, "embedding": args.embedding, "random_rounds": min(50, args.pretrain_rounds // 3)}


def pretrained(args: argparse.Namespace, out: pathlib.Path, seed: int) -> str:
    """The run directory of the pre-training (s = 4, bodies at home), made once for each seed: RUN:PARTS.

    From the same initial weights as the run: heads of another start have nothing in common with what the agent has seen.
    """
    folder = out / f"pretrain-seed{seed}"
    if not (folder / "summary.json").exists():
        options = {**of_agent(args), "regime": "pretrain", "agent.gradient_steps": args.pretrain_steps}
        config = base_config(args, 4, method="pfedrlla", options=options, probe=False)
        config = dataclasses.replace(config, rounds=args.pretrain_rounds, eval_every=args.pretrain_rounds, seed=seed)
        done = execute(prepare(config, measure=False), RunDirectory(folder))
        found = landscape(done.setup, done.state, label_groups(done.setup))
        Rows(out, "landscape").get(f"pre-training, s = 4, seed {seed}", lambda: dict(rules=found))
    return f"{folder}:{PRETRAINED}"


def over_clients(correct: Any, count: Any) -> dict[str, float]:
    correct, count = np.asarray(correct, np.float64), np.asarray(count, np.float64)
    seen = count > 0
    return dict(mean=float((correct[seen] / count[seen]).mean()), pooled=float(correct.sum() / count.sum()))


def label_groups(setup: Setup) -> np.ndarray:
    """[N] clients with the same classes have the same number."""
    held = setup.fed.label_counts() > 0
    return np.unique(held, axis=0, return_inverse=True)[1].reshape(-1)


def within(setup: Setup, minutes: float, most: int, evaluate_every: int) -> dict[str, Any]:
    """Rounds until the time is up, at least one; the start of the run and compilation are not in it."""
    sim, method = setup.simulation, setup.config.method
    began = time.perf_counter()
    state, data = layouts.place(sim.layout, setup.first_state(), sim.data)
    step = jax.jit(sim.round, donate_argnums=0)
    started = time.perf_counter() - began
    seconds: list[float] = []
    curve: list[dict[str, Any]] = []
    while len(seconds) < most:
        began = time.perf_counter()
        state, log = step(state, data)
        log = layouts.as_numpy(log)
        seconds.append(time.perf_counter() - began)
        last = len(seconds) == most or sum(seconds[1:]) + seconds[-1] > 60 * minutes
        if last or len(seconds) % evaluate_every == 0:
            point = accuracies(setup, state, data, log) if last or not sim.method.adapts else {}
            extra = {k: float(log[k]) for k in DIAGNOSTICS if k in log}
            curve.append(dict(round=len(seconds), seconds=sum(seconds), **point, **extra))
            print(f"{method} {curve[-1]}", file=sys.stderr, flush=True)
        if last:
            break
    row = dict(rounds=len(seconds), round_seconds=statistics.median(seconds[1:] or seconds), start_seconds=started)
    row |= {k: v for k, v in curve[-1].items() if k != "round"} | dict(curve=curve)
    if sim.agent() is not None:
        row["landscape"] = landscape(setup, state, label_groups(setup))
    return row


def accuracies(setup: Setup, state: Any, data: Any, log: dict[str, Any]) -> dict[str, float]:
    """AP, BP and FT (see above) over all clients: their mean, and of all test rows together."""
    sim = setup.simulation
    scores = layouts.as_numpy((sim.adapt if sim.method.adapts else sim.evaluate)(state, data))
    held = scores["resident"]["accuracy"]
    out = {f"ap_{k}": v for k, v in over_clients(held["correct"], held["count"]).items()}
    if sim.method.adapts:  # the probe does not fine-tune
        common = scores["personal"]["accuracy"]
        return out | {f"ft_{k}": v for k, v in over_clients(common["correct"], common["count"]).items()}
    before, who = np.array(held["correct"]), log["probe_ids"] >= 0
    before[log["probe_ids"][who]] = log["probe_before_correct"][who]
    return out | {f"bp_{k}": v for k, v in over_clients(before, held["count"]).items()}


def label(args: argparse.Namespace, classes: int, name: str) -> dict[str, Any]:
    """What the paper has beside a row, of 500 rounds: (accuracy, its local epochs) for AP and for BP."""
    found = {}
    for column, when in (("ap", "after"), ("bp", "before")):
        accuracy, epochs = published.pfedrlla(name, args.dataset, classes, when)
        found |= {f"published_{column}": accuracy, f"published_{column}_epochs": epochs}
    return found


def table(args: argparse.Namespace, out: pathlib.Path) -> None:
    rows, methods = Rows(out, "table"), args.methods.split(",")
    for classes in args.classes:
        fed = None
        for name in methods:
            if f"s={classes} {name}" in rows.done:
                continue
            config = base_config(args, classes, method=name)
            if make_method(name).adapts:
                config = dataclasses.replace(config, evaluations=("resident", "personal"))
            if name == "pfedrlla":
                config = dataclasses.replace(config, options=of_agent(args), start_from=pretrained(args, out, config.seed))
            fed = fed or load_federation(config)
            setup = prepare(config, fed=fed, loaded=True, measure=False)
            found = within(setup, args.minutes, args.rounds, args.evaluate_every)
            rows.get(f"s={classes} {name}", lambda found=found: found | label(args, classes, name))
    told = [f"published_{column}" for column in ("ap", "ap_epochs", "bp", "bp_epochs")]
    columns = ["rounds", "ap_mean", "ap_pooled", "bp_mean", "bp_pooled", "ft_mean", "ft_pooled", *told]
    rows.table([*columns, "round_seconds", "start_seconds"])
    for name, row in Rows(out, "landscape").done.items():
        show_landscape(name, row["rules"])
    show_landscapes(rows)

    def draw(axes: Any) -> None:
        for axis, classes in zip(np.atleast_1d(axes), args.classes, strict=True):
            for method in args.methods.split(","):  # in one order: a method has one colour
                row = rows.done.get(f"s={classes} {method}")
                line = [(p["round"], 100 * p["ap_mean"]) for p in row["curve"] if "ap_mean" in p] if row else []
                if line:  # a method that fine-tunes has its end alone
                    axis.plot(*zip(*line, strict=True), label=method, marker=".")
            axis.set(title=f"s = {classes}", xlabel="round", ylabel="accuracy of what clients hold, %")
            axis.legend()

    figure(out / "table.png", draw, len(args.classes))


def three_seeds(args: argparse.Namespace, out: pathlib.Path) -> None:
    """Same cohorts, weights and first training; only the weights of the heads differ."""
    rows = Rows(out, "three_seeds")
    for seed in args.seeds:
        for head in args.heads.split(","):
            name = f"s={args.classes[0]} head={head} seed={seed}"
            if name in rows.done:
                continue
            options: dict[str, Any] = {"head": head} if head != "agent" else of_agent(args)
            config = base_config(args, args.classes[0], method="pfedrlla", options=options, seed=seed)
            if head == "agent":
                config = dataclasses.replace(config, start_from=pretrained(args, out, seed))
            setup = prepare(config, measure=False)
            rows.get(name, lambda setup=setup: within(setup, args.minutes, args.rounds, args.evaluate_every))
    rows.table(["rounds", "ap_mean", "ap_pooled", "bp_mean", "bp_pooled", *DIAGNOSTICS])
    show_landscapes(rows)
    for other in ("weighted", "even"):
        pairs = [
            (row["ap_mean"] - theirs["ap_mean"], row["bp_mean"] - theirs["bp_mean"])
            for name, row in rows.done.items()
            if "head=agent" in name and (theirs := rows.done.get(name.replace("head=agent", f"head={other}")))
        ]
        ap, bp = np.array(pairs).reshape(-1, 2).T * 100
        print(f"agent minus {other}, points by seed: AP {ap.round(2).tolist()} BP {bp.round(2).tolist()}")


def cost(args: argparse.Namespace, out: pathlib.Path) -> None:
    """The regime finetune: what agent, encoder and projections add to a round, and what validation adds."""
    rows = Rows(out, "cost")

    def setups() -> list[Setup]:
        without: dict[str, Any] = {"head": "weighted", "initial_training": False}
        options = {**of_agent(args), "regime": "finetune", "random_rounds": 0, "initial_training": False}
        base = base_config(args, args.classes[0], method="pfedrlla", probe=False)
        fed = load_federation(base)
        return [
            prepare(dataclasses.replace(base, options=o), fed=fed, loaded=True, measure=False) for o in (without, options)
        ]

    def pieces() -> dict[str, Any]:
        without, steered = setups()
        parts = costs.pieces(steered, args.side, args.embedding)
        return parts | costs.shares(parts, costs.local_round(Stepper(without), args.cost_rounds))

    def whole() -> dict[str, Any]:
        return costs.whole_rounds(*map(Stepper, setups()), args.cost_rounds)

    rows.get(f"{args.dataset} {args.model}, pieces", pieces)
    rows.table(sorted({k for row in rows.done.values() for k in row if k != "name"}))
    rows.get(f"{args.dataset} {args.model}, whole rounds", whole)
    rows.table(sorted({k for row in rows.done.values() for k in row if k != "name"}))


PARTS = dict(
    heatmap=heatmap, embeddings=embeddings, alive=alive, cost=cost, table=table, three_seeds=three_seeds
)  # by name, in this order


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="heatmap,embeddings,alive", help="joined by commas, of " + ", ".join(PARTS))
    parser.add_argument("--out", default="runs/pfedrlla", metavar="FOLDER")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--model", default="cnn4")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 5], help="classes per client")
    parser.add_argument("--methods", default="local,fedavg,pfedrlla")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--minutes", type=float, default=20.0, help="per method")
    parser.add_argument("--rounds", type=int, default=500, help="at most, per method")
    parser.add_argument("--evaluate-every", type=int, default=10, metavar="K")
    parser.add_argument("--pretrain-rounds", type=int, default=150, help="the paper: 600")
    parser.add_argument("--pretrain-steps", type=int, default=5, help="gradient steps of the agent per round of it")
    parser.add_argument("--heads", default="agent,weighted,even", help="rules of the head in three_seeds")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS, help="of the three that are fixed"
    )
    parser.add_argument("--designed-rounds", type=int, default=300, help="of heatmap and alive")
    parser.add_argument("--encoder-steps", type=int, default=60, help="passes over the heads in embeddings, at most")
    parser.add_argument("--cost-rounds", type=int, default=5, help="timed rounds, at most 8 lie between two updates")
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--embedding", type=int, default=128)
    parser.add_argument("--chunk", default="1")
    parser.add_argument("--devices", default="auto")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        for name in args.part.split(","):
            if name not in PARTS:
                raise UserError(f"there is no part '{name}'; allowed: {', '.join(PARTS)}")
        want_host_devices(Config(devices=args.devices))
        for name in args.part.split(","):
            PARTS[name](args, pathlib.Path(args.out))
    except UserError as problem:
        print(f"benchmarks.pfedrlla: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
