"""Run directories written by hand, for the report: several methods, settings and seeds, with
everything that is drawn."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from fedjax_sim.runner import run_directory
from fedjax_sim.runner.files import stamp

CLASSES, CLIENTS = 10, 20


def write_run(
    folder: pathlib.Path,
    method: str,
    seed: int = 0,
    *,
    rounds: int = 30,
    best: float = 0.8,
    actions: tuple[float, ...] = (),
    options: dict | None = None,
    layers: tuple[str, ...] = (),
    matrix: int = 0,
    budgets: bool = False,
    ended: bool = True,
    **config,
) -> pathlib.Path:
    """One run whose accuracy climbs to about `best`. actions: the shares of full, backbone and
    head."""
    rng = np.random.default_rng([seed, sum(map(ord, method)), round(1000 * best)])
    folder.mkdir(parents=True)
    said = dict(method=method, options=options or {}, seed=seed, data_seed=0, rounds=rounds)
    said |= dict(
        dataset="digits",
        partition="dirichlet:0.3",
        clients=CLIENTS,
        participation="0.5",
        model="lenet5",
        lr=0.02,
    )
    panels = {
        "exceed_compute": ("computation", "so far", True),
        "exceed_comm": ("communication", "so far", True),
    }
    panels |= {"depth": ("layers shared", "layers", False)}
    resolved = {"panels": panels} if budgets else {}
    (folder / "config.json").write_text(json.dumps({"config": said | config, "resolved": resolved}))
    t = np.arange(1, rounds + 1)
    acc = np.clip(best * (1 - np.exp(-t / 7)) + 0.02 * rng.standard_normal(rounds), 0, 1)
    counts = rng.multinomial(10, actions, rounds) if actions else np.zeros((rounds, 0), int)
    down = 800_000 if not actions else 400_000 + 40_000 * counts[:, :2].sum(1)
    table = dict(round=t, bytes_down=down + 0 * t, bytes_up=np.full(rounds, 800_000))
    table |= {
        f"action_{name}": counts[:, i]
        for i, name in enumerate(("full", "backbone", "head"))
        if actions
    }
    table |= (
        {
            "action_entropy": 0.5 + 0 * t,
            "reward": 0.3 * np.exp(-t / 9) + 0.05 * rng.standard_normal(rounds),
        }
        if actions
        else {}
    )
    table |= {
        f"layer_dist_{name}": (i + 1) * (1 - 0.5 * np.exp(-t / 10)) for i, name in enumerate(layers)
    }
    table |= {
        f"mix_{i}_{j}": (0.5 if i == j else 0.5 / matrix) + 0.02 * rng.random(rounds)
        for i in range(matrix)
        for j in range(matrix)
    }
    if budgets:
        table |= {
            "exceed_compute": rng.integers(0, 4, rounds),
            "exceed_comm": rng.integers(0, 6, rounds),
        }
        table |= {f"depth_{k}": rng.integers(1, 7, rounds) for k in range(3)}
    write_csv(folder / "rounds.csv", table)
    mean = np.clip(acc + 0.08, 0, 1)
    write_csv(
        folder / "metrics.csv",
        dict(
            round=t,
            global_acc=acc,
            val_acc=acc,
            client_mean=mean,
            bytes_down=np.cumsum(table["bytes_down"]),
            bytes_up=np.cumsum(table["bytes_up"]),
        ),
    )
    write_csv(
        folder / "timings.csv",
        dict(first_round=[1], last_round=[rounds], seconds=[3.0 * rounds], seconds_per_round=[3.0]),
    )
    count = np.full(CLIENTS, 40)
    correct = rng.binomial(40, np.clip(mean[:, None] + 0.12 * rng.standard_normal(CLIENTS), 0, 1))
    arrays = dict(personal_correct=correct, personal_count=count, personal_rounds=t)
    arrays |= dict(
        personal_at_global_correct=correct // 2,
        personal_at_global_count=np.int64(40),
        personal_at_global_rounds=t,
    )
    np.savez(folder / "clients.npz", **arrays)
    np.savez(
        folder / "labels.npz",
        label_counts=rng.multinomial(90, rng.dirichlet(0.3 * np.ones(CLASSES)), CLIENTS),
    )
    if ended:
        reached = {
            f"{x}": int(t[acc >= x / 100][0]) if (acc >= x / 100).any() else None
            for x in range(20, 100, 10)
        }
        cost = lambda scale: {x: None if r is None else r * scale for x, r in reached.items()}
        summary = dict(
            method=method,
            seed=seed,
            best_global=acc.max(),
            last_global=acc[-1],
            client_acc_mean=mean[-1],
        )
        summary |= dict(
            rounds_to=reached,
            comm_gb_to=cost(0.0015),
            time_min_to=cost(0.05),
            seconds_per_round=3.0,
        )
        summary |= dict(bytes_down=int(np.sum(table["bytes_down"])), bytes_up=800_000 * rounds)
        (folder / "summary.json").write_text(json.dumps(summary))
    return sign(folder)


def sign(folder: pathlib.Path) -> pathlib.Path:
    """A manifest of what is there."""
    there = [name for name in run_directory.FILES if (folder / name).exists()]
    run_directory.write_manifest(
        folder, {name: stamp((folder / name).read_bytes()) for name in there}
    )
    return folder


def write_csv(path: pathlib.Path, columns: dict) -> None:
    rows = zip(*columns.values(), strict=True)
    path.write_text(
        "\n".join([",".join(columns), *(",".join(f"{v:.6g}" for v in row) for row in rows)]) + "\n"
    )


def write_comparison(
    folder: pathlib.Path, betas: tuple[str, ...] = ("0.3", "0.05")
) -> pathlib.Path:
    """Five methods in every setting, two seeds each, and a folder that is no run."""
    for beta in betas:
        weak = 0.1 if beta == "0.05" else 0.0
        for seed in (0, 1):
            place = lambda name: folder / f"beta-{beta}" / name / f"seed-{seed}"
            more = dict(partition=f"dirichlet:{beta}")
            write_run(
                place("fedavg"),
                "fedavg",
                seed,
                best=0.78 - weak,
                layers=("conv1", "conv2", "fc"),
                **more,
            )
            for mu in (0.01, 0.1, 1):
                write_run(
                    place(f"prox-{mu}"),
                    "fedprox",
                    seed,
                    best=0.8 - weak - 0.05 * mu,
                    options={"mu": mu},
                    **more,
                )
            write_run(
                place("sac"),
                "fedpolicy",
                seed,
                best=0.84 - weak,
                actions=(0.5, 0.4, 0.1),
                options={"agent": "sac"},
                matrix=4,
                **more,
            )
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")
    return folder
