"""Mean of the primary metric over the worst tenth of the clients (at least one): who is left
behind."""

from __future__ import annotations

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric, worst_tenth


@register_metric("worst_decile")
def worst_decile(classes: int) -> Metric:
    """The primary metric's mean over the worst tenth of the clients."""
    return Metric(
        "worst_decile",
        reduce=lambda values, better: dict(worst10=worst_tenth(values, better)),
        reduced=("worst10",),
    )
