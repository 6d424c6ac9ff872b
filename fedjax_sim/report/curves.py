"""Curves over a run: accuracy against rounds, bytes and time; reward; bytes per round; distances of
layers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.metrics.base import About, on_rows
from fedjax_sim.report import style
from fedjax_sim.report.groups import Group, labels, scenes
from fedjax_sim.report.runs import Run, smooth

WINDOW = 10  # rounds of the reward's mean
GLOBAL = "global model, test set"
OVER_CLIENTS = {
    "client": "clients, each with the model it predicts with, mean",
    "resident": "clients, each with its resident model, mean",
    "personal_at_global": "models that clients predict with, on the test set, mean",
    "personal_at_train": "models that clients predict with, on their training rows, mean",
    "global_at_clients": "global model on clients' rows, mean",
    "before": "participants before local training",
    "after": "participants after local training",
    "unseen_client": "clients kept out of training, mean",
}
Place = Callable[[Run, np.ndarray], np.ndarray]
PLACES: dict[str, Place] = {
    "rounds": lambda run, rounds: rounds,
    "bytes": lambda run, rounds: run.bytes_at(rounds),
    "time": lambda run, rounds: run.seconds_at(rounds),
}


def compared(groups: Sequence[Group]) -> dict[str, tuple[str, About]]:
    """{column: (title, unit)} of the runs' primary metrics."""
    out: dict[str, tuple[str, About]] = {}
    for primary in dict.fromkeys(run.primary for g in groups for run in g.runs):
        out[primary.columns[0]] = (GLOBAL, primary.about)
        for prefix, title in OVER_CLIENTS.items():
            out[f"{prefix}_{primary.over}mean"] = title, primary.about
    return out


def others(groups: Sequence[Group]) -> dict[str, tuple[str, About]]:
    """{column: (title, unit)} of the other metrics, requested ones first."""
    abouts = {name: about for g in groups for run in g.runs for name, about in run.others.items()}
    wanted = [n for n, a in abouts.items() if a.tabled or n.startswith(("global_", "client_"))]
    order = sorted(wanted, key=lambda name: not abouts[name].tabled)
    return {name: (name.replace("_", " "), abouts[name]) for name in order}


def measured(groups: Sequence[Group]) -> list[str]:
    """The columns of metrics that any run has, the primary's first."""
    known = {**compared(groups), **others(groups)}
    return [c for c in known if any(len(run.points(c)[0]) for g in groups for run in g.runs)]


def title_of(column: str, groups: Sequence[Group]) -> str:
    runs = [run for g in groups for run in g.runs]
    own = [f"{prefix}_" for prefix in OVER_CLIENTS if not prefix.startswith("personal_at_")]
    rows: dict[str, None] = {}
    if column.startswith(tuple(own)):
        rows = dict.fromkeys(filter(None, (on_rows(run.resolved) for run in runs)))
        if not rows and any("client_on_train_rows" in run.metrics for run in runs):
            rows = {"training rows": None}
    known = {**others(groups), **compared(groups)}
    title = known.get(column, (column.replace("_", " "),))[0]
    return f"{title} ({'; '.join(rows)})" if rows else title


def about_of(column: str, groups: Sequence[Group]) -> About:
    return {**others(groups), **compared(groups)}.get(column, ("", About()))[1]


def along(place: str, groups: Sequence[Group], column: str) -> tuple[str, float]:
    """(label, divisor) of the horizontal axis, in a unit that suits the values."""
    if place == "rounds":
        return "round", 1
    ends = [g.series(column, PLACES[place])[0] for g in groups]
    if place == "bytes":
        name, scale = style.unit(ends, style.BYTES)
        return f"{name} sent, down and up", scale
    lasts = [x[-1] for x in ends if len(x)]
    # the median: one slow method must not decide
    name, scale = style.unit([np.median(lasts)] if lasts else [], style.SECONDS)
    virtual = any(run.virtual for g in groups for run in g.runs)
    return f"{name} of {'simulated' if virtual else 'running'} time", scale


