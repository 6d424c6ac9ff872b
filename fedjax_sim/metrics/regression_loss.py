"""The loss of a regression, whatever it is trained with: mean squared error."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("regression_loss")
def regression_loss(classes: int) -> Metric:
    """Mean squared error, as the column `loss`."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        return dict(total=jnp.where(real > 0, jnp.square(outputs - target).mean(-1), 0).sum())

    finish = lambda found: dict(loss=found["total"] / found["count"])
    return Metric("loss", sums, finish, better=-1, unit="number", tabled=False)
