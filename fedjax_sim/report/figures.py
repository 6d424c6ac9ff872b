"""The figures: accuracy curves, action evolution, policy summary, communication. matplotlib is imported when drawing."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.report.runs import Run, load_runs, windowed_shares

COLOURS = {"full": "#4477aa", "backbone": "#66aa55", "head": "#cc6655", "partial": "#ddaa44"}
GB = 2**30
ACCURACIES = (("global_acc", "global model, test set"), ("client_mean", "clients' own models, mean"))


def drawing() -> Any:
    """matplotlib.pyplot without a display."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures need matplotlib; install it with: pip install 'fedjax-sim[report]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def points(run: Run, column: str) -> tuple[np.ndarray, np.ndarray]:
    """(rounds, values) of an evaluated column, without gaps."""
    values = run.metrics.get(column, np.full(len(run.metrics["round"]), np.nan))
    known = ~np.isnan(values)
    return run.metrics["round"][known], values[known]


def save(plt: Any, figure: Any, path: pathlib.Path) -> pathlib.Path:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def accuracy_curves(runs: Sequence[Run], path: pathlib.Path) -> pathlib.Path:
    """Accuracy against rounds, one line per run, for the global and for the clients' own models."""
    plt = drawing()
    shown = [(column, title) for column, title in ACCURACIES if any(len(points(run, column)[0]) for run in runs)]
    figure, axes = plt.subplots(
        1, max(1, len(shown)), figsize=(5.5 * max(1, len(shown)), 4), constrained_layout=True, squeeze=False
    )
    for axis, (column, title) in zip(axes[0], shown, strict=False):
        for run in runs:
            rounds, values = points(run, column)
            axis.plot(rounds, 100 * values, label=run.label, marker="o" if len(rounds) == 1 else None, linewidth=1.4)
        axis.set(title=title, xlabel="round", ylabel="accuracy (%)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return save(plt, figure, path)


def action_evolution(runs: Sequence[Run], path: pathlib.Path, window: int = 10) -> pathlib.Path:
    """Stacked shares of the actions over the last `window` rounds, test accuracy on the right axis; a panel per run."""
    plt = drawing()
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.6 * rows), constrained_layout=True, squeeze=False)
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    for axis, run in zip(axes.flat, runs, strict=False):
        shares = windowed_shares(run.actions, window)
        rounds = run.rounds["round"]
        axis.stackplot(
            rounds,
            *(100 * s for s in shares.values()),
            labels=list(shares),
            alpha=0.75,
            colors=[COLOURS.get(name, "#999999") for name in shares],
        )
        axis.set(
            title=run.label,
            xlabel="round",
            ylabel=f"share of actions, last {window} rounds (%)",
            ylim=(0, 100),
            xlim=(rounds[0], max(rounds[-1], rounds[0] + 1)),
        )
        right = axis.twinx()
        when, accuracy = points(run, "global_acc")
        right.plot(when, 100 * accuracy, color="black", linewidth=1.4, label="test accuracy")
        right.set(ylabel="test accuracy (%)", ylim=(0, 100))
        handles = [*axis.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        right.legend(handles, [*shares, "test accuracy"], fontsize=7, loc="lower right", framealpha=0.9)
    return save(plt, figure, path)


def policy_summary(runs: Sequence[Run], path: pathlib.Path, window: int = 10) -> pathlib.Path:
    """Left: share of each action over the whole run. Right: normalised entropy of the last `window` rounds' actions."""
    plt = drawing()
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    names = list(dict.fromkeys(name for run in runs for name in run.actions))
    place, width = np.arange(len(runs)), 0.8 / len(names)
    for i, name in enumerate(names):
        taken = np.array([run.actions.get(name, np.zeros(1)).sum() for run in runs])
        decided = np.array([max(1, sum(v.sum() for v in run.actions.values())) for run in runs])
        bars.bar(
            place + (i - (len(names) - 1) / 2) * width,
            100 * taken / decided,
            width,
            label=name,
            color=COLOURS.get(name, "#999999"),
        )
    bars.set(title="actions over the whole run", ylabel="share (%)", ylim=(0, 100))
    bars.set_xticks(place, [run.label for run in runs], rotation=15 if len(runs) > 3 else 0)
    bars.legend(fontsize=8)
    bars.grid(alpha=0.3, axis="y")
    for run in runs:
        shares_now = np.stack(list(windowed_shares(run.actions, window).values()))  # [A, T]
        log = np.log(np.where(shares_now > 0, shares_now, 1))
        entropy = -(shares_now * log).sum(0) / np.log(max(2, len(shares_now)))
        curves.plot(run.rounds["round"], entropy, label=run.label, linewidth=1.4)
    curves.set(
        title=f"entropy of the actions of the last {window} rounds", xlabel="round", ylabel="H / log A", ylim=(-0.02, 1.05)
    )
    curves.grid(alpha=0.3)
    curves.legend(fontsize=8)
    return save(plt, figure, path)


def communication(runs: Sequence[Run], path: pathlib.Path) -> pathlib.Path:
    """GB (2^30 bytes) per round, down and up together; dashed: everything both ways, as full redistribution costs."""
    plt = drawing()
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    most = 0.0
    for run in runs:
        total = (run.rounds["bytes_down"] + run.rounds["bytes_up"]) / GB
        (line,) = axis.plot(run.rounds["round"], total, label=run.label, linewidth=1.4)
        if run.actions:  # what goes up is the whole model, so twice that is the full baseline
            baseline = 2 * run.rounds["bytes_up"] / GB
            axis.plot(
                run.rounds["round"],
                baseline,
                linestyle="--",
                color=line.get_color(),
                linewidth=1,
                label=f"{run.label}: all full",
            )
            most = max(most, baseline.max())
        most = max(most, total.max())
    axis.set(title="communication per round", xlabel="round", ylabel="GB per round", ylim=(0, 1.08 * most or 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return save(plt, figure, path)


def report(paths: Sequence[str | pathlib.Path], out: str | pathlib.Path | None = None) -> list[pathlib.Path]:
    """Draw every figure that the runs have data for, as PNG files in `out` (default: the first run's directory)."""
    runs = load_runs(paths)
    folder = pathlib.Path(out) if out is not None else pathlib.Path(paths[0])
    folder.mkdir(parents=True, exist_ok=True)
    made = [accuracy_curves(runs, folder / "accuracy.png"), communication(runs, folder / "communication.png")]
    steered = [run for run in runs if run.actions]
    if steered:
        made += [action_evolution(steered, folder / "actions.png"), policy_summary(steered, folder / "policy.png")]
    return made
