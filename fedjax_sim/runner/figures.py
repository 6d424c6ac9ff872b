"""Figures of a run: plain numbers made on the host from the program's logs and scores. Accuracies are fractions in [0, 1].

Four rooms deal with results, each with one step: `local.score` counts what ONE predictor gets right on given rows;
`engine.evaluation` says which model is scored on whose rows (the modes); this module makes means, thresholds and bests
of those counts; `report` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

COLUMNS = [
    "round",
    "global_acc",
    "global_loss",
    "val_acc",
    "client_mean",
    "client_pooled",
    "client_std",
    "client_worst10",
    "bytes_down",
    "bytes_up",
    "participants",
    "dropped",
    "diverged",
    "train_loss",
]


def client_figures(correct: np.ndarray, count: np.ndarray) -> dict[str, float]:
    """mean, pooled, std, worst10 over clients that have examples. correct, count: [N].

    worst10: mean accuracy of the worst tenth of the clients (at least one).

    >>> client_figures(np.array([1., 0., 3.]), np.array([2., 2., 4.]))["pooled"]
    0.5
    """
    real = count > 0
    if not real.any():
        return dict(mean=math.nan, pooled=math.nan, std=math.nan, worst10=math.nan)
    acc = correct[real].astype(np.float64) / count[real]
    worst = np.sort(acc)[: max(1, math.ceil(0.1 * len(acc)))]
    return dict(
        mean=float(acc.mean()),
        pooled=float(correct[real].astype(np.float64).sum() / count[real].sum()),
        std=float(acc.std()),
        worst10=float(worst.mean()),
    )


def probe_figures(log: dict[str, np.ndarray], resident: dict[str, np.ndarray] | None) -> dict[str, float]:
    """BP and AP: before and after local training of the round's participants.

    Over the participants; with the `resident` evaluation also over all N clients (the others hold what they held).
    """
    real = (log["probe_ids"] >= 0) & (log["probe_count"] > 0)
    ids, count = log["probe_ids"][real], np.maximum(log["probe_count"][real], 1)
    out = dict(
        before_mean=float((log["probe_before"][real] / count).mean()) if real.any() else math.nan,
        after_mean=float((log["probe_after"][real] / count).mean()) if real.any() else math.nan,
    )
    if resident is not None:
        before = resident["correct"].copy()
        before[ids] = log["probe_before"][real]
        out["before_all_mean"] = client_figures(before, resident["count"])["mean"]
        out["before_all_pooled"] = client_figures(before, resident["count"])["pooled"]
    return out


def rounds_to(rounds: Sequence[int], values: Sequence[float], threshold: float) -> int | None:
    """First round with a value of at least `threshold`; None if never.

    >>> rounds_to([1, 2, 3], [0.1, 0.5, 0.4], 0.4)
    2
    """
    return next((r for r, v in zip(rounds, values, strict=True) if v >= threshold), None)


def convergence(times: Sequence[float], values: Sequence[float], window: int = 20, change: float = 0.002) -> float | None:
    """First time after which the moving average over `window` rounds stays within `change` until the end."""
    if len(values) < window:
        return None
    smooth = np.convolve(values, np.ones(window) / window, "valid")
    inside = [smooth[i:].max() - smooth[i:].min() < change for i in range(len(smooth))]
    first = inside.index(True)
    return float(times[first + window - 1])


def relative_gain(ours: float, best: float) -> float:
    """(ours − best)/best in percent.

    >>> round(relative_gain(0.6, 0.5), 6)
    20.0
    """
    return 100 * (ours - best) / best


def summary_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The papers' figures from evaluated rows: best over rounds on test, best by validation, last, mean of last 10."""
    acc = [
        (r["round"], r["global_acc"], r.get("val_acc", math.nan))
        for r in rows
        if not math.isnan(r.get("global_acc", math.nan))
    ]
    none = dict(best_global=None, best_global_round=None, best_by_val=None, last_global=None, mean_last10=None)
    if not acc:
        return none
    values = [a for _, a, _ in acc]
    best = int(np.argmax(values))
    val = [v for _, _, v in acc]
    by_val = values[int(np.argmax(val))] if not any(math.isnan(v) for v in val) else None
    return dict(
        best_global=values[best],
        best_global_round=acc[best][0],
        best_by_val=by_val,
        last_global=values[-1],
        mean_last10=float(np.mean(values[-10:])),
    )