def target(groups: Sequence[Group], column: str) -> float | None:
    """The highest multiple of ten percent that at least half of the curves reach; None for other
    units or a single curve."""
    about = about_of(column, groups)
    if about.unit != "percent" or about.better < 0:
        return None
    means = [g.series(column, PLACES["rounds"])[1] for g in groups]
    best = sorted(float(mean.max()) for mean in means if len(mean))
    if len(best) < 2:
        return None
    goal = 10 * np.floor(10 * best[(len(best) - 1) // 2] + 1e-9)
    return float(goal) if goal > 0 else None


def accuracy(
    groups: Sequence[Group],
    path: pathlib.Path,
    place: str = "rounds",
    columns: Sequence[str] | None = None,
) -> list[pathlib.Path]:
    """Metrics against `place`: a panel per scene and column, mean line and ± band over seeds.

    columns: those to draw; None: all.
    """
    plt, look = style.drawing(), style.looks(labels(groups))
    known = measured(groups) if columns is None else list(columns)
    shown = known[: 8 if place == "rounds" else 2]
    has = lambda mine, column: any(len(run.points(column)[0]) for g in mine for run in g.runs)
    here = {scene: [g for g in groups if g.scene == scene] for scene in scenes(groups)}
    which = [(s, c, mine) for s, mine in here.items() for c in shown if has(mine, c)]
    figure, axes = style.panels(plt, len(which), most=max(2, min(3, len(shown))))
    for axis, (scene, column, mine) in zip(axes, which, strict=True):
        accuracy_panel(axis, mine, column, place, look)
        style.title(axis, scene, title_of(column, mine))
    seeds = max(len(g.runs) for g in groups)
    what = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else None
    style.legend(figure, axes, what, labels(groups))
    return style.save(plt, figure, path)


def accuracy_panel(
    axis: Any, groups: Sequence[Group], column: str, place: str, look: dict[str, dict[str, Any]]
) -> None:
    """The curves of one column; a circle where each first reaches the common target."""
    name, scale = along(place, groups, column)
    goal, about = target(groups, column), about_of(column, groups)
    ends = []
    for g in groups:
        x, mean, std = g.series(column, PLACES[place])
        x, mean, std = x / scale, about.scale * mean, about.scale * std
        ends.append(x)
        if len(x):
            style.band(axis, x, mean, std, g.label, look[g.label])
        if goal is not None and (first := np.flatnonzero(mean >= goal)).size:
            at = first[0]
            ring = dict(markerfacecolor="none", markeredgecolor=look[g.label]["color"])
            axis.plot(x[at], mean[at], "o", markersize=7, zorder=5, **ring)
    if goal is not None:
        dashed = dict(color="0.45", linewidth=0.9, linestyle=(0, (2, 2)))
        axis.axhline(goal, label=f"○ {goal:g} % first reached", **dashed)
    axis.set_ylabel(about.axis)
    style.rounds_axis(axis) if place == "rounds" else axis.set_xlabel(name)
    if place == "time":
        style.far_apart(axis, ends)


def communication(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Bytes per round, down and up together; dotted: the cost of full redistribution."""
    plt, look = style.drawing(), style.looks(labels(groups))
    figure, axes = style.panels(plt, len(scenes(groups)), width=5.4)
    total = lambda run: run.rounds["bytes_down"] + run.rounds["bytes_up"]
    for axis, scene in zip(axes, scenes(groups), strict=True):
        mine = [g for g in groups if g.scene == scene]
        name, scale = style.unit([total(run) for g in mine for run in g.runs], style.BYTES)
        most = 0.0
        for g in mine:
            x, mean, std = g.per_round(total)
            style.band(axis, x, mean / scale, std / scale, g.label, look[g.label])
            most = max(most, mean.max() / scale)
            if g.runs[0].actions:  # uploads are whole models, so twice those is full redistribution
                _, full, _ = g.per_round(lambda run: 2 * run.rounds["bytes_up"])
                line = dict(color=look[g.label]["color"], linewidth=1, linestyle=":")
                axis.plot(x, full / scale, label=style.safe(f"{g.label}: all full"), **line)
                most = max(most, full.max() / scale)
        style.title(axis, scene)
        axis.set(ylabel=f"{name} per round, down and up", ylim=(0, 1.08 * most or 1))
        style.rounds_axis(axis)
    style.legend(figure, axes)
    return style.save(plt, figure, path)


def rewarded(groups: Sequence[Group]) -> list[Group]:
    return [g for g in groups if all("reward" in run.rounds for run in g.runs)]


def reward(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """The controller's reward: every round as a pale line, the mean of ten rounds as a strong
    one."""
    plt, look = style.drawing(), style.looks(labels(groups))
    mine = rewarded(groups)
    where = scenes(mine)
    figure, axes = style.panels(plt, len(where), width=5.4)
    for axis, scene in zip(axes, where, strict=True):
        for g in (g for g in mine if g.scene == scene):
            x, mean, _ = g.per_round(lambda run: np.nan_to_num(run.rounds["reward"]))
            axis.plot(x, mean, **look[g.label] | dict(alpha=0.25, linewidth=0.8))
            axis.plot(x, smooth(mean, WINDOW), label=style.safe(g.label), **look[g.label])
        style.title(axis, scene)
        axis.set_ylabel(f"reward, mean of {WINDOW} rounds")
        style.rounds_axis(axis)
    style.legend(figure, axes)
    return style.save(plt, figure, path)


def layered(groups: Sequence[Group]) -> list[Group]:
    return [g for g in groups if all(run.layers for run in g.runs)]


def layers(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Distances of the participants' models to the server's, by parameter group; a panel per method
    and scene."""
    plt = style.drawing()
    mine = layered(groups)
    look = style.looks(list(dict.fromkeys(name for g in mine for name in g.runs[0].layers)))
    figure, axes = style.panels(plt, len(mine))
    for axis, g in zip(axes, mine, strict=True):
        for name in g.runs[0].layers:
            x, mean, std = g.per_round(lambda run: run.layers[name])
            style.band(axis, x, mean, std, name, look[name])
        style.title(axis, g.label, g.scene)
        axis.set_ylabel("mean distance to the server's model")
        style.rounds_axis(axis)
    style.legend(figure, axes)
    return style.save(plt, figure, path)
