"""The page of `benchmarks.across_federations`: tables from the finished parts, and two figures."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

from benchmarks.pages import write_tables
from fedjax_sim.methods.fedpolicy.actions import PARTS
from fedjax_sim.methods.fedpolicy.state import STATES, USUAL

FEATURES = STATES["portable"]
MINE = "trained across federations"
HEAD = (
    "| | global | clients' own | worst tenth | bytes | goal | setting |"
    "\n|---|---|---|---|---|---|---|"
)


OTHERS = (
    "SAC learns within the run, from nothing, at the rate and schedule of `full`; it was not tuned."
    " FedPer has no global model: it was tuned for the clients' own models alone. Rates end at 0.8,"
    " so that a method whose best is 0.8 might do better with a larger one. Ditto trains two models"
    " per participant."
)


def points(found: dict[str, float]) -> str:
    """A paired difference in points with its 95 % interval; bold where 0 is outside."""
    if not np.isfinite(found["mean"]):
        return "–"  # FedPer has no global model
    text = f"{100 * found['mean']:+.2f} ± {100 * found['half']:.2f}"
    return f"**{text}**" if abs(found["mean"]) > found["half"] else text


def rows_of(goal: dict[str, Any]) -> list[str]:
    """`full` in percent, the others in points over it; bytes in percent of whole models in every
    round."""
    out = []
    for name, row in goal.items():
        traffic = f"{50 * (row['means']['down'] + row['means']['up']):.0f} %"
        if name == "full":
            cells = [f"{100 * row['means'][k]:.2f} %" for k in ("common", "clients", "worst")]
            cells += [traffic, ""]
        else:
            cells = [points(row["over_full"][k]) for k in ("common", "clients", "worst")]
            cells += [traffic, points(row["over_full"]["goal"])]
        out.append(f"| {name} | {' | '.join(cells)} | {row['setting']} |")
    return out


def table(title: str, goal: str, found: dict[str, Any]) -> str:
    number = found["full"]["over_full"]["goal"]["of"]
    lines = [f"**{title}, goal {goal}, {number} federations**", "", HEAD, *rows_of(found)]
    mine = found.get(MINE)
    if mine and "best rule" in found:
        lines += [
            "",
            f"Controller minus best rule: {points(mine['over_rule']['goal'])} of the goal.",
        ]
    named = ("full", MINE, "best rule")
    others = {name: row for name, row in found.items() if name not in named}
    if others:
        gains = [f"{name} {points(row['over_rule']['goal'])}" for name, row in others.items()]
        lines += ["", f"Other rows minus best rule: {', '.join(gains)}.", "", OTHERS]
    return "\n".join(lines)


def scores_of(work: pathlib.Path) -> dict[str, Any]:
    """suite -> goal -> row -> what was measured."""
    found: dict[str, Any] = {}
    for name, rows in parts_of(work, "scores-").items():
        suite, _, goal = name.partition("--")
        found.setdefault(suite, {})[goal] = rows
    return found


def parts_of(work: pathlib.Path, stem: str) -> dict[str, Any]:
    return {
        path.stem.removeprefix(stem): json.loads(path.read_text())
        for path in sorted(work.glob(f"{stem}*.json"))
    }


def verdict(scores: dict[str, Any]) -> list[str]:
    """A line per suite and goal: what the interval says."""
    out = ["| held out | goal | over tuned `full` | better on | over the best tuned rule |"]
    out.append("|---|---|---|---|---|")
    for suite, goals in scores.items():
        for goal, rows in goals.items():
            mine = rows[MINE]
            full, rule = mine["over_full"]["goal"], mine["over_rule"]["goal"]
            out.append(
                f"| {suite.replace('-', ' ')} | {goal} | {points(full)} |"
                f" {full['better']} of {full['of']} | {points(rule)} |"
            )
    return out


def side(found: dict[str, float]) -> str:
    """What an interval says."""
    if abs(found["mean"]) <= found["half"]:
        return "is level with"
    return "is better than" if found["mean"] > 0 else "is worse than"


def readings(scores: dict[str, Any]) -> list[str]:
    """The table in sentences: what is won, and whether a rule that learns nothing wins as much."""
    out = []
    for suite, goals in scores.items():
        for goal, rows in goals.items():
            mine, rule = rows[MINE], rows["best rule"]
            out.append(
                f"* {suite.replace('-', ' ')}, {goal}: the controller"
                f" {side(mine['over_full']['goal'])} tuned `full` and"
                f" {side(mine['over_rule']['goal'])} the best rule"
                f" ({rule['setting']}; {points(rule['over_full']['goal'])} over `full`)."
            )
    return out


def apart(parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weights [S, 4], bias [4]) of a linear policy; the bias is 0 where it has none."""
    size = len(FEATURES) * len(PARTS)
    bias = parameters[size:] if has_bias(parameters) else np.zeros(len(PARTS))
    return parameters[:size].reshape(len(FEATURES), len(PARTS)), bias


