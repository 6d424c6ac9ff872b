"""Figures about controllers: actions, their entropy, mixing weights, budgets."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from fedjax_sim.report import style
from fedjax_sim.report.groups import Group, labels, scenes
from fedjax_sim.report.runs import Run, windowed_shares

WINDOW = 10  # rounds


def controlled(groups: Sequence[Group]) -> list[Group]:
    return [g for g in groups if all(run.actions for run in g.runs)]


def colours(names: Sequence[str]) -> dict[str, str]:
    others = iter(style.COLOURS[4:] * 10)
    return {name: style.ACTIONS[name] if name in style.ACTIONS else next(others) for name in names}


def evolution(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Stacked shares of the actions over the last ten rounds, accuracy on the right axis; a panel
    per group, first seed."""
    plt = style.drawing()
    mine = controlled(groups)
    figure, axes = style.panels(plt, len(mine), width=5.0)
    colour = colours(list(dict.fromkeys(name for g in mine for name in g.runs[0].actions)))
    rights = []
    for axis, g in zip(axes, mine, strict=True):
        run = g.runs[0]
        shares, rounds = windowed_shares(run.actions, WINDOW), run.rounds["round"]
        parts = [100 * s for s in shares.values()]
        look = dict(labels=list(map(style.safe, shares)), colors=[colour[n] for n in shares])
        axis.stackplot(rounds, *parts, alpha=0.75, **look)
        style.title(axis, g.label, g.scene)
        wide = rounds[0], max(rounds[-1], rounds[0] + 1)
        axis.set(ylabel=f"actions of {WINDOW} rounds (%)", ylim=(0, 100), xlim=wide)
        axis.grid(False)
        style.rounds_axis(axis)
        right = axis.twinx()
        (of_server, of_clients), about = run.primary.columns, run.primary.about
        tested = len(run.points(of_server)[0]) > 0
        when, values = run.points(of_server if tested else of_clients)
        label = f"{'test' if tested else 'client'} {about.label}"
        right.plot(when, about.scale * values, color="black", label=label)
        right.set(ylabel=about.axis, **(dict(ylim=(0, 100)) if about.unit == "percent" else {}))
        right.grid(False)
        right.spines["right"].set_visible(True)
        rights.append(right)
    style.legend(figure, [*axes, *rights])
    return style.save(plt, figure, path)


def entropy(run: Run) -> np.ndarray:
    """[T] entropy of the actions of the last ten rounds; 1 if all are equally frequent."""
    now = np.stack(list(windowed_shares(run.actions, WINDOW).values()))  # [A, T]
    log = np.log(np.where(now > 0, now, 1))
    return -(now * log).sum(0) / np.log(max(2, len(now)))


