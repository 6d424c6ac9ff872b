"""What people read: sizes before a run starts, tables of results and of stages, curves. The numbers
come from `runner`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from fedjax_sim.metrics.base import About, Primary, on_rows
from fedjax_sim.options import shown
from fedjax_sim.runner.config import FOUND, NOT_HASHED, Config
from fedjax_sim.runner.facts import facts
from fedjax_sim.runner.figures import relative_gain
from fedjax_sim.runner.prepare import Setup

MB, GB = 10**6, 10**9
SHOWN = 4  # accuracies in the table of targets: it should fit a screen; the files have all


def size(nbytes: float) -> str:
    """Bytes for people: 1 MB = 10^6 bytes.

    >>> size(5_000_000)
    '5.00 MB'
    """
    if nbytes >= GB / 2:
        return f"{nbytes / GB:.4f} GB"
    return f"{nbytes / MB:.2f} MB" if nbytes >= MB / 10 else f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0462), duration(5), duration(125), duration(7300)
    ('0.046 s', '5 s', '2:05 min', '2:01 h')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    first, rest = divmod(int(seconds), 60)
    return f"{first}:{rest:02d} min" if first < 60 else f"{first // 60}:{first % 60:02d} h"


def report(setup: Setup) -> str:
    """The lines printed before a run (all that --dry-run prints)."""
    f, config, sim = facts(setup), setup.config, setup.simulation
    part = setup.participation
    who = f"{part.high}" if part.low == part.high else f"{part.low} to {part.high}"
    groups = ", ".join(f"{name} {count:,}" for name, count in f["floats"].items())
    return "\n".join(
        [
            f"{config.method} on {shown(setup.fed.name)} ({config.partition},"
            f" {setup.fed.num_clients} clients, "
            + f"{who} per round"
            + (f", {len(setup.unseen)} kept out of training" if setup.unseen else "")
            + f"), model {sim.env.model.name}, "
            f"{config.rounds} rounds, seed {config.seed}, config {config.hash()}",
            *(
                [f"  columns of {shown(setup.fed.name)}: {setup.fed.origin.columns}"]
                if setup.fed.origin.columns
                else []
            ),
            *task_lines(setup),
            f"  parameters: {f['parameters']:,} ({groups})",
            (
                f"  client state: {size(f['client_state'])} (N x {size(f['per_client'])});"
                f" estimated peak memory: {size(f['peak'])} (runtime {size(f['runtime'])}, program"
                f" {size(f['program'])}, state {size(f['state'])}, data {size(f['data'])} per"
                f" device, {f['lanes']} training lanes of {size(f['lane'])}, logs"
                f" {size(f['logs'])})"
            ),
            f"  per round: {size(f['down'])} down{' at most' if f['controlled'] else ''},"
            f" {size(f['up'])} up, {f['steps']:.0f} steps on average; layout: {sim.layout.devices}"
            f" device(s), chunk {sim.layout.chunk}"
            + (f" ({setup.resolved['chunk_why']})" if "chunk_why" in setup.resolved else ""),
            *(f"  {sentence}" for sentence in own_values(config.method, setup.resolved["prefers"])),
            *(
                f"  {config.method} replaces {option} {getattr(config, option, '')} by {why}"
                for option, why in sim.method.replaces
            ),
            f"  clients are scored on {on_rows(setup.resolved)}"
            + (
                ": training accuracies, nobody has validation or test rows"
                if sim.client_split == "train"
                else ""
            ),
        ]
    )


def task_lines(setup: Setup) -> list[str]:
    """What a run's task is, where it is not classification, and its vocabulary; what trains, where
    it is not SGD."""
    fed, config = setup.fed, setup.config
    lines = []
    if fed.task != "classification":
        lines.append(
            f"  task: {fed.task}, {'x'.join(map(str, fed.shape))} in, {fed.classes} out, loss"
            f" {config.loss}"
        )
    if fed.vocabulary:
        lines.append(
            f"  vocabulary of {len(fed.vocabulary)}: {shown(''.join(fed.vocabulary), 300)}"
        )
    if config.optimizer != "sgd":
        kept = ", its state stays with the client" if config.optimizer_state == "client" else ""
        lines.append(f"  optimizer: {config.optimizer}, lr {config.lr:g}{kept}")
    return lines


def fits_line(found: dict[str, Any]) -> str:
    """What `runner.ahead.fits` found."""
    where = (
        f"each of {found['devices']} x {found['title']}" if found["devices"] > 1 else found["title"]
    )
    has, word = size(found["memory"]), "fits" if found["fits"] else "does not fit"
    if found["arguments"] is None:
        needs = (
            f"its compiler needs {size(found['needed'])}"
            if found["needed"]
            else "its compiler finds no room"
        )
        return f"  {word} {where}: {needs}, of {has}"
    return (
        f"  {word} {where}: {size(found['needed'])} of {has} (arguments {size(found['arguments'])}"
        f" + scratch {size(found['scratch'])} + results {size(found['results'])} - given away"
        f" {size(found['given_away'])})"
    )


def stage_table(setup: Setup, seconds: dict[str, float], repeats: int) -> str:
    """Seconds and bytes of each part of a round; see `runner.profile`."""
    sizes, whole = facts(setup), seconds["round (fused, no evaluation)"]
    rows = [
        f"{setup.config.method}: one round of {setup.participation.high} clients, best of {repeats}"
    ]
    rows += [
        f"  {name:30s} {1e3 * value:10.2f} ms  {100 * value / whole:6.2f} % of the fused round"
        for name, value in seconds.items()
    ]
    rows.append(f"  {'bytes down':30s} {size(sizes['down']):>13s}")
    rows.append(f"  {'bytes up':30s} {size(sizes['up']):>13s}")
    rows.append(f"  {'persistent client state':30s} {size(sizes['client_state']):>13s}")
    return "\n".join(rows)


def columns(rows: list[list[str]]) -> str:
    """Rows of equal length below their head, the first column flush left, the others flush
    right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    line = lambda row: "  ".join(
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
    )
    return "\n".join([line(rows[0]), line(["-" * w for w in widths]), *map(line, rows[1:])])


