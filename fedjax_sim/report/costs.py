"""Figures about cost: rounds, bytes and minutes to accuracy thresholds; the stages of a round;
accuracy against a setting."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.options import shown
from fedjax_sim.report import style
from fedjax_sim.report.groups import ASIDE, Group, flat, labels, scenes, spread, text_of
from fedjax_sim.runner.files import checksum

# the costs in a summary and their units: (name, size in the unit of the summary)
COSTS = {
    "rounds_to": (("rounds", 1.0),),
    "comm_gb_to": tuple((name, size / 1e9) for name, size in style.BYTES),
    "time_min_to": tuple((name, size / 60) for name, size in style.SECONDS),
}
STAGES = ("plan", "local", "aggregation", "controller", "evaluation")


def reached(groups: Sequence[Group]) -> list[str]:
    """Thresholds (in percent) that any run reached; at most the four highest."""
    when = [run.summary.get("rounds_to", {}) for g in groups for run in g.runs]
    found = {x for one in when for x, r in one.items() if r is not None}
    return sorted(found, key=float)[-4:]


def cost(group: Group, kind: str, threshold: str) -> tuple[float, float, int]:
    """(mean, std, how many seeds reached it); NaN: none did, or nothing was measured."""
    found = [run.summary.get(kind, {}).get(threshold) for run in group.runs]
    values = np.array([v for v in found if v is not None], float)
    if not len(values):
        return np.nan, 0.0, 0
    return float(values.mean()), float(spread(values)), len(values)


def thresholds(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Rounds, GB and minutes until each accuracy was first reached; ×: never."""
    plt, look = style.drawing(), style.looks(labels(groups))
    where = [s for s in scenes(groups) if reached([g for g in groups if g.scene == s])]
    figure, axes = style.panels(plt, 3 * len(where), width=4.2)
    for row, scene in enumerate(where):
        mine = [g for g in groups if g.scene == scene]
        goals = reached(mine)
        width = 0.8 / len(mine)
        for axis, (kind, units) in zip(axes[3 * row :], COSTS.items(), strict=False):
            name, scale = style.unit([cost(g, kind, x)[0] for g in mine for x in goals], units)
            for i, g in enumerate(mine):
                place = np.arange(len(goals)) + (i - (len(mine) - 1) / 2) * width
                costs = [cost(g, kind, x) for x in goals]
                mean, std = (np.array([t[k] for t in costs], float) / scale for k in (0, 1))
                errors = dict(yerr=np.where(std > 0, std, np.nan), error_kw=dict(linewidth=0.8))
                named = dict(color=look[g.label]["color"], label=style.safe(g.label))
                axis.bar(place, np.nan_to_num(mean), width * 0.92, capsize=2, **errors, **named)
                sign = "×" if any(run.summary.get("targets_of", True) for run in g.runs) else "–"
                for x in place[np.isnan(mean)]:
                    below = dict(ha="center", va="bottom", color=look[g.label]["color"])
                    axis.annotate(sign, (x, 0), **below)
            axis.set_xticks(range(len(goals)), [f"{x} %" for x in goals])
            style.title(axis, scene, f"{name} to an accuracy (× never)")
            axis.set(ylabel=name, xlabel="accuracy", ylim=(0, None))
            axis.grid(False, axis="x")
    style.legend(figure, axes)
    return style.save(plt, figure, path)


