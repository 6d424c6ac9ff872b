"""Results as text: tables of summaries, notes and warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.metrics.base import About, Primary, on_rows
from fedjax_sim.runner.figures import Summary, relative_gain

MB, GB = 10**6, 10**9
SHOWN = 4  # accuracies in the table of targets, so that it fits a screen


def size(nbytes: float) -> str:
    """Bytes as text; 1 MB = 10^6 bytes.

    >>> size(5_000_000)
    '5.00 MB'
    """
    if nbytes >= GB / 2:
        return f"{nbytes / GB:.4f} GB"
    return f"{nbytes / MB:.2f} MB" if nbytes >= MB / 10 else f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as text.

    >>> duration(0.0462), duration(5), duration(125), duration(7300)
    ('0.046 s', '5 s', '2:05 min', '2:01 h')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    first, rest = divmod(int(seconds), 60)
    return f"{first}:{rest:02d} min" if first < 60 else f"{first // 60}:{first % 60:02d} h"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a text table: the first column is flush left, the others right.

    >>> aligned([["", "x"], ["name", "1.0"]])
    ['        x', 'name  1.0']
    """
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    line = lambda row: [row[0].ljust(first), *map(str.rjust, row[1:], others)]
    return ["  ".join(line(row)).rstrip() for row in rows]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A text table: the head, a rule, the rows."""
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(aligned([rows[0], rule, *rows[1:]]))


def compared(summaries: list[Summary]) -> dict[str, tuple[str, About]]:
    """Columns of the table, {title: (key of the summary, unit)}: those of the primary metric, then
    requested others.

    >>> list(compared([{}]))
    ['best', 'by val', 'last', 'mean last 10', 'client mean', 'pooled', 'worst 10 %']
    """
    primary = Primary.read(summaries[0])
    keys = {"best": "best_global", "by val": "best_by_val"}
    keys |= {"last": "last_global", "mean last 10": "mean_last10"}
    over = {"client mean": "mean", "pooled": "pooled", "worst 10 %": "worst10"}
    keys |= {title: primary.of_clients(name) for title, name in over.items()}
    out = {title: (key, primary.about) for title, key in keys.items()}
    for s in summaries:
        for column, fields in s.get("metrics_about", {}).items():
            about = About(**fields)
            measured = column in s.get("metrics", {})
            if about.tabled and measured and column.startswith(("global_", "client_")):
                out[column.replace("_", " ")] = (f"metrics.{column}", about)
    return out


def figure_of(summary: Summary, key: str) -> float | None:
    """A figure of a summary; key metrics.NAME: of the dict `metrics` in it."""
    table, dot, name = key.partition(".")
    return summary.get(table, {}).get(name) if dot else summary.get(key)


def on_splits(summaries: list[Summary]) -> str:
    """The suffix of 'client mean': the split on which clients are scored.

    >>> on_splits([{"client_split": "val"}, {"client_split": "train"}]), on_splits([{}])
    (' (val/train)', '')
    """
    found = list(dict.fromkeys(s["client_split"] for s in summaries if s.get("client_split")))
    return f" ({'/'.join(found)})" if found else ""


def notes(summaries: list[Summary]) -> list[str]:
    """Notes on the rows on which clients are scored, and warnings."""
    by_rows: dict[str, list[str]] = {}
    for s in summaries:
        if on_rows(s):
            by_rows.setdefault(on_rows(s), []).append(s["method"])
    whose = lambda methods: "" if len(by_rows) == 1 else f" of {', '.join(dict.fromkeys(methods))}"
    found = [f"client figures{whose(methods)}: on {text}" for text, methods in by_rows.items()]
    return [*found, *(line for s in summaries for line in warnings(s))]


def results_table(summaries: list[Summary]) -> str:
    """The table of `results_cells`, with notes and warnings below."""
    return "\n".join([columns(results_cells(summaries)), *notes(summaries)])


def results_cells(summaries: list[Summary]) -> list[list[str]]:
    """Cells of the results table, the head first: the primary metric (accuracies in percent) and
    requested others.

    'best' is the best over rounds on test data, as papers report it; 'by val' is the fair choice.
    """
    diverged = any(s.get("diverged") for s in summaries)
    title = lambda name: (
        name + (on_splits(summaries) if name in ("client mean", "pooled", "worst 10 %") else "")
    )
    measured = compared(summaries)
    head = ["method", *map(title, measured), "down", "up", "s/round"]
    head += ["diverged"] if diverged else []
    rows = [
        [
            s["method"],
            *(about.text(figure_of(s, key)) for key, about in measured.values()),
            size(s["bytes_down"]),
            size(s["bytes_up"]),
            f"{s['seconds_per_round']:.3f}",
            *([f"{100 * s.get('diverged_share', 0):.1f} %"] if diverged else []),
        ]
        for s in summaries
    ]
    return [head, *rows]


def method_defaults(method: str, values: dict[str, float]) -> list[str]:
    """Notes on a method's own default values.

    >>> method_defaults("fedpam", {"lr": 0.005})
    ["fedpam: lr 0.005 is the method's default (--lr sets another)"]
    """
    return [
        f"{method}: {name} {value:g} is the method's default (--{name} sets another)"
        for name, value in values.items()
    ]


def differing_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Notes on settings that differ between the compared entries.

    >>> differing_lines({"lr": {"fedavg": 0.02, "fedpam": 0.005}})
    ['compared with different settings: lr 0.02 (fedavg), 0.005 (fedpam)']
    """

    def line(name: str, values: dict[str, Any]) -> str:
        by_value: dict[str, list[str]] = {}
        for entry, value in values.items():
            text = f"{value:g}" if isinstance(value, float) else str(value)
            by_value.setdefault(text, []).append(entry)
        return f"{name} " + ", ".join(f"{v} ({', '.join(e)})" for v, e in by_value.items())

    return [
        f"compared with different settings: {line(name, values)}" for name, values in found.items()
    ]


