"""Mean cross-entropy of tokens, whatever loss is trained with, and its exponential."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("token_loss")
def token_loss(classes: int) -> Metric:
    """Mean cross-entropy of tokens, as the column `loss`, and perplexity."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        on = (target >= 0) * real[:, None]  # [B, T]
        each = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(target, 0))
        return dict(total=jnp.where(on > 0, each, 0).sum(), count=on.sum())

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        mean = found["total"] / found["count"]
        return dict(loss=mean, perplexity=np.e**mean)

    figures = ("loss", "perplexity")
    return Metric("loss", sums, finish, better=-1, figures=figures, unit="number", tabled=False)
