"""The clients x classes bubble plot."""

from __future__ import annotations

import os
import pathlib

import numpy as np

from fedjax_sim.data.federation import Federation
from fedjax_sim.errors import UserError, lookup, unknown

FORMATS = (".png", ".pdf", ".svg")


def bubble_plot(
    federation: Federation, path: str | os.PathLike[str], split: str = "train", most: int = 100
) -> None:
    """Write a figure with one bubble per (client, class), its area proportional to the number of
    examples.

    At most `most` clients are drawn (the first ones; the title says so). The format follows the
    ending of `path`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "the bubble plot needs matplotlib: pip install 'fedjax-sim[report]'"
        ) from None
    lookup("split", split, federation.rows)
    ending = pathlib.Path(path).suffix.lower()
    if ending not in FORMATS:
        raise unknown("ending of a figure's file", ending, FORMATS)
    counts = federation.label_counts(split)[:most]
    shown = len(counts)
    client, label = np.nonzero(counts)
    number = counts[client, label]
    wide, high = np.clip(0.22 * shown + 1.5, 4, 18), np.clip(0.28 * federation.classes, 3, 14)
    figure = Figure(figsize=(float(wide), float(high)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.scatter(client, label, s=160 * number / counts.max(), alpha=0.75, linewidths=0)
    every = federation.num_clients
    note = "" if shown == every else f" (first {shown} of {every} clients)"
    axes.set_title(f"{federation.name}, {split}{note}; largest bubble {counts.max()}")
    axes.set(xlabel="client", ylabel="class", xlim=(-1, shown), ylim=(-1, federation.classes))
    if federation.classes <= 20:
        axes.set_yticks(range(federation.classes))
    figure.savefig(path, dpi=200)
