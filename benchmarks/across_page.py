"""The page of `benchmarks.across_federations`: tables from the finished parts, and two figures."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

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
    """Global and own accuracy of all rows of all goals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 4.2), layout="constrained")
    marks = {"full": "ks", MINE: "ro", "best rule": "b^"}
    drawn: set[str] = set()
    for rows in goals.values():
        for name, row in rows.items():
            at = 100 * row["means"]["common"], 100 * row["means"]["clients"]
            if not np.isfinite(at).all():
                continue
            kind = marks.get(name, "x")
            ax.plot(*at, kind, label=None if name in drawn else name)
            drawn.add(name)
    ax.set_xlabel("global accuracy (%)")
    ax.set_ylabel("clients' own models, mean accuracy (%)")
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


INTRO = """# A controller trained across federations

A linear policy of 36 numbers decides what every participant takes and sends of backbone and head
(`fedpolicy.agent=evolved`, actions `exchange_mix`), from nine features that mean the same in every
federation. CMA-ES found them on federations drawn at random ({over}), 8 x 8 grey images and an MLP
with 32 hidden units, 50 rounds, 2 local epochs. The command of the one that comes with the package:

```
{command}
```

Its use: `fedjax-sim run fedpolicy --set fedpolicy.agent=evolved --start-from
pretrained:{shipped}:agent`.

All rows are paired on identical federations and seeds; numbers are points with 95 % intervals, bold
where the interval excludes 0. `full`, the controller, the rules and the other methods run at the
rate and schedule that are best for them and for the goal, on tuning federations of the same suite;
the best rule of {rules} is chosen there too, and of {frugal} more where bytes are part of the goal.
Scores are means of the last five evaluations (every second round), never the best over rounds;
bytes are those of both ways, as a share of what `full` moves. The controller was trained at one
rate and schedule, those of `full` on its training federations: lr {lr}, {schedule}.

How it was reached: two earlier configurations showed no progress and were stopped. Both saw the
features without centring; the step size σ of the search was 0.3, then 0.7. After that, 17 hand-made
policies were looked at on tuning federations, and the features were centred and re-scaled. The
suites CIFAR-10 and digits were scored once, after the final training; the same controller ran once
more on the same federations, with the same result, when the rows of the other methods were added.
"""


def write(work: pathlib.Path, out: pathlib.Path, trained: dict[str, np.ndarray]) -> None:
    """across-federations.md, .json and the figures."""
    from benchmarks.across_federations import FRUGAL, RULES
    from fedjax_sim.presets import controllers

    out.mkdir(parents=True, exist_ok=True)
    scores, transfers = scores_of(work), parts_of(work, "transfer-")
    selected, shipped = parts_of(work, "selection-"), next(iter(controllers.names()), "NAME")
    about = controllers.about(shipped) if controllers.names() else {"command": "", "over": ""}
    counts = dict(rules=len(RULES) - 1, frugal=len(FRUGAL))
    text = [INTRO.format(**counts, shipped=shipped, **about_of(about))]
    text += ["## What was won", "", *verdict(scores), "", *readings(scores), ""]
    for suite, goals in scores.items():
        text += [f"## Held out: {suite.replace('-', ' ')}", ""]
        text += [t for goal, rows in goals.items() for t in (table(suite, goal, rows), "")]
    text += ["## Other networks", "", *section(transfers), "## Who takes part", ""]
    text += selection_lines(selected)
    text += ["## What the policy does", ""]
    for goal, parameters in trained.items():
        name = f"across-policy-{goal.replace('=', '').replace('+', '-').replace('.', '')}.png"
        x, y = policy_figure(out / name, goal, parameters)
        text += [f"![policy for {goal}: {x} and {y}]({name})", ""]
    if first := next(iter(scores.values()), None):
        front_figure(out / "across-front.png", first)
        text += ["![global and own accuracy](across-front.png)", ""]
    text += speed_lines(work)
    found = dict(scores=scores, transfer=transfers, selection=selected)
    found |= dict(parameters={goal: [float(v) for v in p] for goal, p in trained.items()})
    (out / "across-federations.md").write_text("\n".join(text).rstrip() + "\n")
    (out / "across-federations.json").write_text(json.dumps(rounded(found), indent=1) + "\n")


def rounded(found: Any) -> Any:
    """Six digits are enough."""
    if isinstance(found, dict):
        return {k: rounded(v) for k, v in found.items()}
    if isinstance(found, list):
        return [rounded(v) for v in found]
    if not isinstance(found, float):
        return found
    return float(f"{found:.6g}") if np.isfinite(found) else None  # JSON knows no NaN


def about_of(about: dict[str, Any]) -> dict[str, Any]:
    kept = [w for w in about["over"].split(", ") if w.split(":")[0] in ("dirichlet", "clients",
             "participation", "examples", "data")]  # fmt: skip
    fields = dict(command=about["command"], over=", ".join(kept))
    return fields | dict(lr=about.get("lr", ""), schedule=about.get("schedule", ""))


def section(found: dict[str, Any]) -> list[str]:
    if not found:
        return ["Not measured yet.", ""]
    sentence = (
        "Whole images, federations of 20 clients, 4 per round, 40 rounds; `best rule` is one rule"
        " that was named beforehand, at the rate of `full`, which two tuning federations chose."
    )
    return [sentence, ""] + [
        text
        for name, goals in found.items()
        for goal, rows in goals.items()
        for text in (table(name, goal, rows), "")
    ]


def selection_lines(found: dict[str, Any]) -> list[str]:
    if not found:
        return ["Not measured yet.", ""]
    out = [
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
    out = ["## Speed", ""]
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
