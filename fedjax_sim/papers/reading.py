"""Readings of a figure from a run: KIND or KIND:ARGUMENT:…, as the tables name it. Accuracies in %.

last:COLUMN          at the last evaluation with this column
best:COLUMN          the best over rounds, on test data
last10:COLUMN        mean of the last ten evaluations
by_val:COLUMN        at the round best on the server's validation rows
rounds_to:X:COLUMN   first round with at least X %
gb_to:, minutes_to:  the cost until then (GiB, minutes)
sum:COLUMN           over all rounds, of rounds.csv
mean:, least:, end:COLUMN   mean, minimum and last value in rounds.csv
share:ACTION         of all decisions
gigabytes            of the run (2^30, both ways)
seconds, seconds_per_round  of running
converged:COLUMN     seconds until convergence
stage:NAME           of a profile, seconds per round
megabytes:up         of a profile, per participant and round
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.options import convert, real, shown
from fedjax_sim.report.runs import Run
from fedjax_sim.runner.figures import convergence, rounds_to

GIB = 2**30  # what FedPolicy's paper calls a GB: 42.66 of its MB are 11,181,642 parameters
COLUMNS = {
    "global_acc": "the global model's accuracy on the test set",
    "client_mean": (
        "the mean over clients of the accuracy of each client's own model on its own rows"
    ),
    "client_pooled": "the accuracy of the clients' own models on all of their rows together",
    "resident_mean": "the mean over clients of the accuracy of their resident models",
    "resident_pooled": (
        "the accuracy of the clients' resident models on all of their rows together"
    ),
    "before_all_mean": (
        "the mean over clients of the accuracy of their models before the round's participants"
        " train"
    ),
    "before_all_pooled": (
        "the accuracy of the clients' models before the round's participants train, on all rows"
        " together"
    ),
    "global_at_clients_pooled": "the global model's accuracy on all clients' rows together",
    "personal_at_global_mean": (
        "the mean over clients of the accuracy of each client's own model on the test set"
    ),
    "exceed_comm": "pairs of client and round with more layers than the budget",
    "exceed_compute": "pairs of client and round with more epochs than the budget",
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """The content of profile.json: seconds of the stages of a round, bytes per participant."""

    seconds: Mapping[str, float]
    bytes: Mapping[str, float]


def load_profile(folder: pathlib.Path) -> Profile | None:
    try:
        content = json.loads((folder / "profile.json").read_text())
        return Profile(
            {k: float(v) for k, v in content["seconds"].items()},
            {k: float(v) for k, v in content["bytes"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def last(run: Run, column: str, count: int = 1) -> float:
    _, values = run.points(column)
    return 100 * float(values[-count:].mean()) if len(values) else math.nan


def best(run: Run, column: str) -> float:
    _, values = run.points(column)
    return 100 * float(values.max()) if len(values) else math.nan


def by_val(run: Run, column: str) -> float:
    rounds, values = run.points(column)
    when, score = run.points("val_acc")
    if not len(score) or not len(values):
        return math.nan
    at = when[int(score.argmax())]
    return 100 * float(values[rounds == at][0]) if (rounds == at).any() else math.nan


def first_round(run: Run, percent: str, column: str) -> float:
    """The first round with at least `percent`; inf: not reached, nan: the run lacks the column."""
    rounds, values = run.points(column)
    if not len(values):
        return math.nan
    found = rounds_to([int(r) for r in rounds], values.tolist(), float(percent) / 100)
    return math.inf if found is None else float(found)


def cost_to(run: Run, percent: str, column: str, cost: Callable[[float], float]) -> float:
    at = first_round(run, percent, column)
    return cost(at) if math.isfinite(at) else at


def seconds_until(run: Run, round_: float) -> float:
    return float(run.seconds_at(np.array([round_]))[0])


def share(run: Run, action: str) -> float:
    taken = run.actions
    total = sum(float(np.nansum(v)) for v in taken.values())
    return 100 * float(np.nansum(taken[action])) / total if action in taken and total else math.nan


def summed(run: Run, column: str) -> float:
    return float(np.nansum(run.rounds[column])) if column in run.rounds else math.nan


def of_rounds(run: Run, column: str, how: Callable[[np.ndarray], Any]) -> float:
    found = run.rounds.get(column, np.zeros(0))
    return float(how(found)) if len(found) and not np.isnan(found).all() else math.nan


def converged(run: Run, column: str) -> float:
    rounds, values = run.points(column)
    if len(rounds) < 2:
        return math.inf if len(rounds) else math.nan
    window = max(2, round(20 / float(rounds[1] - rounds[0])))
    found = convergence(rounds.tolist(), values.tolist(), window)
    return math.inf if found is None else seconds_until(run, found)


def running(run: Run) -> float:
    return seconds_until(run, float(run.rounds["round"][-1]))


class Reading(NamedTuple):
    read: Callable[..., float]  # (Run or Profile, *arguments)
    text: Callable[..., str]  # (*arguments)
    digits: int = 2
    better: int = 1  # 1: the largest is best, -1: the smallest


title = lambda column: COLUMNS.get(column, column.replace("_", " "))
READINGS: dict[str, Reading] = {
    "last": Reading(last, lambda c: f"{title(c)}, after the last round, %"),
    "best": Reading(best, lambda c: f"{title(c)}, best over rounds, %"),
    "last10": Reading(
        lambda run, c: last(run, c, 10),
        lambda c: f"{title(c)}, mean of the last ten evaluations, %",
    ),
    "by_val": Reading(
        by_val, lambda c: f"{title(c)}, at the round best on the server's validation rows, %"
    ),
    "rounds_to": Reading(first_round, lambda x, c: f"rounds to {x} % of {title(c)}", 1, -1),
    "gb_to": Reading(
        lambda run, x, c: cost_to(run, x, c, lambda at: float(run.bytes_at(at)) / GIB),
        lambda x, c: f"GiB (down and up) to {x} % of {title(c)}",
        2,
        -1,
    ),
    "minutes_to": Reading(
        lambda run, x, c: cost_to(run, x, c, lambda at: seconds_until(run, at) / 60),
        lambda x, c: f"minutes of running to {x} % of {title(c)}",
        1,
        -1,
    ),
    "sum": Reading(summed, lambda c: title(c), 0, -1),
    "mean": Reading(
        lambda run, c: of_rounds(run, c, np.nanmean), lambda c: f"{title(c)}, mean over rounds", 3
    ),
    "least": Reading(
        lambda run, c: of_rounds(run, c, np.nanmin), lambda c: f"{title(c)}, minimum over rounds", 3
    ),
    "end": Reading(
        lambda run, c: of_rounds(run, c, lambda v: v[-1]),
        lambda c: f"{title(c)}, in the last round",
        3,
    ),
    "gigabytes": Reading(
        lambda run: float(run.bytes_at(run.rounds["round"][-1])) / GIB,
        lambda: "GiB (2^30 bytes, down and up)",
        3,
        -1,
    ),
    "share": Reading(share, lambda a: f"share of the action {a}, %", 1),
    "seconds": Reading(running, lambda: "seconds of running", 1, -1),
    "seconds_per_round": Reading(
        lambda run: running(run) / float(run.rounds["round"][-1]),
        lambda: "seconds of running per round",
        3,
        -1,
    ),
    "converged": Reading(converged, lambda c: f"seconds until {title(c)} converges", 1, -1),
    "stage": Reading(
        lambda p, name: p.seconds.get(name, math.nan),
        lambda name: f"seconds per round: {name}",
        3,
        -1,
    ),
    "megabytes": Reading(
        lambda p, way: p.bytes.get(way, math.nan) / 1e6,
        lambda way: f"MB (10^6 bytes) {way} per participant and round",
        3,
        -1,
    ),
}


def split(text: str) -> tuple[Reading, list[str]]:
    kind, *arguments = text.split(":")
    reading = lookup("reading", kind, READINGS)
    wanted = list(inspect.signature(reading.text).parameters)
    if len(wanted) != len(arguments) or not all(arguments):
        form = ":".join(
            [kind, *({"x": "X", "c": "COLUMN"}.get(name, name.upper()) for name in wanted)]
        )
        raise UserError(f"reading '{shown(text)}' cannot be read; use {form}")
    if "x" in wanted:
        convert("X of the reading", arguments[wanted.index("x")], real)
    return reading, arguments


def value(text: str, source: Any) -> float:
    """The figure; nan: the run does not have it, inf: never reached."""
    reading, arguments = split(text)
    return reading.read(source, *arguments)


def sentence(text: str) -> str:
    """A reading as a sentence above a table."""
    words = describe(text)
    return f"{words[:1].upper()}{words[1:]}."


def describe(text: str) -> str:
    """A reading in words.

    >>> describe("rounds_to:20:global_acc")
    "rounds to 20 % of the global model's accuracy on the test set"
    """
    reading, arguments = split(text)
    return reading.text(*arguments)
