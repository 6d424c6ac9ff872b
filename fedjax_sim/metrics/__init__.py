"""Metrics, by name: `--metrics recall,calibration`. Accuracy, loss and the worst tenth of the clients are always measured.

A metric is one function of the number of classes that returns a `local.metrics.Metric`: named sums over rows and the figures
made of them. Each figure is a column of metrics.csv for the global model on the test set (global_NAME) and for the clients'
own models on their own rows, all together (client_NAME); the last ones stand in summary.json and in the report.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fedjax_sim.errors import lookup

if TYPE_CHECKING:  # the names are listed by the command line, which must not wait for JAX
    from fedjax_sim.local.metrics import Metric

F = TypeVar("F", bound=Callable[[int], Any])

METRICS: dict[str, str] = {
    "recall": "per-class recall: its mean over classes, and the worst class",
    "calibration": "expected calibration error over 15 bins of confidence",
}
_MADE: dict[str, Callable[[int], Metric]] = {}  # what `register_metric` saw


def register_metric(name: str, description: str = "") -> Callable[[F], F]:
    """A decorator: this function of the number of classes makes the metric called `name`."""

    def known(make: F) -> F:
        _MADE[name] = make
        METRICS.setdefault(name, description or (make.__doc__ or "").strip().split("\n")[0])
        return make

    return known


def make_metrics(names: Sequence[str], classes: int) -> tuple[Metric, ...]:
    """The metrics called so.

    >>> [metric.name for metric in make_metrics(["recall"], 10)]
    ['recall']
    """
    for name in names:
        lookup("metric", name, METRICS)
        if name not in _MADE:
            importlib.import_module(f"fedjax_sim.metrics.{name}")
    return tuple(_MADE[name](classes) for name in names)
