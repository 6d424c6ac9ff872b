"""The papers' figures, drawn by the functions of the report: NAME -> what is drawn of the cells."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.report import costs, curves, people, policy
from fedjax_sim.report.groups import Group

Draw = Callable[[Sequence[Group], pathlib.Path, int, str], list[pathlib.Path]]

PICTURES: dict[str, tuple[Draw, Callable[[Sequence[Group]], object]]] = {
    # name: (how, what it needs)
    "accuracy": (
        lambda g, path, client, column: curves.accuracy(g, path, columns=[column] if column else None),
        curves.measured,
    ),
    "communication": (lambda g, path, client, column: curves.communication(g, path), lambda g: g),
    "evolution": (lambda g, path, client, column: policy.evolution(g, path), policy.steered),
    "shares": (lambda g, path, client, column: policy.summary(g, path), policy.steered),
    "reward": (
        lambda g, path, client, column: curves.reward(g, path),
        lambda g: any("reward" in r.rounds for x in g for r in x.runs),
    ),
    "labels": (lambda g, path, client, column: people.bubbles(g, path), people.label_counts),
    "heat-maps": (
        lambda g, path, client, column: policy.heat_maps(g, path, client),
        lambda g: any(x.runs[0].matrices for x in g),
    ),
    "one-client": (lambda g, path, client, column: people.one_client(g, path, client), people.one_by_one),
    "layers": (lambda g, path, client, column: curves.layers(g, path), lambda g: all(r.layers for x in g for r in x.runs)),
    "settings": (lambda g, path, client, column: costs.settings(g, path), costs.numeric_settings),
    "counted": (lambda g, path, client, column: policy.budgets(g, path), policy.budgeted),
}


def draw(name: str, groups: Sequence[Group], path: pathlib.Path, client: int, column: str) -> list[pathlib.Path]:
    """PATH.png and PATH.pdf. client: whose picture, where it is one client's; column: which accuracy ('': all there are)."""
    how, needed = lookup("figure", name, PICTURES)
    if not needed(groups):
        raise UserError(f"the runs have nothing for the figure '{name}'")
    path.parent.mkdir(parents=True, exist_ok=True)
    return how(groups, path, client, column)
