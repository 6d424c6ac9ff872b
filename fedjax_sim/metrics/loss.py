"""Mean cross-entropy of the true classes, whatever loss is trained with."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("loss")
def loss(classes: int) -> Metric:
    """Mean cross-entropy."""

    def sums(logits: Array, labels: Array, real: Array) -> dict[str, Array]:
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return dict(total=jnp.where(real > 0, each, 0).sum())

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        return dict(loss=found["total"] / found["count"])

    return Metric("loss", sums, finish, better=-1, unit="number", tabled=False)