def compared(summaries: list[dict[str, Any]]) -> dict[str, tuple[str, About]]:
    """Columns of the table: title -> (key of the summary, how it is read). The primary metric's,
    then others asked for.

    >>> list(compared([{}]))
    ['best', 'by val', 'last', 'mean last 10', 'client mean', 'pooled', 'worst 10 %']
    """
    primary = Primary.read(summaries[0])
    keys = {
        "best": "best_global",
        "by val": "best_by_val",
        "last": "last_global",
        "mean last 10": "mean_last10",
    }
    over = {"client mean": "mean", "pooled": "pooled", "worst 10 %": "worst10"}
    keys |= {title: primary.of_clients(name) for title, name in over.items()}
    out = {title: (key, primary.about) for title, key in keys.items()}
    for s in summaries:
        for column, told in s.get("metrics_about", {}).items():
            about = About(**told)
            if (
                about.tabled
                and column in s.get("metrics", {})
                and column.startswith(("global_", "client_"))
            ):
                out[column.replace("_", " ")] = (f"metrics.{column}", about)
    return out


def figure_of(summary: dict[str, Any], key: str) -> float | None:
    """A figure of a summary; metrics.NAME: of the table inside it."""
    table, dot, name = key.partition(".")
    return summary.get(table, {}).get(name) if dot else summary.get(key)


def on_splits(summaries: list[dict[str, Any]]) -> str:
    """What stands behind 'client mean': the split on which clients are scored.

    >>> on_splits([{"client_split": "val"}, {"client_split": "train"}]), on_splits([{}])
    (' (val/train)', '')
    """
    found = list(dict.fromkeys(s["client_split"] for s in summaries if s.get("client_split")))
    return f" ({'/'.join(found)})" if found else ""


