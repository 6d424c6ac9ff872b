"""The tables of `benchmarks.headroom`: paired differences with 95 % intervals, as JSON and
Markdown."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.headroom_runs import GOALS, Scale
from fedjax_sim.runner.figures import half_width

BEGIN, END = "<!-- tables of fedpolicy: begin -->", "<!-- tables of fedpolicy: end -->"
TITLES = {
    "global": "global model",
    "clients": "clients' mean",
    "worst": "clients' worst tenth",
    "budget": "global model at half of the bytes",
}
Key = tuple[str, float, str, str]  # data, alpha, part, row


class Difference(NamedTuple):
    """Paired, in points."""

    mean: float
    half: float  # of the 95 % interval
    seeds: int

    @property
    def sign(self) -> int:
        """1 or −1 where the interval excludes 0, and what is shown is not 0."""
        return int(np.sign(self.mean)) if abs(self.mean) > max(self.half, 0.05) else 0

    def __str__(self) -> str:
        text = f"{self.mean:+.1f} ± {self.half:.1f}".replace("-", "−")
        return f"**{text}**" if self.sign > 0 else text


def paired(mine: dict[int, float | None], base: dict[int, float | None]) -> Difference | None:
    """Of the seeds that both have.

    >>> paired({0: 3.0, 1: 5.0}, {0: 1.0, 1: 2.0, 2: 9.0}).mean
    2.5
    """
    apart = [a - b for s in mine if (a := mine[s]) is not None and (b := base.get(s)) is not None]
    if not apart:
        return None
    count = len(apart)
    half = half_width(apart) if count > 1 else np.inf
    return Difference(float(np.mean(apart)), half, count)


class Found:
    """The finished runs by setting, part, row and seed."""

    def __init__(self, runs: Iterable[dict[str, Any]], tuning: bool):
        self.by: dict[Key, dict[int, dict[str, Any]]] = {}
        for run in runs:
            if run["tuning"] == tuning and not run["row"].startswith("rate "):
                key = run["data"], run["alpha"], run["part"], run["row"]
                self.by.setdefault(key, {})[run["seed"]] = run

    def values(self, key: Key, goal: str) -> dict[int, float | None]:
        return {seed: run[goal] for seed, run in self.by.get(key, {}).items()}

    def against(self, key: Key, goal: str, schedule: str = "") -> Difference | None:
        """The difference to `full` at the row's own schedule, or at the named one."""
        family = schedule or ("constant" if key[2] == "baselines" else key[2])
        return paired(self.values(key, goal), self.values((*key[:2], family, "full"), goal))

    @property
    def settings(self) -> list[tuple[str, float]]:
        return list(dict.fromkeys(key[:2] for key in self.by))

    @property
    def rows(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys(key[2:] for key in self.by))


