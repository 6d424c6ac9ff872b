"""What a metric is: sums over rows inside the program, figures computed from them on the
host, and how those are shown.

A metric is given what a model says of a batch, the truth, and a weight per row (0: padding):

    sums(prediction [B, …], target [B, …], real [B]) -> {name: sum over the rows}     in the program
    finish({name: sum}) -> {figure: value}                                   on the host, in float64

Sums add up over batches, devices and clients, so the engine evaluates every model once for all
metrics: row by row, where one model is scored on many clients' rows. Beside them stands `count`:
the number of rows, or what the metric itself sums up under this name (the tokens of sequences).
Where it is 0 there is no figure.

A task names its metrics in order: the first one is the PRIMARY, by which runs are compared (best
and last value, progress, targets, what each client has, what a controller is rewarded with); one is
called `loss`. Classification's are `metrics.DEFAULT`, `--metrics` adds others,
`simulate(metrics=…)` takes them, `Env.metrics` has them in the program (`local.score.merit` and
`mean_loss` read the primary one and the loss). The primary metric has `over`, and its `finish`
takes arrays [N] of clients as well as numbers, in the program too (plain operators). Its mean,
pooled value and deviation over clients follow; a metric without sums of its own, such as
worst_decile, has `reduce` and makes further figures of the primary's values client by client.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# evaluation mode -> how its columns begin
OF_SERVER = {"global": "global", "val": "val"}  # one model on one set of rows
OF_CLIENTS = {
    "personal": "client",
    "global@clients": "global_at_clients",
    "resident": "resident",
    "personal@global": "personal_at_global",
    "personal@train": "personal_at_train",
}


class About(NamedTuple):
    """How a figure is read."""

    label: str = "accuracy"
    unit: str = "percent"  # "percent": a fraction, written as percent; "number": as it is
    better: int = 1  # 1: larger is better, -1: smaller
    tabled: bool = True  # a column of the tables; False: of the files and curves alone

    @property
    def scale(self) -> float:
        return 100.0 if self.unit == "percent" else 1.0

    @property
    def sign(self) -> str:
        return " %" if self.unit == "percent" else ""

    @property
    def axis(self) -> str:
        """The label of an axis.

        >>> About().axis, About("loss", "number", -1).axis
        ('accuracy (%)', 'loss')
        """
        return f"{self.label} (%)" if self.unit == "percent" else self.label

    def text(self, value: float | None, sign: bool = False) -> str:
        """A value as it is written; a dash for none.

        >>> About().text(0.5, sign=True), About("loss", "number", -1).text(1.23456), About().text(
        ...     None
        ... )
        ('50.00 %', '1.235', '–')
        """
        if value is None or math.isnan(value):
            return "–"
        return (f"{100 * value:.2f}" if self.unit == "percent" else f"{value:.4g}") + (
            self.sign if sign else ""
        )


class Primary(NamedTuple):
    """The metric by which runs are compared, as files say it."""

    figure: str = "acc"  # columns global_FIGURE, val_FIGURE
    over: str = ""  # columns client_OVERmean, client_OVERworst10, …
    label: str = "accuracy"
    unit: str = "percent"
    better: int = 1

    @property
    def about(self) -> About:
        return About(self.label, self.unit, self.better)

    @property
    def columns(self) -> tuple[str, str]:
        """(of the global model, of the clients' mean): the first one that a run has measures its
        progress."""
        return f"global_{self.figure}", f"client_{self.over}mean"

    def of_clients(self, name: str) -> str:
        """The key of a figure over clients in summary.json.

        >>> Primary().of_clients("worst10"), Primary("mse", "mse_").of_clients("mean")
        ('client_acc_worst10', 'client_mse_mean')
        """
        return f"client_{self.figure}_{name}"

    @classmethod
    def read(cls, record: Any) -> Primary:
        """Of a summary or of config.json's `resolved`; runs without it are compared by accuracy."""
        found = record.get("primary") if isinstance(record, Mapping) else None
        known = found if isinstance(found, Mapping) else {}
        return cls(**{k: known[k] for k in cls._fields if k in known})


SPLITS = {"test": "test", "val": "validation", "train": "training"}


def on_rows(record: Any, short: bool = False) -> str:
    """Which rows of the clients their figures refer to, and how many; '' if the record lacks it.

    >>> on_rows({"client_rows": {"split": "val", "least": 7, "mean": 21.5, "most": 24}})
    '7 to 24 validation rows each'
    >>> on_rows({"client_rows": {"split": "train", "least": 9, "mean": 9.0, "most": 9}}, short=True)
    '9 train'
    """
    found = record.get("client_rows") if isinstance(record, Mapping) else None
    if not isinstance(found, Mapping):
        return ""
    least, most = found["least"], found["most"]
    span = f"{least}" if least == most else f"{least}–{most}" if short else f"{least} to {most}"
    split = found["split"]
    return f"{span} {split}" if short else f"{span} {SPLITS.get(split, split)} rows each"


Sums = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Metric:
    """One metric; the module's docstring says how it is used."""

    name: str
    # (prediction, target, real) -> named sums; None: only `reduce`
    sums: Callable[[Any, Any, Any], Sums] | None = None
    finish: Callable[[Sums], dict[str, Any]] = lambda sums: {}
    better: int = 1  # 1: larger figures are better, -1: smaller ones
    # names of what `finish` returns, the main one first; (): the metric's name
    figures: tuple[str, ...] = ()
    label: str = ""  # the main figure in tables and plots; "": its name
    unit: str = "percent"
    tabled: bool = True
    # how names of figures over clients begin; None: only of all clients' rows together
    over: str | None = None
    # (values [n], better) -> figures over clients
    reduce: Callable[[np.ndarray, int], dict[str, float]] | None = None
    reduced: tuple[str, ...] = ()  # names of what `reduce` returns

    @property
    def shown(self) -> tuple[str, ...]:
        return self.figures or ((self.name,) if self.sums else ())

    def about(self, figure: str) -> About:
        main = self.label if self.shown and figure == self.shown[0] else ""
        return About(main or figure.replace("_", " "), self.unit, self.better, self.tabled)

    def of_rows(self, sums: Sums) -> dict[str, float]:
        """Figures of one model on one set of rows."""
        if self.sums is None:
            return {}
        if not np.sum(sums["count"]):
            return dict.fromkeys(self.shown, math.nan)
        return {name: float(value) for name, value in self.finish(exactly(sums)).items()}

    def values(self, sums: Sums) -> np.ndarray:
        """[n] the main figure of each client that has rows; sums: [N, …]."""
        real = np.asarray(sums["count"]) > 0
        some = {k: v[real] for k, v in exactly(sums).items()}
        return np.asarray(self.finish(some)[self.shown[0]])


def exactly(sums: Sums) -> Sums:
    """On the host, counts are whole numbers far beyond what float32 can hold."""
    return {name: np.asarray(value, np.float64) for name, value in sums.items()}


def worst_tenth(values: np.ndarray, better: int = 1) -> float:
    """The mean of the worst tenth, at least of one.

    >>> round(worst_tenth(np.array([0.9] * 9 + [0.1])), 6)
    0.1
    """
    return float(np.sort(better * values)[: max(1, math.ceil(0.1 * len(values)))].mean() * better)


def value_of(metric: Metric, sums: Sums) -> Any:
    """The main figure inside a program; 0 without rows."""
    count = sums["count"]
    return metric.finish({**sums, "count": count + (count == 0)})[metric.shown[0]]


def over_clients(
    metrics: Sequence[Metric], found: Mapping[str, Sums], who: Sequence[int]
) -> dict[str, float]:
    """Figures over the clients `who`; found: {metric: {name: [N, …]}}."""
    out: dict[str, float] = {}
    primary = metrics[0]
    wide = {
        name: {k: v[list(who)] for k, v in exactly(sums).items()} for name, sums in found.items()
    }
    for metric in metrics:
        if metric.reduce is not None:
            values = primary.values(wide[primary.name])
            figures = dict.fromkeys(metric.reduced, math.nan)
            if len(values):
                figures = metric.reduce(values, primary.better)
            out |= {f"{primary.over or ''}{name}": value for name, value in figures.items()}
        if metric.sums is None:
            continue
        together = metric.of_rows({k: v.sum(0) for k, v in wide[metric.name].items()})
        if metric.over is None:
            out |= together
            continue
        values = metric.values(wide[metric.name])
        mean, std = math.nan, math.nan
        if len(values):
            mean, std = float(values.mean()), float(values.std())
        figures = dict(mean=mean, pooled=together[metric.shown[0]], std=std)
        out |= {f"{metric.over}{name}": value for name, value in figures.items()}
    return out


def columns_of(metrics: Sequence[Metric], evaluations: Sequence[str]) -> dict[str, About]:
    """Columns of metrics.csv that these metrics may fill, and how they are read."""
    out: dict[str, About] = {}
    primary = metrics[0]
    for prefix in OF_SERVER.values() if "global" in evaluations else ():
        for metric in metrics:
            out |= {f"{prefix}_{figure}": metric.about(figure) for figure in metric.shown}
    for prefix in (OF_CLIENTS[mode] for mode in OF_CLIENTS if mode in evaluations):
        for metric in metrics:
            spread = ("mean", "pooled", "std") if metric.over is not None else ()
            out |= {
                f"{prefix}_{metric.over}{name}": metric.about(metric.shown[0]) for name in spread
            }
            out |= {
                f"{prefix}_{primary.over or ''}{name}": primary.about(primary.shown[0])
                for name in metric.reduced
            }
            if metric.over is None:
                out |= {f"{prefix}_{figure}": metric.about(figure) for figure in metric.shown}
    return out


def described(metrics: Sequence[Metric], evaluations: Sequence[str]) -> dict[str, Any]:
    """A run's metrics as its files record them: the primary one, and each column of the others."""
    first = metrics[0]
    primary = Primary(first.shown[0], first.over or "", *first.about(first.shown[0])[:3])
    mine = set(columns_of([m for m in metrics if m is first or m.reduce is not None], evaluations))
    columns = columns_of(metrics, evaluations)
    others = {name: about._asdict() for name, about in columns.items() if name not in mine}
    return dict(primary=primary._asdict(), metrics_about=others)
