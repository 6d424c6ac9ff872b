"""What a run says about itself: sizes before it starts, a table of results, figures."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import numpy as np

from fedjax_sim.plans import BYTES_PER_PARAMETER
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.types import Ctx

MB, GB = 2**20, 2**30


def size(nbytes: float) -> str:
    """Bytes for people: 1 MB = 2^20.

    >>> size(5 * 2**20)
    '5.00 MB'
    """
    if nbytes >= GB / 2:
        return f"{nbytes / GB:.4f} GB"
    return f"{nbytes / MB:.2f} MB" if nbytes >= MB / 10 else f"{nbytes:.0f} B"


def tree_bytes(tree: Any) -> int:
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def facts(setup: Setup) -> dict[str, Any]:
    """Sizes of a run from shapes alone; nothing is computed."""
    sim, config = setup.simulation, setup.config
    env, method, fed = sim.env, sim.method, setup.fed
    net = jax.eval_shape(lambda: setup.net)
    server, client = sim.shapes(net)
    per_client = tree_bytes(client)
    state = per_client * env.num_clients + tree_bytes(server)
    lanes = min(sim.layout.chunk * sim.layout.devices, env.cohort)
    x = jax.ShapeDtypeStruct((env.batch_size, *fed.shape), env.dtype)
    mask = jax.ShapeDtypeStruct((env.batch_size,), bool)

    def residuals(net, x, mask):  # what the backward pass keeps from the forward pass
        features = lambda p: env.model.head(
            {**net, "params": p}, env.model.features({**net, "params": p}, x, train=True, mask=mask)[0]
        )
        return jax.vjp(features, net["params"])[1]

    lane = tree_bytes(jax.eval_shape(residuals, net, x, mask)) + 5 * tree_bytes(net)
    data = tree_bytes(jax.eval_shape(lambda: (fed.x, fed.y)))
    steps = np.asarray(fed.size["train"])[list(setup.participation.seen)]
    per_epoch = -(-steps // env.batch_size)
    needed = np.maximum(np.round(env.epochs * per_epoch), 1).mean()
    needed *= (setup.participation.low + setup.participation.high) / 2
    extra = method.extra_floats(env, setup.net)
    floats = env.group_floats(setup.net)
    if method.plan is not None:
        # a plan may be drawn at random: the mean over some draws
        start = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), server)
        number = lambda v: np.asarray(v, env.dtype)
        key = lambda i: jax.random.key_data(jax.random.key(i))
        ctx = lambda i: Ctx(np.int32(0), key(i), np.int32(0), number(env.epochs), number(config.lr))
        draws = [method.plan(env, start, ctx(i)) for i in range(24)]
        take, send = (np.mean([np.asarray(getattr(p, side)) > 0 for p in draws], 0) for side in ("take", "send"))
    else:
        take = send = np.ones(len(floats))
    several = setup.participation.high
    return dict(
        floats=dict(zip(env.model.groups, floats, strict=True)),
        parameters=sum(floats),
        per_client=per_client,
        client_state=per_client * env.num_clients,
        state=state,
        data=data,
        lanes=lanes,
        lane=lane,
        peak=state
        + data * sim.layout.devices
        + lanes * lane
        + tree_bytes(net) * (2 * sim.layout.devices)
        + (several * per_client if sim.layout.devices > 1 else 0),
        down=BYTES_PER_PARAMETER * several * (float(np.asarray(floats) @ take) + extra[0]),
        up=BYTES_PER_PARAMETER * several * (float(np.asarray(floats) @ send) + extra[1]),
        steps=float(needed),
        controlled=method.control is not None,
    )


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