def read_profiles(
    paths: Sequence[str | pathlib.Path], say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """The files that `fedjax-sim profile --out` wrote anywhere below `paths`; damaged ones are left
    out and reported."""
    out = []
    for path in map(pathlib.Path, paths):
        for file in sorted(path.rglob("profile.json")):
            try:
                profile = json.loads(file.read_bytes())
                seconds = profile["seconds"]
                seconds = {"plan": seconds.get("orders")} | seconds  # its name in version 0.2.0
                seconds = {k: float(seconds[k]) for k in STAGES}
                one = {"method": str(profile["method"]), "seconds": seconds}
                if profile["checksum"] != checksum(profile):
                    raise ValueError
                out.append(one)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                say(f"left out: '{shown(str(file), 200)}' is not as fedjax-sim profile writes it")
    return out


def breakdown(profiles: Sequence[dict[str, Any]], path: pathlib.Path) -> list[pathlib.Path]:
    """The time of each stage of a round, a bar per profile."""
    plt = style.drawing()
    figure, axis = plt.subplots(figsize=(7, 1.4 + 0.45 * len(profiles)))
    name, scale = style.unit(
        [sum(p["seconds"].values()) for p in profiles], (("milliseconds", 1e-3), ("seconds", 1.0))
    )
    left = np.zeros(len(profiles))
    for stage, colour in zip(STAGES, style.COLOURS, strict=False):
        values = np.array([p["seconds"][stage] for p in profiles]) / scale
        axis.barh(range(len(profiles)), values, left=left, color=colour, label=stage, height=0.6)
        left += values
    axis.set_yticks(range(len(profiles)), [style.safe(p["method"]) for p in profiles])
    axis.invert_yaxis()
    style.title(axis, "parts of a round, measured one by one")
    axis.set(xlabel=f"{name} per round")
    axis.grid(False, axis="y")
    style.legend(figure, [axis])
    return style.save(plt, figure, path)


def numeric_settings(groups: Sequence[Group]) -> dict[str, dict[str, list[tuple[float, Group]]]]:
    """{setting: {curve: [(value, group)]}} of settings with at least three numbers while all others
    are equal."""
    configs = [
        (g, {n: v for n, v in flat(g.runs[0].config).items() if n not in ASIDE or n == "method"})
        for g in groups
    ]
    names = dict.fromkeys(n for _, c in configs for n in c)
    out: dict[str, dict[str, list[tuple[float, Group]]]] = {}
    for name in names:
        found: dict[str, list[tuple[float, Group]]] = {}
        for g, config in configs:
            value = number_in(config.get(name))
            if value is not None:
                rest = {n: text_of(v) for n, v in config.items() if n != name}
                found.setdefault(json.dumps(rest, sort_keys=True), []).append((value, g))
        several = {k: points for k, points in found.items() if len({v for v, _ in points}) >= 3}
        kept = {k: sorted(points, key=lambda t: t[0]) for k, points in several.items()}
        if kept:
            out[name] = kept
    return out


def number_in(value: Any) -> float | None:
    """The number in a value, also in 'dirichlet:0.3' or '10/50'; None without one.

    >>> number_in("dirichlet:0.3"), number_in("10/50"), number_in("iid"), number_in(True)
    (0.3, 10.0, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return float(str(value).partition(":")[2] or str(value).partition("/")[0])
    except ValueError:
        return None


def settings(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Accuracy against every setting that varies: best global, or the clients' mean without a
    global model."""
    plt = style.drawing()
    found = numeric_settings(groups)
    figure, axes = style.panels(plt, len(found))
    for axis, (name, curves) in zip(axes, found.items(), strict=True):
        members = [g for points in curves.values() for _, g in points]
        primary = members[0].runs[0].primary
        best = all(len(g.figure("best_global")) for g in members)
        figure_name = "best_global" if best else primary.of_clients("mean")
        titles = []
        for i, (key, points) in enumerate(curves.items()):
            rest = json.loads(key)
            different = [k for k in rest if len({json.loads(other).get(k) for other in curves}) > 1]
            titles.append(
                ", ".join([rest["method"], *(f"{k} {rest[k]}" for k in different if k != "method")])
            )
            values = [primary.about.scale * g.figure(figure_name) for _, g in points]
            line = list(style.looks(titles).values())[i]
            means = [v.mean() if len(v) else np.nan for v in values]
            marks = dict(marker="o", markersize=4, capsize=2, label=style.safe(titles[i]))
            spread_of = [spread(v) for v in values]
            axis.errorbar([x for x, _ in points], means, spread_of, **marks, **line)
        spans = [x for points in curves.values() for x, _ in points]
        if min(spans) > 0 and max(spans) / min(spans) > 20:
            axis.set_xscale("log")
        style.title(axis, f"{primary.label} against {name}")
        what = "best" if best else "client mean"
        axis.set(xlabel=style.safe(name), ylabel=f"{what} {primary.about.axis}")
    style.legend(figure, axes)
    return style.save(plt, figure, path)