def summary(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """A row per scene. Left: share of each action over the whole run. Right: normalised entropy of
    the actions of ten rounds."""
    plt, look = style.drawing(), style.looks(labels(groups))
    mine = controlled(groups)
    where = scenes(mine)
    figure, axes = style.panels(plt, 2 * len(where), width=5.2, most=2)
    names = list(dict.fromkeys(name for g in mine for name in g.runs[0].actions))
    colour = colours(names)
    for scene, bars, curves in zip(where, axes[::2], axes[1::2], strict=True):
        here = [g for g in mine if g.scene == scene]
        left = np.zeros(len(here))
        for name in names:
            taken = [sum(run.actions.get(name, np.zeros(1)).sum() for run in g.runs) for g in here]
            every = [sum(v.sum() for run in g.runs for v in run.actions.values()) for g in here]
            share = 100 * np.array(taken) / np.maximum(1, every)
            named = dict(label=style.safe(name), color=colour[name])
            drawn = bars.barh(range(len(here)), share, left=left, height=0.6, **named)
            inside = [f"{s:.0f}" if s >= 6 else "" for s in share]
            bars.bar_label(drawn, inside, label_type="center", color="white", fontsize=8)
            left += share
        bars.set_yticks(range(len(here)), [style.safe(g.label) for g in here])
        bars.set(xlabel="share of actions (%)", xlim=(0, 100), ylim=(max(2, len(here)) - 0.5, -0.5))
        bars.grid(False)
        style.title(bars, scene, "actions over the whole run")
        for g in here:
            style.band(curves, *g.per_round(entropy), g.label, look[g.label])
        style.title(curves, scene, f"entropy of the actions of {WINDOW} rounds")
        curves.set(ylabel="H / log A", ylim=(-0.02, 1.05))
        style.rounds_axis(curves)
    style.legend(figure, axes)
    return style.save(plt, figure, path)


def mixed(groups: Sequence[Group]) -> list[Group]:
    return [g for g in groups if g.runs[0].matrices]


def heat_maps(groups: Sequence[Group], path: pathlib.Path, client: int = 0) -> list[pathlib.Path]:
    """Left of each pair: a matrix of weights, mean over the second half of the run. Right: the
    weights for one client over rounds; first seed."""
    plt = style.drawing()
    found = [
        (g, name, values) for g in mixed(groups) for name, values in g.runs[0].matrices.items()
    ]
    figure, axes = style.panels(plt, 2 * len(found), width=4.8, most=2)
    for (g, name, values), picture, lines in zip(found, axes[::2], axes[1::2], strict=True):
        second_half = values[len(values) // 2 :]
        known = (~np.isnan(second_half)).sum(0)
        mean = np.where(known > 0, np.nansum(second_half, 0) / np.maximum(known, 1), np.nan)
        figure.colorbar(picture.imshow(mean, cmap="viridis", aspect="auto"), ax=picture)
        picture.grid(False)
        style.whole_numbers(picture.xaxis, 10)
        style.whole_numbers(picture.yaxis, 10)
        style.title(picture, f"{g.label}: {name}, last {len(second_half)} rounds")
        picture.set(xlabel="of client", ylabel="for client (white: never)")
        for j in range(min(values.shape[2], len(style.COLOURS))):
            known_at = ~np.isnan(values[:, client, j])
            few = "o" if known_at.sum() < 0.8 * len(known_at) else None
            rounds = g.runs[0].rounds["round"][: len(known_at)][known_at]
            look = dict(color=style.COLOURS[j], label=f"of client {j}", marker=few, markersize=3)
            lines.plot(rounds, values[known_at, client, j], **look)
        style.title(lines, f"{name} for client {client}", g.scene)
        style.rounds_axis(lines)
    style.legend(figure, axes[1::2])
    return style.save(plt, figure, path)


def panels_of(groups: Sequence[Group]) -> dict[str, tuple[str, str, bool]]:
    """The panels that methods declare: {column: (title, label of the axis, whether it is summed
    over rounds)}."""
    wanted = [run.resolved.get("panels", {}) for g in groups for run in g.runs]
    return {
        name: (title, unit, added)
        for panels in wanted
        for name, (title, unit, added) in panels.items()
    }


def budgeted(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """(scene, column) of the declared panels with data."""
    has = lambda scene, name: any(
        g.scene == scene and all(r.counted(name) is not None for r in g.runs) for g in groups
    )
    return [
        (scene, name) for scene in scenes(groups) for name in panels_of(groups) if has(scene, name)
    ]


def accumulated(run: Run, name: str, added: bool) -> np.ndarray:
    values = np.asarray(run.counted(name), float)
    return np.cumsum(values) if added else values


def budgets(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """The panels that methods declare, over rounds; mean and ± band over seeds."""
    plt, look = style.drawing(), style.looks(labels(groups))
    which = budgeted(groups)
    figure, axes = style.panels(plt, len(which))
    for axis, (scene, name) in zip(axes, which, strict=True):
        title, unit, added = panels_of(groups)[name]
        has = lambda g: all(run.counted(name) is not None for run in g.runs)
        for g in (g for g in groups if g.scene == scene and has(g)):
            values = g.per_round(lambda run: accumulated(run, name, added))
            style.band(axis, *values, g.label, look[g.label])
        style.title(axis, scene, title)
        axis.set_ylabel(unit)
        style.rounds_axis(axis)
    style.legend(figure, axes)
    return style.save(plt, figure, path)
