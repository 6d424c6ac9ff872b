"""pFedRLLA: the evidence, part by part. Finished rows go to FOLDER/PART.jsonl and are not computed
again.

    python -m benchmarks.pfedrlla --part heatmap,embeddings,alive,cost --out FOLDER [--data-dir
    DATA]

heatmap      9 designed clients in 3 groups: the agent's weights after pre-training, r3 beside
             uniform weights, reward curve,
             and what other weights would have been worth (`pfedrlla_landscape`)
embeddings   heads of 5 designed groups: silhouettes of MHAE and of PCA, scatter, reconstruction
             loss
alive        DDPG as published and as shipped on the designed groups: live units, entropy,
             dependence on the state
cost         the server's parts (agent, MHAE, projections) and validation as shares of local
             training, CIFAR-10, cnn4

The paper's tables: `fedjax-sim paper list pfedrlla`.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import ledger
from benchmarks import pfedrlla_cost as costs
from benchmarks import pfedrlla_designed as designed
from benchmarks.fedpolicy import Stepper
from benchmarks.pfedrlla_landscape import landscape
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner.compilation import want_host_devices
from fedjax_sim.runner.prepare import Setup, load_federation, prepare

AS_PUBLISHED = {
    "lr": 1e-3,
    "critic_lr": 1e-3,
    "logit_penalty": 0.0,
    "action_scale": 1.0,
    "critic_steps": 0,
}


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
                f"{row['name']:28s} "
                + "  ".join(
                    f"{c} {v:.4g}" if isinstance(v, float) else f"{c} {v}" for c, v in cells
                )
            )


def figure(path: pathlib.Path, draw: Callable[[Any], None], wide: int = 1) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(1, wide, figsize=(5 * wide, 4), layout="constrained")
    draw(axes)
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


# ---- designed federations ------------------------------------------------------------------------
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
    return {
        "side": args.side,
        "embedding": args.embedding,
        "random_rounds": min(50, args.designed_rounds // 3),
    }


def pretrained_groups(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """3 groups of 3 clients, pre-trained: the agent's weights, and the diagnostics at the end
    (means of 10 rounds)."""
    fed, group = designed.grouped(3, 3), np.repeat(np.arange(3), 3)
    result = designed.trained(fed, args.designed_rounds, **small(args), **more)
    found = designed.allocation(result)
    last = {k: statistics.fmean(row[k] for row in result.rounds[-10:]) for k in DIAGNOSTICS}
    # of the actions taken, noise and all; r3 below is the policy's
    last["round_r3"] = last.pop("r3")
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


# of a row: not for its table
LISTS = ("name", "weights", "wanted", "peers", "curve", "encoder_curve", "landscape")


def show_landscape(title: str, rows: list[dict[str, Any]]) -> None:
    """One line per rule: what it is worth."""
    print(f"{title}: what weights are worth, mean over participants, before training")
    for row in rows:
        print(
            "  "
            + "  ".join(
                f"{k} {v:.3f}" if isinstance(v, float) else f"{v:10s}" for k, v in row.items()
            )
        )


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
            axis.set(
                title=f"{name} (last row: itself)", xlabel="target client", ylabel="weighed client"
            )
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
        found = designed.embeddings(
            nets, layers, group, args.encoder_steps, args.side, args.embedding, basis
        )
        flat = {k: v.tolist() for k, v in found.pop("points").items() if k.endswith("_2d")}
        return dict(points=flat, **found.pop("silhouette"), **found)

    shared = rows.get("five groups, basis=shared", lambda: make("shared"))
    own = rows.get("five groups, basis=own", lambda: make("own"))
    rows.table([k for k in shared if k not in ("name", "points", "losses", "held_out")])
    for row in (shared, own):
        for which in ("losses", "held_out"):
            first, best, last = row[which][0], row[which][row["passes"] - 1], row[which][-1]
            print(
                f"{row['name']}: {which} {first:.5f}, pass {row['passes']} {best:.5f}, pass"
                f" {len(row[which])} {last:.5f}"
            )

    def draw(axes: Any) -> None:
        for axis, row, name in zip(
            axes, (shared, own, shared), ("mhae", "mhae", "pca"), strict=True
        ):
            points = np.asarray(row["points"][f"{name}_2d"])
            axis.scatter(*points.T, c=group, cmap="tab10")
            title = (
                "PCA of the weights"
                if name == "pca"
                else row["name"].replace("five groups,", "MHAE,")
            )
            axis.set(
                title=(
                    f"{title}: silhouette {row[name]:.2f}\n(of these two components"
                    f" {row[name + '_2d']:.2f})"
                )
            )

    figure(out / "embeddings.png", draw, 3)


def alive(args: argparse.Namespace, out: pathlib.Path) -> None:
    rows = Rows(out, "alive")
    published = {f"agent.{k}": v for k, v in AS_PUBLISHED.items()}
    rows.get("as shipped", lambda: pretrained_groups(args))
    rows.get("as published", lambda: pretrained_groups(args, **published))
    rows.get(
        "as published, tanh",
        lambda: pretrained_groups(args, **published, **{"agent.tanh_logits": True}),
    )
    rows.get("encoder's rate 0.001", lambda: pretrained_groups(args, encoder_lr=1e-3))
    rows.table(
        [
            "accuracy",
            "same",
            "other",
            "itself",
            *(k for k in DIAGNOSTICS if k != "r3"),
            "round_r3",
            "encoder_peak",
        ]
    )


# ---- CIFAR-10 ------------------------------------------------------------------------------------
def base_config(args: argparse.Namespace, classes: int, **more: Any) -> Experiment:
    return Experiment.of(
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
    return {
        "side": args.side,
        "embedding": args.embedding,
        "random_rounds": min(50, args.pretrain_rounds // 3),
    }


def cost(args: argparse.Namespace, out: pathlib.Path) -> None:
    """The regime finetune: what agent, encoder and projections add to a round, and what validation
    adds."""
    rows = Rows(out, "cost")

    def setups() -> list[Setup]:
        without: dict[str, Any] = {"head": "weighted", "initial_training": False}
        options = {
            **of_agent(args),
            "regime": "finetune",
            "random_rounds": 0,
            "initial_training": False,
        }
        base = base_config(args, args.classes[0], method="pfedrlla", probe=False)
        fed = load_federation(base)
        return [
            prepare(base.replace(options=o), fed=fed, loaded=True, measure=False)
            for o in (without, options)
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


# by name, in this order
PARTS = dict(heatmap=heatmap, embeddings=embeddings, alive=alive, cost=cost)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        default="heatmap,embeddings,alive",
        help="joined by commas, of " + ", ".join(PARTS),
    )
    parser.add_argument("--out", default="runs/pfedrlla", metavar="FOLDER")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--model", default="cnn4")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 5], help="classes per client")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--pretrain-rounds", type=int, default=150, help="the paper: 600")
    parser.add_argument("--designed-rounds", type=int, default=300, help="of heatmap and alive")
    parser.add_argument(
        "--encoder-steps", type=int, default=60, help="passes over the heads in embeddings, at most"
    )
    parser.add_argument(
        "--cost-rounds", type=int, default=5, help="timed rounds, at most 8 lie between two updates"
    )
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
        want_host_devices(Experiment.of(devices=args.devices))
        for name in args.part.split(","):
            PARTS[name](args, pathlib.Path(args.out))
    except UserError as problem:
        print(f"benchmarks.pfedrlla: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
