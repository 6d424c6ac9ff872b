"""`fedjax-sim report`: every figure that the runs have data for, and one page with all of them.

The page needs no network and no other files. The data are JSON inside it; names are inserted only
as text, never as HTML.
"""

from __future__ import annotations

import base64
import functools
import html
import importlib.resources
import io
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim import __version__
from fedjax_sim.report import clients, costs, curves, policy, style, tables
from fedjax_sim.report.groups import Group, grouped, labels, scenes
from fedjax_sim.report.runs import load_runs
from fedjax_sim.runner.files import write_bytes

PIXELS = 112  # on the page per inch of a figure, so that text has the same size in all of them
DIGITS = 6  # significant digits in the page's data


def brief(values: Any) -> list[float | None]:
    """Numbers for the page: few digits, None for those that are not finite."""
    few = lambda v: float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None
    return list(map(few, np.asarray(values, float).tolist()))


def lines(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Every curve: mean and std at rounds, with bytes and seconds until then."""
    out = []
    for g in groups:
        for column in curves.measured([g]):
            scale = curves.about_of(column, [g]).scale
            rounds, mean, std = g.series(column, curves.PLACES["rounds"])
            sent, _, _ = g.series(column, curves.PLACES["bytes"])
            timed = all(run.timings or run.virtual for run in g.runs)
            seconds = g.series(column, curves.PLACES["time"])[0] if timed else np.zeros(0)
            one = dict(label=g.label, scene=g.scene, metric=column, rounds=brief(rounds))
            one |= dict(bytes=brief(sent), time=brief(seconds))
            out.append(one | dict(mean=brief(scale * mean), std=brief(scale * std)))
    return out


def short(titles: Sequence[str]) -> dict[str, str]:
    """{title: the parts that not all titles share}, short enough for a cell of the table.

    >>> short(["digits · iid · 8 clients", "digits · shards:2 · 8 clients"])
    {'digits · iid · 8 clients': 'iid', 'digits · shards:2 · 8 clients': 'shards:2'}
    """
    parts = {scene: scene.split(" · ") for scene in titles}
    common = set.intersection(*map(set, parts.values())) if parts else set()
    rest = lambda pieces: " · ".join(p for p in pieces if p not in common)
    return {scene: rest(pieces) or scene for scene, pieces in parts.items()}


def content(groups: Sequence[Group]) -> dict[str, Any]:
    """The data for the page's script."""
    names, look = labels(groups), style.looks(labels(groups))
    broken = [line for line in style.LINES if not isinstance(line, str)]
    dashes = {"-": ""} | {line: " ".join(f"{d:g}" for d in line[1]) for line in broken}
    columns = tables.shown_columns(groups)
    rows = []
    for g in sorted(groups, key=lambda g: (scenes(groups).index(g.scene), names.index(g.label))):
        found = tables.statistics(g)
        cell = lambda c: found[c.key]._asdict() if c.key in found else tables.missing(g, c)
        row = dict(label=g.label, scene=g.scene, seeds=len(g.runs), ended=g.ended)
        rows.append(row | dict(cells={c.key: cell(c) for c in columns}))
    scale = lambda c: dict(
        zip(("unit", "scale", "digits"), tables.scale_of(groups, c), strict=True)
    )
    title = lambda c: dict(title=curves.title_of(c, groups), axis=curves.about_of(c, groups).axis)
    first = groups[0].runs[0].primary
    return dict(
        methods=[
            dict(label=n, color=look[n]["color"], dash=dashes[look[n]["linestyle"]]) for n in names
        ],
        scenes=scenes(groups),
        brief=short(scenes(groups)),
        columns=[c._asdict() | scale(c) for c in columns],
        rows=rows,
        metrics=[dict(key=c, **title(c)) for c in curves.measured(groups)],
        primary=first.label,
        axis=first.about.axis,
        lines=lines(groups),
        virtual=any(run.virtual for g in groups for run in g.runs),
        clients=[
            dict(label=g.label, scene=g.scene, values=brief(np.sort(clients.last_values(g))))
            for g in clients.with_clients(groups)
        ],
    )


def figure(title: str, picture: pathlib.Path) -> str:
    from PIL import Image  # comes with matplotlib

    small = io.BytesIO()
    with Image.open(picture) as image:  # a palette: a quarter of the bytes
        image.convert("RGB").quantize(200).save(small, "PNG")
        width = round(PIXELS * image.width / style.DPI)
    data = base64.b64encode(small.getvalue()).decode()
    name = html.escape(title)
    return (
        f'<figure><h3>{name}</h3><img alt="{name}" width="{width}"'
        f' src="data:image/png;base64,{data}"></figure>'
    )


def write(
    groups: Sequence[Group], pictures: Sequence[tuple[str, pathlib.Path]], path: pathlib.Path
) -> pathlib.Path:
    """Write the page to `path`; pictures: (title, PNG file)."""
    file = importlib.resources.files("fedjax_sim.report").joinpath("page.html")
    frame = file.read_text(encoding="utf-8")
    data = json.dumps(content(groups), allow_nan=False).replace("<", "\\u003c")
    title = scenes(groups)[0] if len(scenes(groups)) == 1 else f"{len(scenes(groups))} settings"
    parts = {
        "TITLE": html.escape(title),
        "VERSION": html.escape(__version__),
        "DATA": data,
        "FIGURES": "\n".join(figure(name, file) for name, file in pictures),
    }
    before, *rest = frame.split("@@")  # text between pairs of @@ is the name of a part
    out = [before]
    for i, piece in enumerate(rest):
        out.append(parts[piece] if i % 2 == 0 else piece)
    write_bytes(path, "".join(out).encode())
    return path


Drawn = tuple[str, str, Callable[[pathlib.Path], list[pathlib.Path]]]  # file, title, function
Draw = Callable[[Sequence[Group], pathlib.Path], list[pathlib.Path]]
# (whether there are data for it, file, title, function) in the order of the page
FIGURES: tuple[tuple[Callable[[Sequence[Group]], Any], str, str, Draw], ...] = (
    (costs.reached, "thresholds", "Cost to reach an accuracy", costs.thresholds),
    (costs.numeric_settings, "settings", "Accuracy against settings", costs.settings),
    (clients.with_clients, "clients", "Spread over clients", clients.spread),
    (clients.with_clients, "client_curves", "Every client over rounds", clients.over_rounds),
    (clients.one_by_one, "one_client", "One client over rounds", clients.one_client),
    (clients.label_counts, "labels", "Labels of the clients", clients.bubbles),
    (len, "communication", "Communication per round", curves.communication),
    (policy.controlled, "actions", "Actions over rounds", policy.evolution),
    (policy.controlled, "policy", "Policy", policy.summary),
    (curves.rewarded, "reward", "Reward of the controller", curves.reward),
    (policy.budgeted, "budgets", "Budgets", policy.budgets),
    (policy.mixed, "weights", "Mixing weights", policy.heat_maps),
    (curves.layered, "layers", "Distances of layers", curves.layers),
)


def possible(groups: Sequence[Group], profiles: Sequence[dict[str, Any]] = ()) -> Iterator[Drawn]:
    """The figures for which there are data, in the order of the page."""
    for place, title in (("rounds", "rounds"), ("bytes", "communication"), ("time", "time")):
        if curves.measured(groups) and (
            place != "time" or all(run.timings for g in groups for run in g.runs)
        ):
            name = "accuracy" if place == "rounds" else f"accuracy_{place}"
            drawing = functools.partial(curves.accuracy, groups, place=place)
            yield name, f"Accuracy against {title}", drawing
    for available, name, title, draw in FIGURES:
        if available(groups):
            yield name, title, functools.partial(draw, groups)
    if profiles:
        yield "time", "Parts of a round", functools.partial(costs.breakdown, profiles)


def report(
    paths: Sequence[str | pathlib.Path],
    out: str | pathlib.Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    titles: bool = True,
) -> list[pathlib.Path]:
    """Draw everything as PNG and PDF into `out` (default: the first directory), and report.html
    with all of it.

    titles: whether panels have titles; figures for a paper have none.
    """
    groups = grouped(load_runs(paths, say), say)
    folder = pathlib.Path(out) if out is not None else pathlib.Path(paths[0])
    folder.mkdir(parents=True, exist_ok=True)
    with style.titled(titles):
        drawn = [
            (title, draw(folder / name))
            for name, title, draw in possible(groups, costs.read_profiles(paths, say))
        ]
    pictures = [(title, files[0]) for title, files in drawn]
    page = write(groups, pictures, folder / "report.html")
    return [*(file for _, files in drawn for file in files), page]
