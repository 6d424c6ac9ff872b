"""Figures about clients: the spread of their accuracies, their curves, the labels they hold."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from fedjax_sim.metrics.base import About, worst_tenth
from fedjax_sim.report import style
from fedjax_sim.report.groups import Group, labels, scenes
from fedjax_sim.report.groups import spread as deviation

MOST_PANELS = 12  # methods with a panel of all clients
MOST_BUBBLES = 60  # clients in a picture of labels


def with_clients(groups: Sequence[Group]) -> list[Group]:
    return [g for g in groups if all(len(run.last_of_clients()[1]) for run in g.runs)]


def about(group: Group) -> About:
    """Unit and direction of the primary metric."""
    return group.runs[0].primary.about


def last_values(group: Group) -> np.ndarray:
    """The primary metric of every client at the end (accuracies in percent), all seeds together."""
    return about(group).scale * np.concatenate([run.last_of_clients()[1] for run in group.runs])


def spread(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Left of each pair: a box per method, ◆ the mean of the worst tenth. Right: the cumulative
    share of clients by accuracy."""
    plt, look = style.drawing(), style.looks(labels(groups))
    mine = with_clients(groups)
    where = scenes(mine)
    figure, axes = style.panels(plt, 2 * len(where), width=5.0, most=2)
    for scene, boxes, steps in zip(where, axes[::2], axes[1::2], strict=True):
        here = [g for g in mine if g.scene == scene]
        values, read = [last_values(g) for g in here], about(here[0])
        drawn = boxes.boxplot(
            values,
            vert=False,
            widths=0.6,
            patch_artist=True,
            medianprops=dict(color="black"),
            flierprops=dict(markersize=2.5, alpha=0.5),
        )
        for at, (g, box, v) in enumerate(zip(here, drawn["boxes"], values, strict=True), 1):
            colour = look[g.label]["color"]
            box.set(facecolor=colour, alpha=0.55, linewidth=0.8)
            marker = dict(color=colour, markeredgecolor="black", markersize=5)
            boxes.plot(worst_tenth(v, read.better), at, "D", **marker)
            shares = np.arange(1, len(v) + 1) / len(v) * 100
            named = dict(label=style.safe(g.label), **look[g.label])
            steps.step(np.sort(v), shares, where="post", **named)
        boxes.set_yticks(range(1, len(here) + 1), [style.safe(g.label) for g in here])
        boxes.invert_yaxis()
        style.title(boxes, scene, f"last {read.label} of each client, ◆ mean of the worst 10 %")
        boxes.set_xlabel(read.axis)
        style.title(steps, scene, f"clients with at most this {read.label}")
        steps.set(xlabel=read.axis, ylabel="share of clients (%)", ylim=(0, 101))
    style.legend(figure, axes[1::2])
    return style.save(plt, figure, path)


def over_rounds(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Every client's accuracy over rounds as a thin line, median and worst tenth as thick ones;
    first seed."""
    plt, look = style.drawing(), style.looks(labels(groups))
    mine = with_clients(groups)[:MOST_PANELS]
    figure, axes = style.panels(plt, len(mine))
    for axis, g in zip(axes, mine, strict=True):
        run = g.runs[0]
        mode, read = run.last_of_clients()[0], about(g)
        rounds = run.clients[f"{mode}_rounds"]
        values = read.scale * np.asarray(run.of_clients(mode))  # [E, N]
        values = values[:, np.isfinite(values).all(0)]
        colour = look[g.label]["color"]
        pale = max(0.05, min(0.35, 6 / values.shape[1]))
        axis.plot(rounds, values, color=colour, alpha=pale, linewidth=0.7)
        axis.plot(rounds, np.median(values, 1), color=colour, linewidth=2, label="median client")
        worst = [worst_tenth(v, read.better) for v in values]
        axis.plot(rounds, worst, "--", color="black", linewidth=1.3, label="worst 10 %")
        style.title(axis, g.label, g.scene)
        axis.set_ylabel(f"each client's {read.axis}")
        if read.unit == "percent":
            axis.set_ylim(-2, 102)
        style.rounds_axis(axis)
    style.legend(figure, axes)
    return style.save(plt, figure, path)


# evaluation modes in clients.npz: whose model on whose rows
MODES = {
    "personal": "its own model on its own rows",
    "personal_at_global": "its own model on the test set",
    "personal_at_train": "its own model on its training rows",
    "resident": "its resident model on its own rows",
    "global_at_clients": "the global model on its own rows",
}


def one_by_one(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """(scene, mode) for which values of single clients are stored; [] unless there are at least two
    modes."""
    has = lambda scene, mode: any(
        g.scene == scene and g.runs[0].of_clients(mode) is not None for g in groups
    )
    found = [(scene, mode) for scene in scenes(groups) for mode in MODES if has(scene, mode)]
    return found if len({mode for _, mode in found}) > 1 else []


def one_client(groups: Sequence[Group], path: pathlib.Path, client: int = 0) -> list[pathlib.Path]:
    """One client over rounds: a panel per scene and evaluation mode, mean and ± band over seeds."""
    plt, look = style.drawing(), style.looks(labels(groups))
    which = one_by_one(groups)
    modes = {mode for _, mode in which}
    figure, axes = style.panels(plt, len(which), most=max(2, min(3, len(modes))))
    for axis, (scene, mode) in zip(axes, which, strict=True):
        has = lambda g: all(run.of_clients(mode) is not None for run in g.runs)
        drawn = [g for g in groups if g.scene == scene and has(g)]
        for g in drawn:
            of_one = [np.asarray(run.of_clients(mode))[:, client] for run in g.runs]
            least = min(map(len, of_one))
            values = about(g).scale * np.nan_to_num([v[:least] for v in of_one])
            rounds = g.runs[0].clients[f"{mode}_rounds"][:least]
            curve = rounds, values.mean(0), deviation(values)
            style.band(axis, *curve, g.label, look[g.label])
        style.title(axis, scene, f"client {client}: {MODES[mode]}")
        axis.set_ylabel(about(drawn[0]).axis)
        style.rounds_axis(axis)
    style.legend(figure, axes)
    return style.save(plt, figure, path)


def label_counts(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """{scene: training examples [N, classes]}, from the first run that stored them."""
    out: dict[str, np.ndarray] = {}
    for g in groups:
        for run in g.runs:
            if "label_counts" in run.clients:
                out.setdefault(g.scene, run.clients["label_counts"])
    return out


def bubbles(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Clients against classes: the area of a dot is the number of examples."""
    plt = style.drawing()
    tables = label_counts(groups)
    widest = max(min(MOST_BUBBLES, len(t)) for t in tables.values())
    figure, axes = style.panels(
        plt, len(tables), width=max(4.6, 0.16 * widest + 1.5), height=3.8, most=2
    )
    for axis, (scene, counts) in zip(axes, tables.items(), strict=True):
        shown = counts[:MOST_BUBBLES]
        client, label = np.nonzero(shown)
        areas = shown[client, label] / shown.max()
        axis.scatter(
            client, label, s=2 + 140 * areas, color=style.COLOURS[0], alpha=0.75, linewidths=0
        )
        note = f", the first {len(shown)} of {len(counts)}" if len(counts) > len(shown) else ""
        style.title(axis, scene, f"training examples per label, largest dot {shown.max():,}{note}")
        axis.set_ylabel("label")
        axis.set(xlim=(-1, len(shown)), ylim=(-0.8, shown.shape[1] - 0.2))
        style.rounds_axis(axis, "client")
        style.whole_numbers(axis.yaxis, min(shown.shape[1], 12))
    return style.save(plt, figure, path)
