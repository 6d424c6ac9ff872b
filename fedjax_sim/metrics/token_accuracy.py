"""Accuracy of tokens: the share of places of sequences whose token is predicted; places without a
target do not count."""

from __future__ import annotations

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("token_accuracy")
def token_accuracy(classes: int) -> Metric:
    """The share of places whose token is predicted."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        on = (target >= 0) * real[:, None]  # [B, T]
        return dict(correct=((outputs.argmax(-1) == target) * on).sum(), count=on.sum())

    finish = lambda found: dict(acc=found["correct"] / found["count"])
    return Metric("token_accuracy", sums, finish, figures=("acc",), label="accuracy", over="")
