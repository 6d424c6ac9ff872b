"""Accuracy: the share of rows whose class is predicted correctly. Over clients: mean, pooled (all
rows together), deviation."""

from __future__ import annotations

from typing import Any

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("accuracy")
def accuracy(classes: int) -> Metric:
    """The share of rows whose class is predicted correctly."""

    def sums(logits: Array, labels: Array, real: Array) -> dict[str, Array]:
        hit = (logits.argmax(-1) == labels).astype(real.dtype)
        return dict(correct=(hit * real).sum())

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        return dict(acc=found["correct"] / found["count"])

    return Metric("accuracy", sums, finish, figures=("acc",), label="accuracy", over="")