def numbers(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with its goals seed by seed, and its difference to `full` at its own schedule."""
    found, out = Found(runs, False), []
    for key, by_seed in found.by.items():
        row: dict[str, Any] = dict(zip(("data", "alpha", "part", "row"), key, strict=True))
        row["rate"] = next(iter(by_seed.values()))["rate"]
        row["seeds"] = sorted(by_seed)
        for goal in GOALS:
            values, gain = found.values(key, goal), found.against(key, goal)
            row[goal] = [None if values[s] is None else round(values[s], 2) for s in row["seeds"]]  # type: ignore[arg-type]
            row[f"{goal}_minus_full"] = gain and [round(gain.mean, 3), round(gain.half, 3)]
        if "branches" in (first := by_seed[row["seeds"][0]]):
            every = np.array([run["branches"] for run in by_seed.values()])
            row["branches"] = np.round(every.mean(0), 3).tolist()
            del first
        out.append(row)
    return out


# ---- Markdown ------------------------------------------------------------------------------------
def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|" + "---|" * len(head), *map(line, rows), ""]


def cell(gain: Difference | None) -> str:
    return "–" if gain is None else str(gain)


def is_rule(part: str, row: str, family: str) -> bool:
    return part == family and not row.startswith(("full", "oracle"))


def best_of(
    tuned: Found, setting: tuple[str, float], keys: list[tuple[str, str]], goal: str
) -> Any:
    """The row (part, name) that is best at a goal on the tuning federations."""
    means = {}
    for key in keys:
        known = [v for v in tuned.values((*setting, *key), goal).values() if v is not None]
        if known:
            means[key] = float(np.mean(known))
    return max(means, key=lambda key: means[key]) if means else None


def overall(found: Found, family: str) -> list[str]:
    """Rules over all settings: mean difference to `full`, and where the interval says so."""
    rows = []
    for part, row in found.rows:
        if not is_rule(part, row, family):
            continue
        cells = [row]
        for goal in GOALS:
            gains = [found.against((*s, part, row), goal) for s in found.settings]
            known = [g for g in gains if g is not None]
            wins, losses = (sum(g.sign == sign for g in known) for sign in (1, -1))
            mean = np.mean([g.mean for g in known]) if known else np.nan
            cells.append(f"{mean:+.1f} ({wins} / {losses})".replace("-", "−"))
        rows.append(cells)
    return grid(["rule", *(TITLES[goal] for goal in GOALS)], rows)


def chosen(found: Found, tuned: Found, family: str) -> list[str]:
    """For each setting and goal the rule that was best on the tuning federations, and what it wins
    on the others."""
    rows = []
    for setting in found.settings:
        cells = [f"{setting[0]} {setting[1]:g}"]
        for goal in GOALS:
            rules = [key for key in tuned.rows if is_rule(*key, family)]
            best = best_of(tuned, setting, rules, goal)
            gain = found.against((*setting, *best), goal) if best else None
            cells.append("–" if best is None else f"{cell(gain)}<br>{best[1]}")
        rows.append(cells)
    return grid(["", *(TITLES[goal] for goal in GOALS)], rows)


BASELINES = dict(fedper="FedPer", ditto="Ditto", fedrod="FedRoD")
POINTS = (
    ("full, cosine", "cosine", "full"),
    ("full, weights by size", "constant", "full, weights by size"),
    ("full, C3E", "c3e", "full"),
    ("backbone, C3E", "c3e", "backbone"),
    ("backbone after 0.5, cosine", "cosine", "backbone after 0.5"),
    ("backbone after 0.8, `taken`, cosine", "cosine", "backbone after 0.8, `taken`"),
    ("oracle, global", "constant", "oracle w=0"),
    ("oracle, half", "constant", "oracle w=0.5"),
    ("oracle, clients", "constant", "oracle w=1"),
)


def points(found: Found, tuned: Found, goal: str) -> list[str]:
    """The other points of the front, minus `full` at its best constant rate; baselines at the rate
    that is best for their clients."""
    rows = []
    for setting in found.settings:
        full = found.values((*setting, "constant", "full"), goal)
        level = np.mean([v for v in full.values() if v is not None])
        keys: list[Any] = [key[1:] for key in POINTS]
        for name in BASELINES:
            tried = [key for key in tuned.rows if key[1].startswith(name)]
            keys.append(best_of(tuned, setting, tried, "clients"))
        gains = [key and found.against((*setting, *key), goal, "constant") for key in keys]
        rows.append([f"{setting[0]} {setting[1]:g}", f"{level:.1f}", *map(cell, gains)])
    return grid(["", "full", *(name for name, *_ in POINTS), *BASELINES.values()], rows)


def oracles(found: Found, family: str) -> list[str]:
    """The oracle minus `full` at the same schedule, and what is left of one round of it."""
    rows = []
    for setting in found.settings:
        key = (*setting, family, "oracle w=0")
        gains = [cell(found.against(key, goal)) for goal in GOALS]
        runs = found.by.get(key, {})
        later = [run["branches"] for run in runs.values() if "branches" in run]
        after = np.mean(later, (0, 1)) if later else []
        rows.append(
            [
                f"{setting[0]} {setting[1]:g}",
                *gains,
                " ".join(f"{x:+.1f}" for x in after).replace("-", "−"),
            ]
        )
    return grid(
        ["", *(TITLES[goal] for goal in GOALS), "one round of it, 0, 1, … rounds later"], rows
    )


def tables(scale: Scale, runs: list[dict[str, Any]]) -> list[str]:
    found, tuned = Found(runs, False), Found(runs, True)
    lines = ["### Other points of the front, minus `full` at its best constant rate", ""]
    for goal in GOALS:
        lines += [f"{TITLES[goal].capitalize()} (column `full`: its level in %):", ""]
        lines += points(found, tuned, goal)
    names = dict(
        constant="constant rate, cross-entropy",
        cosine="cosine, cross-entropy",
        c3e="constant rate, C3E",
    )
    for family, name in names.items():
        lines += [f"### Rules minus `full`: {name}", ""]
        lines += [
            "Mean over all settings (settings where the 95 % interval is above 0 / below 0):", "",
            *overall(found, family),
            "The rule that was best on the tuning federations, on the others:", "",
            *chosen(found, tuned, family),
        ]  # fmt: skip
    for family in ("constant", "cosine"):
        lines += [f"### The oracle of the global model minus `full`: {names[family]}", ""]
        lines += oracles(found, family)
    return lines


def write(path: pathlib.Path, name: str, scale: Scale, runs: list[dict[str, Any]]) -> None:
    """Put the tables between the marks of the page; what stands around them stays."""
    old = path.read_text() if path.exists() else f"# Headroom\n\n{BEGIN}\n{END}\n"
    if BEGIN not in old or END not in old:
        raise SystemExit(f"{path} has no lines '{BEGIN}' and '{END}' between which tables go")
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    seeds = len({run["seed"] for run in runs if not run["tuning"]})
    said = (
        f"Scale `{name}`: {scale.clients} clients, {scale.cohort} per round, {scale.rounds} rounds,"
        f" {scale.examples} examples, model {scale.model}, {seeds} federations per setting, rates"
        f" and rules chosen on {scale.tuning} others. Points of accuracy ± half of the 95 %"
        " interval (t, paired by federation); bold: the interval is above 0."
    )
    path.write_text(
        "\n".join([before.rstrip(), "", BEGIN, said, "", *tables(scale, runs), END]) + after
    )
