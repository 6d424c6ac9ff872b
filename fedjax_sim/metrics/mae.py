"""Mean absolute error, over the outputs of an example and then over examples."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("mae")
def mae(classes: int) -> Metric:
    """Mean absolute error."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        return dict(far=jnp.where(real > 0, jnp.abs(outputs - target).mean(-1), 0).sum())

    return Metric(
        "mae", sums, lambda found: dict(mae=found["far"] / found["count"]), better=-1, unit="number"
    )
