"""Expected calibration error (Guo et al., 2017): how far confidence is from accuracy.

ECE = Σ_b (n_b/n) |accuracy of bin b − mean confidence of bin b|   bins of equal width over the
                                                                   confidence max_c p_c
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array

BINS = 15


@register_metric("calibration")
def calibration(classes: int) -> Metric:
    """Expected calibration error over 15 bins of confidence."""

    def sums(logits: Array, labels: Array, real: Array) -> dict[str, Array]:
        confidence = jax.nn.softmax(logits).max(-1)
        place = jnp.clip(jnp.ceil(confidence * BINS).astype(jnp.int32) - 1, 0, BINS - 1)
        member = jax.nn.one_hot(place, BINS, dtype=real.dtype) * real[:, None]  # [B, bins]
        hit = (logits.argmax(-1) == labels).astype(real.dtype)
        return dict(
            count=member.sum(0), hit=hit @ member, sure=confidence.astype(real.dtype) @ member
        )

    def finish(found: dict[str, Any]) -> dict[str, float]:
        return dict(ece=float(np.abs(found["hit"] - found["sure"]).sum() / found["count"].sum()))

    return Metric(
        "calibration", sums, finish, better=-1, figures=("ece",), label="calibration error"
    )