def warnings(s: Summary) -> list[str]:
    """Warnings about one run that its accuracies do not show."""
    out = method_defaults(s["method"], s.get("prefers", {}))
    out += [
        f"{s['method']}: {option} was replaced by {why}"
        for option, why in s.get("replaces", {}).items()
    ]
    if s.get("client_split") == "train":
        out.append(
            f"{s['method']}: client accuracies are training accuracies; the clients have no"
            " validation or test rows"
        )
    if s.get("diverged"):
        first = s["diverged_first"]
        out.append(
            f"{s['method']}: {s['diverged']} client updates ({100 * s['diverged_share']:.1f} %)"
            f" diverged and got weight 0, first that of client {first['client']} in round"
            f" {first['round']}; try a smaller --lr"
        )
    if s.get("exploding"):
        few = lambda numbers: (
            ", ".join(map(str, numbers[:SHOWN])) + (", …" if len(numbers) > SHOWN else "")
        )
        out.append(
            f"{s['method']}: {s['exploding']} finite client updates exploded and are averaged in,"
            f" of clients {few(s['exploding_clients'])} in rounds {few(s['exploding_rounds'])};"
            " check their data, or use --transform clip:NORM or a smaller --lr"
        )
    without, rounds = s.get("rounds_without_upload", 0), s.get("rounds", 0)
    if without and without == rounds:
        out.append(
            f"{s['method']}: nothing was uploaded in any of the {rounds} rounds; the server still"
            " has the initial model"
        )
    elif without:
        out.append(
            f"{s['method']}: nothing was uploaded in {without} of {rounds} rounds; they did not"
            " change the server's model"
        )
    if not s.get("final_loss_finite", True):
        out.append(
            f"{s['method']}: the loss of the last global model is not finite; its accuracy is"
            " meaningless"
        )
    return out


def targets_table(summaries: list[Summary]) -> str:
    """A table of rounds (bytes, time) to the highest accuracies that any run reached, and the round
    of convergence; '' for none."""
    some = lambda x: any(s["rounds_to"][x] is not None for s in summaries)
    reached = list(filter(some, summaries[0]["rounds_to"]))[-SHOWN:]
    if not reached:
        return ""

    def cell(s: Summary, x: str) -> str:
        if s["rounds_to"][x] is None:
            return "×"
        cost = f"{size(s['comm_gb_to'][x] * GB)}, {duration(60 * s['time_min_to'][x])}"
        return f"{s['rounds_to'][x]} ({cost})"

    converged = lambda s: "–" if s["convergence_round"] is None else str(s["convergence_round"])
    head = ["rounds to", *(f"{x} %" for x in reached), "converged"]
    row = lambda s: [s["method"], *(cell(s, x) for x in reached), converged(s)]
    return columns([head, *map(row, summaries)])


def gains(summaries: list[Summary]) -> dict[str, float]:
    """Each method's relative gain in percent over the best of the others, averaged over its seeds.

    By the best global value of the primary metric, or by the clients' mean for all if a method has
    no global value.

    >>> gains([{"method": "a", "best_global": 0.6}, {"method": "b", "best_global": 0.5}])
    {'a': 20.0, 'b': -16.67}
    """
    names = list(dict.fromkeys(s["method"] for s in summaries))
    primary = Primary.read(summaries[0])
    every = lambda key: all(s.get(key) is not None for s in summaries)
    key = next(filter(every, ("best_global", primary.of_clients("mean"))), None)
    if key is None or len(names) < 2:
        return {}
    mean = {n: float(np.mean([s[key] for s in summaries if s["method"] == n])) for n in names}
    sign = primary.better
    best = {n: sign * max(sign * v for other, v in mean.items() if other != n) for n in names}
    return {n: round(sign * relative_gain(mean[n], best[n]), 2) for n in names if best[n] > 0}


def gains_line(summaries: list[Summary]) -> str:
    found = ", ".join(f"{n} {gain:+.2f} %" for n, gain in gains(summaries).items())
    return f"relative to the best other: {found}" if found else ""


def seeds_line(summaries: list[Summary]) -> str:
    """mean ± standard deviation over seeds, in percent.

    >>> seeds_line([{"best_global": 0.5, "last_global": 0.4, "client_acc_mean": None},
    ...             {"best_global": 0.6, "last_global": 0.4, "client_acc_mean": None}])
    'over 2 seeds: best 55.00 ± 7.07, last 40.00 ± 0.00'
    """
    parts, primary = [], Primary.read(summaries[0])
    of_clients = (f"client mean{on_splits(summaries)}", primary.of_clients("mean"))
    named = (("best", "best_global"), ("last", "last_global"), of_clients)
    for name, key in named:
        values = [s[key] for s in summaries if s.get(key) is not None and not math.isnan(s[key])]
        if len(values) == len(summaries):
            text = primary.about.text
            parts.append(
                f"{name} {text(float(np.mean(values)))} ± {text(float(np.std(values, ddof=1)))}"
            )
    return f"over {len(summaries)} seeds: {', '.join(parts)}"


def speed_line(s: Summary) -> str:
    waste = f", executed ÷ needed steps {s['padding_waste']:.3f}" if s["padding_waste"] else ""
    return (
        f"{s['method']}: {s['rounds_per_second']:.2f} rounds/s (without {s['compile_seconds']:.1f}"
        f" s of compiling){waste}, peak memory of the process so far {s['peak_rss_mb']:.0f} MB"
    )
