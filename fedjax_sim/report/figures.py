"""`fedjax-sim report`: every figure that the runs have data for, and one page that holds them
all."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedjax_sim.report import costs, curves, page, people, policy, style
from fedjax_sim.report.groups import Group, grouped
from fedjax_sim.report.runs import load_runs

Drawn = tuple[str, str, Callable[[pathlib.Path], list[pathlib.Path]]]  # file, title, how


def possible(groups: Sequence[Group], profiles: Sequence[dict[str, Any]] = ()) -> Iterator[Drawn]:
    """The figures for which there are data, in the order of the page."""
    for place, title in (("rounds", "rounds"), ("bytes", "communication"), ("time", "time")):
        if curves.measured(groups) and (
            place != "time" or all(run.timings for g in groups for run in g.runs)
        ):
            name = "accuracy" if place == "rounds" else f"accuracy_{place}"
            yield (
                name,
                f"Accuracy against {title}",
                functools.partial(curves.accuracy, groups, place=place),
            )
    if costs.reached(groups):
        yield "thresholds", "Cost to reach an accuracy", lambda path: costs.thresholds(groups, path)
    if costs.numeric_settings(groups):
        yield "settings", "Accuracy against settings", lambda path: costs.settings(groups, path)
    if people.with_clients(groups):
        yield "clients", "Spread over clients", lambda path: people.spread(groups, path)
        yield (
            "client_curves",
            "Every client over rounds",
            lambda path: people.over_rounds(groups, path),
        )
    if people.one_by_one(groups):
        yield "one_client", "One client over rounds", lambda path: people.one_client(groups, path)
    if people.label_counts(groups):
        yield "labels", "Labels of the clients", lambda path: people.bubbles(groups, path)
    yield (
        "communication",
        "Communication per round",
        lambda path: curves.communication(groups, path),
    )
    if policy.steered(groups):
        yield "actions", "Actions over rounds", lambda path: policy.evolution(groups, path)
        yield "policy", "Policy", lambda path: policy.summary(groups, path)
    if any("reward" in run.rounds for g in groups for run in g.runs):
        yield "reward", "Reward of the controller", lambda path: curves.reward(groups, path)
    if policy.budgeted(groups):
        yield "budgets", "Budgets", lambda path: policy.budgets(groups, path)
    if any(g.runs[0].matrices for g in groups):
        yield "weights", "Mixing weights", lambda path: policy.heat_maps(groups, path)
    if any(all(run.layers for run in g.runs) for g in groups):
        yield "layers", "Distances of layers", lambda path: curves.layers(groups, path)
    if profiles:
        yield "time", "Parts of a round", lambda path: costs.breakdown(profiles, path)


def report(
    paths: Sequence[str | pathlib.Path],
    out: str | pathlib.Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    titles: bool = True,
) -> list[pathlib.Path]:
    """Draw everything as PNG and PDF into `out` (default: the first directory), and report.html
    with all of it.

    titles: above the panels; without them a figure goes into a paper as it is.
    """
    groups = grouped(load_runs(paths, say), say)
    folder = pathlib.Path(out) if out is not None else pathlib.Path(paths[0])
    folder.mkdir(parents=True, exist_ok=True)
    with style.titled(titles):
        drawn = [
            (title, draw(folder / name))
            for name, title, draw in possible(groups, costs.read_profiles(paths, say))
        ]
    made = [file for _, files in drawn for file in files]
    return [
        *made,
        page.write(groups, [(title, files[0]) for title, files in drawn], folder / "report.html"),
    ]
