"""Metrics, by name: `DEFAULT` are always measured, `--metrics recall,calibration` adds to them.

A metric is one function of the number of classes that returns a `metrics.base.Metric` (whose module
says all of it): named sums over rows and the figures made of them. Each figure is a column of
metrics.csv for the global model on the server-held sets (global_NAME, val_NAME) and, for every
evaluation mode of clients, over these (client_NAME, resident_NAME, …); the last ones stand in
summary.json, in tables and in the report.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fedjax_sim.errors import lookup
from fedjax_sim.named import first_sentence

if TYPE_CHECKING:  # the names are listed by the command line, which must not wait for JAX
    from fedjax_sim.metrics.base import Metric

F = TypeVar("F", bound=Callable[[int], Any])

DEFAULT = ("accuracy", "loss", "worst_decile")  # of classification; the first is the primary one
METRICS: dict[str, str] = {
    "accuracy": "the share of rows whose class is predicted correctly",
    "loss": "mean cross-entropy",
    "worst_decile": "the primary metric's mean over the worst tenth of the clients",
    "recall": "per-class recall: its mean over classes, and the worst class",
    "mse": "mean squared error of numbers, and its root",
    "mae": "mean absolute error of numbers",
    "r2": "share of the numbers' variance that is explained",
    "regression_loss": "mean squared error, as the column loss",
    "f1": "F1 of labels, micro and macro; examples with all labels right; labels that are wrong",
    "multilabel_loss": "mean binary cross-entropy of labels, as the column loss",
    "token_accuracy": "the share of places of sequences whose token is predicted",
    "token_loss": "mean cross-entropy of tokens, as the column loss, and perplexity",
    "calibration": "expected calibration error over 15 bins of confidence",
}
_FACTORIES: dict[str, Callable[[int], Metric]] = {}  # what `register_metric` saw


def register_metric(name: str, description: str = "") -> Callable[[F], F]:
    """A decorator: this function of the number of classes makes the metric called `name`."""

    def known(make: F) -> F:
        _FACTORIES[name] = make
        METRICS.setdefault(name, description or first_sentence(make))
        return make

    return known


def make_metrics(
    names: Sequence[str], classes: int, default: Sequence[str] = DEFAULT
) -> tuple[Metric, ...]:
    """The metrics of a task and those called so, each once; the first is the primary one.

    >>> [metric.name for metric in make_metrics(["recall"], 10)]
    ['accuracy', 'loss', 'worst_decile', 'recall']
    """
    wanted = tuple(dict.fromkeys((*default, *names)))
    for name in wanted:
        lookup("metric", name, METRICS)
        if name not in _FACTORIES:
            importlib.import_module(f"fedjax_sim.metrics.{name}")
    return tuple(_checked(_FACTORIES[name], classes) for name in wanted)


@functools.cache
def _checked(make: Callable[[int], Metric], classes: int) -> Metric:
    """The same metric is the same object: it is a static part of programs."""
    return make(classes)