def has_bias(parameters: np.ndarray) -> bool:
    return len(parameters) > len(FEATURES) * len(PARTS)


def strongest(parameters: np.ndarray) -> tuple[int, int]:
    """The two features with the largest weights, all four decisions together; `joined` is the same
    for almost everybody, and no axis."""
    weights = np.abs(apart(parameters)[0]).sum(1)
    weights[FEATURES.index("joined")] = 0
    first, second = np.argsort(-weights)[:2]
    return int(first), int(second)


def shares(parameters: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """[…, 4] what is taken and sent, of observations […, S] in their own units."""
    usual = np.array([USUAL[name] for name in FEATURES])
    centred = np.clip((seen - usual[:, 0]) / usual[:, 1], -3, 3)
    weights, bias = apart(parameters)
    out = 1 + centred @ weights + bias
    return (np.clip(out, -1, 1) + 1) / 2


def policy_figure(path: pathlib.Path, goal: str, parameters: np.ndarray) -> tuple[str, str]:
    """The policy as a function of its two strongest inputs, all others as usual."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, y = strongest(parameters)
    ranges = {"relative_staleness": (0, 2), "log_size": (-1.5, 1.5)}
    ends = [ranges.get(FEATURES[i], (0, 1)) for i in (x, y)]
    a, b = np.meshgrid(np.linspace(*ends[0], 60), np.linspace(*ends[1], 60))
    seen = np.tile([USUAL[name][0] for name in FEATURES], (60, 60, 1))
    seen[..., x], seen[..., y] = a, b
    figure, axes = plt.subplots(1, 4, figsize=(12, 3), sharey=True, layout="constrained")
    for ax, name, share in zip(
        axes, PARTS, np.moveaxis(shares(parameters, seen), -1, 0), strict=True
    ):
        picture = ax.pcolormesh(a, b, share, vmin=0, vmax=1, cmap="viridis", rasterized=True)
        ax.set_title(name.replace("_", " "))
        ax.set_xlabel(FEATURES[x].replace("_", " "))
    axes[0].set_ylabel(FEATURES[y].replace("_", " "))
    figure.colorbar(picture, ax=axes, label="share")
    figure.suptitle(f"policy trained for {goal}; other inputs as usual")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return FEATURES[x], FEATURES[y]


def front_figure(path: pathlib.Path, goals: dict[str, Any]) -> None:
    """All rows of all goals: global against own accuracy, or against bytes where these count."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 4.2), layout="constrained")
    marks = {"full": "ks", MINE: "ro", "best rule": "b^"}
    drawn: set[str] = set()
    costly = any("bytes" in goal for goal in goals)
    for rows in goals.values():
        for name, row in rows.items():
            means = row["means"]
            traffic = 50 * (means["down"] + means["up"])
            common, own = 100 * means["common"], 100 * means["clients"]
            at = (traffic, common) if costly else (common, own)
            if not np.isfinite(at).all():
                continue
            kind = marks.get(name, "x")
            ax.plot(*at, kind, label=None if name in drawn else name)
            drawn.add(name)
    accuracy, theirs = "global accuracy (%)", "clients' own models, mean accuracy (%)"
    ax.set_xlabel("bytes (% of whole models in every round)" if costly else accuracy)
    ax.set_ylabel(accuracy if costly else theirs)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(work: pathlib.Path, out: pathlib.Path, trained: dict[str, np.ndarray], name: str) -> None:
    """The tables of NAME.md, whose prose is written by hand; NAME.json and the figures."""
    out.mkdir(parents=True, exist_ok=True)
    scores, transfers = scores_of(work), parts_of(work, "transfer-")
    selected = parts_of(work, "selection-")
    lines = ["## What was won", "", *verdict(scores), "", *readings(scores), ""]
    for suite, goals in scores.items():
        lines += [f"## Held out: {suite.replace('-', ' ')}", ""]
        lines += [t for goal, rows in goals.items() for t in (table(suite, goal, rows), "")]
    lines += section(transfers) + selection_lines(selected)
    lines += ["## What the policy does", ""]
    for goal, parameters in trained.items():
        file = f"across-policy-{goal.replace('=', '').replace('+', '-').replace('.', '')}.png"
        x, y = policy_figure(out / file, goal, parameters)
        lines += [f"![policy for {goal}: {x} and {y}]({file})", ""]
    if first := next(iter(scores.values()), None):
        front_figure(out / f"{name}-front.png", first)
        lines += [f"![the front of the first held-out suite]({name}-front.png)", ""]
    lines += speed_lines(work)
    found = dict(scores=scores, transfer=transfers, selection=selected)
    found |= dict(parameters={goal: [float(v) for v in p] for goal, p in trained.items()})
    write_tables(out / f"{name}.md", name, "Trained across federations", lines)
    (out / f"{name}.json").write_text(json.dumps(rounded(found), indent=1) + "\n")


def rounded(found: Any) -> Any:
    """Six digits are enough."""
    if isinstance(found, dict):
        return {k: rounded(v) for k, v in found.items()}
    if isinstance(found, list):
        return [rounded(v) for v in found]
    if not isinstance(found, float):
        return found
    return float(f"{found:.6g}") if np.isfinite(found) else None  # JSON knows no NaN


def section(found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    sentence = (
        "Whole images, federations of 20 clients, 4 per round, 40 rounds; `best rule` is one rule"
        " that was named beforehand, at the rate of `full`, which two tuning federations chose."
    )
    return ["## Other networks", "", sentence, ""] + [
        text
        for name, goals in found.items()
        for goal, rows in goals.items()
        for text in (table(name, goal, rows), "")
    ]


def selection_lines(found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    out = [
        "## Who takes part",
        "",
        "A linear policy of 7 numbers scores every client (size, last loss, rounds since, label"
        " entropy, progress); those with the largest scores, after Gumbel noise, take part. Rounds"
        " are FedAvg's, 6 of 30; each way has its own rate and schedule. Points over uniform:",
        "",
        "| held out | | global | clients | worst tenth | setting |",
        "|---|---|---|---|---|---|",
    ]
    for suite, rows in found.items():
        for name, row in rows.items():
            cells = [points(row["over_uniform"][k]) for k in ("common", "clients", "worst")]
            if name == "uniform":
                cells = [f"{100 * row['means'][k]:.2f} %" for k in ("common", "clients", "worst")]
            out.append(
                f"| {suite.replace('-', ' ')} | {name} | {' | '.join(cells)} | {row['setting']} |"
            )
    for suite, rows in found.items():
        gain = {name: row["over_uniform"]["common"] for name, row in rows.items()}
        mine = gain.pop(MINE)
        name = max(gain, key=lambda one: gain[one]["mean"])
        out += ["", f"{suite.replace('-', ' ')}: the best that learns nothing is {name},"]
        out[-1] += f" {points(gain[name])}; the trained policy has {points(mine)}."
    return [*out, ""]


def speed_lines(work: pathlib.Path) -> list[str]:
    path, chips = work / "speed.json", work / "cycles.json"
    out = ["## Speed", ""] if path.is_file() or chips.is_file() else []
    if path.is_file():
        out += ["| policies side by side | federations | federation-rounds/s on two cores |"]
        out += ["|---|---|---|"]
        for row in json.loads(path.read_text()):
            how = "in one vmap" if row["mapped"] else "one after another"
            out.append(f"| {row['policies']} | {row['federations']}, {how} | {row['rate']:.0f} |")
        out.append("")
    if chips.is_file():
        out += chip_lines(json.loads(chips.read_text()))
    return out


def chip_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Costs of a federation-round by the accelerators' compilers."""
    out = [
        f"By the accelerators' compilers, the same federations, {rows[0]['steps']} local steps per"
        " round; a cost model, not a stopwatch, and without evaluations. Cycles are the TPU"
        " compiler's estimates; kernels that it gives no estimate for are counted and cost nothing"
        " here, so these are lower bounds. For a GPU there are none: what its kernels touch, at the"
        " bandwidth of its memory, is a lower bound too.",
        "",
        "| compiler | policies side by side | cycles per federation-round | µs by these"
        " | µs by memory | kernels per round, all policies (without estimate) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cycles, by_clock, without = "–", "–", ""
        if row["cycles"] is not None:
            cycles, by_clock = f"{row['cycles']:,.0f}", f"{1e6 * row['cycles'] / row['clock']:.1f}"
            without = f" ({row['unpriced']:.0f})"
        out.append(
            f"| {row['device']} | {row['policies']} | {cycles} | {by_clock} |"
            f" {row['memory_us']:.1f} | {row['kernels']:.0f}{without} |"
        )
    return [*out, ""]
