"""Recall of every class: the share of its examples that are predicted correctly; classes without
examples do not count."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("recall")
def recall(classes: int) -> Metric:
    """Per-class recall: its mean over classes, and the worst class."""

    def sums(logits: Array, labels: Array, real: Array) -> dict[str, Array]:
        member = jax.nn.one_hot(labels, classes, dtype=real.dtype) * real[:, None]  # [B, C]
        return dict(
            hit=(member * (logits.argmax(-1) == labels)[:, None]).sum(0), count=member.sum(0)
        )

    def finish(found: dict[str, Any]) -> dict[str, float]:
        there = found["count"] > 0
        each = found["hit"][there] / found["count"][there]
        return dict(recall_mean=float(np.mean(each)), recall_worst=float(np.min(each)))

    return Metric("recall", sums, finish, figures=("recall_mean", "recall_worst"))
