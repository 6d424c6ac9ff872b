"""R²: the share of the targets' variance that is explained, mean over outputs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("r2")
def r2(classes: int) -> Metric:
    """The share of the variance that is explained."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        on = (real > 0)[:, None]
        part = lambda a: jnp.where(on, a, 0).sum(0)
        return dict(
            error=part(jnp.square(outputs - target)),
            total=part(target),
            square=part(jnp.square(target)),
        )

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        spread = found["square"] - found["total"] ** 2 / np.asarray(found["count"])[..., None]
        return dict(r2=(1 - found["error"] / (spread + (spread == 0))).mean(-1))

    return Metric("r2", sums, finish, unit="number")
