"""What people read: sizes before a run starts, tables of results and of stages, curves. The numbers come from `runner`."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from fedjax_sim.runner.facts import facts
from fedjax_sim.runner.prepare import Setup

MB, GB = 2**20, 2**30


def size(nbytes: float) -> str:
    """Bytes for people: 1 MB = 2^20.

    >>> size(5 * 2**20)
    '5.00 MB'
    """
    if nbytes >= GB / 2:
        return f"{nbytes / GB:.4f} GB"
    return f"{nbytes / MB:.2f} MB" if nbytes >= MB / 10 else f"{nbytes:.0f} B"


def report(setup: Setup) -> str:
    """The lines printed before a run (all that --dry-run prints)."""
    f, config, sim = facts(setup), setup.config, setup.simulation
    part = setup.participation
    who = f"{part.high}" if part.low == part.high else f"{part.low} to {part.high}"
    groups = ", ".join(f"{name} {count:,}" for name, count in f["floats"].items())
    return "\n".join(
        [
            f"{config.method} on {setup.fed.name} ({config.partition}, {setup.fed.num_clients} clients, {who} per round"
            + (f", {len(setup.unseen)} kept out of training" if setup.unseen else "")
            + f"), model {sim.env.model.name}, "
            f"{config.rounds} rounds, seed {config.seed}, config {config.hash()}",
            f"  parameters: {f['parameters']:,} ({groups})",
            f"  client state: {size(f['client_state'])} (N x {size(f['per_client'])}); estimated peak memory: "
            f"{size(f['peak'])} (state {size(f['state'])}, data {size(f['data'])} per device, "
            f"{f['lanes']} training lanes of {size(f['lane'])})",
            f"  per round: {size(f['down'])} down{' at most' if f['controlled'] else ''}, {size(f['up'])} up, "
            f"{f['steps']:.0f} steps on average; layout: {sim.layout.devices} device(s), chunk {sim.layout.chunk}"
            + (f" ({setup.resolved['chunk_why']})" if "chunk_why" in setup.resolved else ""),
        ]
    )


def stage_table(setup: Setup, seconds: dict[str, float], repeats: int) -> str:
    """Seconds and bytes of each part of a round; see `runner.profile`."""
    sizes, whole = facts(setup), seconds["round (fused, no evaluation)"]
    rows = [f"{setup.config.method}: one round of {setup.participation.high} clients, best of {repeats}"]
    rows += [
        f"  {name:30s} {1e3 * value:10.2f} ms  {100 * value / whole:6.2f} % of the fused round"
        for name, value in seconds.items()
    ]
    rows.append(f"  {'bytes down':30s} {size(sizes['down']):>13s}")
    rows.append(f"  {'bytes up':30s} {size(sizes['up']):>13s}")
    rows.append(f"  {'persistent client state':30s} {size(sizes['client_state']):>13s}")
    return "\n".join(rows)


def results_table(summaries: list[dict[str, Any]]) -> str:
    """Accuracies in percent. 'best' is over rounds on test data (the papers' figure); 'by val' is the fair choice."""
    percent = lambda v: "–" if v is None or (isinstance(v, float) and math.isnan(v)) else f"{100 * v:.2f}"
    head = [
        "method",
        "best",
        "by val",
        "last",
        "mean last 10",
        "client mean",
        "pooled",
        "worst 10 %",
        "down",
        "up",
        "s/round",
    ]
    rows = [
        [
            s["method"],
            *(
                percent(s[k])
                for k in (
                    "best_global",
                    "best_by_val",
                    "last_global",
                    "mean_last10",
                    "client_acc_mean",
                    "client_acc_pooled",
                    "client_acc_worst10",
                )
            ),
            size(s["bytes_down"]),
            size(s["bytes_up"]),
            f"{s['seconds_per_round']:.3f}",
        ]
        for s in summaries
    ]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    line = lambda row: "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)])


def speed_line(s: dict[str, Any]) -> str:
    waste = f", executed ÷ needed steps {s['padding_waste']:.3f}" if s["padding_waste"] else ""
    return (
        f"{s['method']}: {s['rounds_per_second']:.2f} rounds/s (compiled in {s['compile_seconds']:.1f} s, apart)"
        f"{waste}, peak memory {s['peak_rss_mb']:.0f} MB"
    )


def save_curves(results: list[Any], path: pathlib.Path) -> pathlib.Path | None:
    """Accuracy against rounds for several runs, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for result in results:
        for axis, column, title in (
            (axes[0], "global_acc", "global model, test set"),
            (axes[1], "client_mean", "clients' own models, mean"),
        ):
            points = [(r["round"], 100 * r[column]) for r in result.rows if not math.isnan(r.get(column, math.nan))]
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=result.summary["method"], marker="o" if len(points) == 1 else None
                )
            axis.set(title=title, xlabel="round", ylabel="accuracy (%)")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


__all__ = ["facts", "report", "results_table", "save_curves", "size", "speed_line", "stage_table"]
