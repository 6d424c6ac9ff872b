"""The papers' figures by name, drawn by the functions of `report` where it has them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.report import clients, curves, policy, style
from fedjax_sim.report.costs import number_in
from fedjax_sim.report.groups import Group, labels, spread


class Wanted(NamedTuple):
    """The input of a figure."""

    groups: Sequence[Group]  # a panel per scene, a colour per label
    client: int = 0  # for figures of one client
    column: str = ""  # the accuracy to draw; '': all
    # run directory -> leaves of its last State
    states: Mapping[pathlib.Path, Mapping[str, np.ndarray]] = {}


class Picture(NamedTuple):
    draw: Callable[[Wanted, pathlib.Path], list[pathlib.Path]]
    available: Callable[[Wanted], Any]  # whether the runs have the data
    leaves: tuple[str, ...] = ()  # of the State that it needs


def against(wanted: Wanted, path: pathlib.Path) -> list[pathlib.Path]:
    """The last accuracy of every row against the share of clients per round."""
    plt, look = style.drawing(), style.looks(labels(wanted.groups))
    figure, axes = style.panels(plt, 1)
    for label in labels(wanted.groups):
        mine = [g for g in wanted.groups if g.label == label]
        share = lambda g: number_in(g.runs[0].config["participation"]) or 0.0
        found = {share(g): lasts(g, wanted.column) for g in mine}
        x = sorted(at for at, values in found.items() if len(values))
        means, errors = [found[at].mean() for at in x], [float(spread(found[at])) for at in x]
        points = dict(marker="o", markersize=4, capsize=2, label=style.safe(label))
        axes[0].errorbar(x, means, errors, **points, **look[label])
    axes[0].set(xlabel="share of clients in a round", ylabel="accuracy (%)")
    style.legend(figure, axes)
    return style.save(plt, figure, path)


def lasts(group: Group, column: str) -> np.ndarray:
    """[seeds] the last value of a column in percent, from the runs that have it."""
    found = [run.points(column)[1][-1:] for run in group.runs]
    return 100 * np.concatenate(found) if found else np.zeros(0)


EMBEDDED, WHO, HEADS = "server.embedded", "server.previous", "clients.own.features"


def embeddings(wanted: Wanted, path: pathlib.Path) -> list[pathlib.Path]:
    """Heads of the last round's participants in two dimensions: left by the encoder, right by PCA
    of the projected heads.

    A colour per set of labels; silhouettes use all dimensions.
    """
    plt = style.drawing()
    figure, axes = style.panels(plt, 2 * len(wanted.groups), most=2)
    for g, left, right in zip(wanted.groups, axes[::2], axes[1::2], strict=True):
        run = g.runs[0]
        state, labels_of = wanted.states[run.path], run.clients["label_counts"] > 0
        ids = state[WHO].astype(int)
        group = np.unique(labels_of[ids], axis=0, return_inverse=True)[1].reshape(-1)
        heads = state[HEADS][ids].reshape(len(ids), -1)
        for axis, what, points in ((left, "encoder", state[EMBEDDED]), (right, "PCA", heads)):
            flat = two_dimensions(points)
            for one in np.unique(group):
                colour = style.COLOURS[one % len(style.COLOURS)]
                name = having(labels_of[ids[group == one][0]])
                axis.plot(*flat[group == one].T, "o", color=colour, markersize=5, label=name)
            axis.set(xlabel="first component", ylabel="second component")
            style.title(axis, g.scene, f"{what}: silhouette {silhouette(points, group):.2f}")
    style.legend(figure, axes)
    return style.save(plt, figure, path)


def having(labels: np.ndarray) -> str:
    """The labels of a group of clients, for a legend.

    >>> having(np.array([True, False, True])), having(np.ones(34, bool))
    ('labels 0, 2', 'labels 0, 1, 2, 3, … (34)')
    """
    known = np.flatnonzero(labels).tolist()
    more = f", … ({len(known)})" if len(known) > 4 else ""
    return f"labels {', '.join(map(str, known[:4]))}{more}"


def two_dimensions(points: np.ndarray) -> np.ndarray:
    """[n, 2] projection on the first two principal components."""
    centred = points - points.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    return np.pad(u * s, ((0, 0), (0, 2)))[:, :2]


def silhouette(points: np.ndarray, group: np.ndarray) -> float:
    """Mean over points of (b - a) / max(a, b): a, b the mean distances to its own and to the
    nearest other group.

    >>> round(silhouette(np.array([[0.0], [0.1], [5.0], [5.1]]), np.array([0, 0, 1, 1])), 2)
    0.98
    """
    distance = np.sqrt(np.square(points[:, None] - points[None]).sum(-1))
    values = []
    for i, mine in enumerate(group):
        same = (group == mine) & (np.arange(len(group)) != i)
        others = [distance[i, group == other].mean() for other in set(group.tolist()) - {mine}]
        if same.any() and others:
            a, b = distance[i, same].mean(), min(others)
            values.append((b - a) / max(a, b, 1e-12))
    return float(np.mean(values)) if values else float("nan")


def of_groups(
    draw: Callable[[Sequence[Group], pathlib.Path], list[pathlib.Path]],
    available: Callable[[Sequence[Group]], Any],
) -> Picture:
    """A figure of `report`."""
    return Picture(lambda w, path: draw(w.groups, path), lambda w: available(w.groups))


def of_client(draw: Callable[..., list[pathlib.Path]], available: Callable[..., Any]) -> Picture:
    """A figure of `report` about one client."""
    return Picture(lambda w, path: draw(w.groups, path, w.client), lambda w: available(w.groups))


runs = lambda w: [run for g in w.groups for run in g.runs]
PICTURES: dict[str, Picture] = {
    "accuracy": Picture(
        lambda w, path: curves.accuracy(w.groups, path, columns=[w.column] if w.column else None),
        lambda w: (
            any(len(run.points(w.column)[0]) for run in runs(w))
            if w.column
            else curves.measured(w.groups)
        ),
    ),
    "against": Picture(against, lambda w: any(len(lasts(g, w.column)) for g in w.groups)),
    "communication": of_groups(curves.communication, len),
    "counted": of_groups(policy.budgets, policy.budgeted),
    "embeddings": Picture(
        embeddings, lambda w: all(EMBEDDED in s for s in w.states.values()), (EMBEDDED, WHO, HEADS)
    ),
    "evolution": of_groups(policy.evolution, policy.controlled),
    "heat-maps": of_client(policy.heat_maps, policy.mixed),
    "labels": of_groups(clients.bubbles, clients.label_counts),
    "layers": of_groups(curves.layers, lambda groups: curves.layered(groups) == list(groups)),
    "one-client": of_client(clients.one_client, clients.one_by_one),
    "reward": of_groups(curves.reward, curves.rewarded),
    "shares": of_groups(policy.summary, policy.controlled),
}


def picture(name: str) -> Picture:
    return lookup("figure", name, PICTURES)


def draw(name: str, wanted: Wanted, path: pathlib.Path) -> list[pathlib.Path]:
    """Draw a figure as PATH.png and PATH.pdf."""
    one = picture(name)
    if not one.available(wanted):
        raise UserError(f"the runs have no data for the figure '{name}'")
    most = min((run.config.get("clients") or 0) for run in runs(wanted))
    if wanted.client >= most > 0:
        raise UserError(
            f"client {wanted.client} is not among the {most} clients; allowed: 0 to {most - 1}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return one.draw(wanted, path)
