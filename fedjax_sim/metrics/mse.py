"""Mean squared error, over the outputs of an example and then over examples; and its root."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("mse")
def mse(classes: int) -> Metric:
    """Mean squared error."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        each = jnp.square(outputs - target).mean(-1)
        return dict(squares=jnp.where(real > 0, each, 0).sum())

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        mean = found["squares"] / found["count"]
        return dict(mse=mean, rmse=mean**0.5)

    return Metric(
        "mse",
        sums,
        finish,
        better=-1,
        figures=("mse", "rmse"),
        label="mean squared error",
        unit="number",
        over="mse_",
    )
