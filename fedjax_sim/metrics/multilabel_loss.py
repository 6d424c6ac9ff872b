"""The loss of labels, whatever it is trained with: mean binary cross-entropy."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("multilabel_loss")
def multilabel_loss(classes: int) -> Metric:
    """Mean binary cross-entropy, as the column `loss`."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        each = optax.sigmoid_binary_cross_entropy(outputs, target.astype(outputs.dtype)).mean(-1)
        return dict(total=jnp.where(real > 0, each, 0).sum())

    finish = lambda found: dict(loss=found["total"] / found["count"])
    return Metric("loss", sums, finish, better=-1, unit="number", tabled=False)