def rows_lines(summaries: list[dict[str, Any]]) -> list[str]:
    """How many rows the figures over clients stand on."""
    told: dict[str, list[str]] = {}
    for s in summaries:
        if on_rows(s):
            told.setdefault(on_rows(s), []).append(s["method"])
    one = len(told) == 1
    return [
        f"client figures{'' if one else ' of ' + ', '.join(dict.fromkeys(who))}: on {text}"
        for text, who in told.items()
    ]


def results_table(summaries: list[dict[str, Any]]) -> str:
    """What `results_cells` has, as text, and below it what a reader must not miss."""
    told = [*rows_lines(summaries), *(line for s in summaries for line in warnings(s))]
    return "\n".join([columns(results_cells(summaries)), *told])


def results_cells(summaries: list[dict[str, Any]]) -> list[list[str]]:
    """The primary metric (accuracies in percent) and others asked for.

    'best' is over rounds on test data (the papers' figure); 'by val' is the fair choice. The head
    first.
    """
    diverged = any(s.get("diverged") for s in summaries)
    title = lambda name: (
        name + (on_splits(summaries) if name in ("client mean", "pooled", "worst 10 %") else "")
    )
    measured = compared(summaries)
    head = [
        "method",
        *map(title, measured),
        "down",
        "up",
        "s/round",
        *(["diverged"] if diverged else []),
    ]
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


def own_values(method: str, values: dict[str, float]) -> list[str]:
    """What a method has of its own where others have the run's defaults.

    >>> own_values("fedpam", {"lr": 0.005})
    ["fedpam: lr 0.005 is the method's own (--lr names another)"]
    """
    return [
        f"{method}: {name} {value:g} is the method's own (--{name} names another)"
        for name, value in values.items()
    ]


APART = (
    "method",
    "options",
    "seed",
    "data_seed",
    "schedule_rounds",
)  # of a Config: named by the entry, or counted on


def differing(setups: dict[str, Setup]) -> dict[str, dict[str, Any]]:
    """{setting: {entry: value}} of what compared entries do not have in common, named by anybody or
    not.

    Settings of the run, whoever chose them, and the options of methods of one kind.
    """
    names = [
        f.name for f in dataclasses.fields(Config) if f.name not in {*APART, *NOT_HASHED, *FOUND}
    ]
    told = {
        name: {entry: getattr(setup.config, name) for entry, setup in setups.items()}
        for name in names
    }
    methods = {entry: setup.simulation.method for entry, setup in setups.items()}
    for kind in dict.fromkeys(map(type, methods.values())):
        alike = {entry: method for entry, method in methods.items() if type(method) is kind}
        for one in dataclasses.fields(kind):  # type: ignore[arg-type]
            told.setdefault(
                f"{next(iter(alike.values())).name}.{one.name}",
                {e: getattr(m, one.name) for e, m in alike.items()},
            )
    return {
        name: values for name, values in told.items() if len(set(map(repr, values.values()))) > 1
    }


def differing_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """
    >>> differing_lines({"lr": {"fedavg": 0.02, "fedpam": 0.005}})
    ['compared with different settings: lr 0.02 (fedavg), 0.005 (fedpam)']
    """

    def line(name: str, values: dict[str, Any]) -> str:
        entries: dict[str, list[str]] = {}
        for entry, value in values.items():
            entries.setdefault(f"{value:g}" if isinstance(value, float) else str(value), []).append(
                entry
            )
        return f"{name} " + ", ".join(
            f"{value} ({', '.join(who)})" for value, who in entries.items()
        )

    return [
        f"compared with different settings: {line(name, values)}" for name, values in found.items()
    ]


