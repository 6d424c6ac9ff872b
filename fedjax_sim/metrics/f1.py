"""F1 of labels: over all of them together (micro), label by label (macro); and how many are wrong.

F1 = 2·TP / (2·TP + FP + FN), 0 where nothing is there and nothing is found; a label is found where
its logit is above 0.
"""

from __future__ import annotations

from typing import Any

from fedjax_sim.metrics import register_metric
from fedjax_sim.metrics.base import Metric
from fedjax_sim.types import Array


@register_metric("f1")
def f1(classes: int) -> Metric:
    """F1 of labels, micro and macro; examples with all labels right; labels that are wrong."""

    def sums(outputs: Array, target: Array, real: Array) -> dict[str, Array]:
        found, there, on = outputs > 0, target > 0, real[:, None]
        part = lambda which: (which * on).sum(0)
        return dict(
            hit=part(found & there),
            false=part(found & ~there),
            missed=part(~found & there),
            exact=((found == there).all(-1) * real).sum(),
        )

    def score(hit: Any, false: Any, missed: Any) -> Any:
        both = 2 * hit + false + missed
        return 2 * hit / (both + (both == 0))

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        each = found["hit"], found["false"], found["missed"]  # [K], or [N, K] of clients
        wrong = (found["false"] + found["missed"]).sum(-1) / classes
        return dict(
            f1=score(*(a.sum(-1) for a in each)),
            f1_macro=score(*each).mean(-1),
            subset=found["exact"] / found["count"],
            hamming=wrong / found["count"],
        )

    figures = ("f1", "f1_macro", "subset", "hamming")
    return Metric("f1", sums, finish, figures=figures, label="F1 (micro)", over="f1_")