def warnings(s: dict[str, Any]) -> list[str]:
    """Sentences about one run that its accuracies do not tell."""
    out = own_values(s["method"], s.get("prefers", {}))
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
            f" diverged and weigh nothing, the first of client {first['client']} in round"
            f" {first['round']}; try a smaller --lr"
        )
    if s.get("exploding"):
        few = lambda numbers: (
            ", ".join(map(str, numbers[:SHOWN])) + (", …" if len(numbers) > SHOWN else "")
        )
        out.append(
            f"{s['method']}: {s['exploding']} finite client updates exploded and are averaged in,"
            f" of clients {few(s['exploding_clients'])} in rounds {few(s['exploding_rounds'])};"
            " look at their data, or use --transform clip:NORM or a smaller --lr"
        )
    without, rounds = s.get("rounds_without_upload", 0), s.get("rounds", 0)
    if without and without == rounds:
        out.append(
            f"{s['method']}: nothing was uploaded in any of the {rounds} rounds; the server's model"
            " is the first one"
        )
    elif without:
        out.append(
            f"{s['method']}: nothing was uploaded in {without} of {rounds} rounds; they left the"
            " server's model as it was"
        )
    if not s.get("final_loss_finite", True):
        out.append(
            f"{s['method']}: the loss of the last global model is not finite; its accuracy means"
            " nothing"
        )
    return out


def targets_table(summaries: list[dict[str, Any]]) -> str:
    """Rounds (bytes, time) to the highest accuracies that any run reached, and the round of
    convergence; '' for none."""
    reached = [
        x
        for x in summaries[0]["rounds_to"]
        if any(s["rounds_to"][x] is not None for s in summaries)
    ][-SHOWN:]
    if not reached:
        return ""

    def cell(s: dict[str, Any], x: str) -> str:
        if s["rounds_to"][x] is None:
            return "×"
        return (
            f"{s['rounds_to'][x]} ({size(s['comm_gb_to'][x] * GB)},"
            f" {duration(60 * s['time_min_to'][x])})"
        )

    settled = lambda s: "–" if s["convergence_round"] is None else str(s["convergence_round"])
    head = ["rounds to", *(f"{x} %" for x in reached), "converged"]
    return columns(
        [head, *([s["method"], *(cell(s, x) for x in reached), settled(s)] for s in summaries)]
    )


def gains(summaries: list[dict[str, Any]]) -> dict[str, float]:
    """Each method's relative gain in percent over the best of the others, averaged over its seeds.

    Of the best global value of the primary metric, or where a method has none of the clients' mean,
    for all alike.

    >>> gains([{"method": "a", "best_global": 0.6}, {"method": "b", "best_global": 0.5}])
    {'a': 20.0, 'b': -16.67}
    """
    names = list(dict.fromkeys(s["method"] for s in summaries))
    primary = Primary.read(summaries[0])
    key = next(
        (
            k
            for k in ("best_global", primary.of_clients("mean"))
            if all(s.get(k) is not None for s in summaries)
        ),
        None,
    )
    if key is None or len(names) < 2:
        return {}
    mean = {n: float(np.mean([s[key] for s in summaries if s["method"] == n])) for n in names}
    best = {
        n: primary.better * max(primary.better * v for other, v in mean.items() if other != n)
        for n in names
    }
    return {
        n: round(primary.better * relative_gain(mean[n], best[n]), 2) for n in names if best[n] > 0
    }


def gains_line(summaries: list[dict[str, Any]]) -> str:
    found = gains(summaries)
    return (
        "relative to the best other: " + ", ".join(f"{n} {g:+.2f} %" for n, g in found.items())
        if found
        else ""
    )


def seeds_line(summaries: list[dict[str, Any]]) -> str:
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


def speed_line(s: dict[str, Any]) -> str:
    waste = f", executed ÷ needed steps {s['padding_waste']:.3f}" if s["padding_waste"] else ""
    return (
        f"{s['method']}: {s['rounds_per_second']:.2f} rounds/s (compiled in"
        f" {s['compile_seconds']:.1f} s, apart){waste}, peak memory of the process so far"
        f" {s['peak_rss_mb']:.0f} MB"
    )


__all__ = [
    "differing",
    "differing_lines",
    "facts",
    "fits_line",
    "gains",
    "gains_line",
    "report",
    "results_table",
    "seeds_line",
    "size",
    "speed_line",
    "stage_table",
    "targets_table",
]
