"""A sweep file as a list of runs: methods × grid × seeds.

preset = "fedpolicy-fmnist"                              # may be left out: settings to start from
methods = ["fedavg", "fedprox:mu=0.1", "fedpolicy"]      # entries as `compare` takes them
seeds = 3                                                # 0, 1, 2; or a list of seeds

[settings]                                               # the same in every run
rounds = 50
"model.hidden" = [64]

[grid]                                                   # every combination
partition = ["dirichlet:0.3", "dirichlet:0.05"]
agent = ["sac", "ppo"]                                   # for the methods that have this option
"fedprox.mu" = [0.01, 0.1]

[before.agent]                                           # others start from it: start_from =
"@agent" or "@agent:PART,PART" method = "fedpolicy" rounds = 200
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.given import (
    OF_THE_COMMAND,
    concerns,
    experiment_of,
    key_of,
    layered,
    read_entry,
    scoped,
)
from fedjax_sim.experiment.settings import NEVER
from fedjax_sim.experiment.tree import SETTINGS
from fedjax_sim.methods import METHODS, make_method
from fedjax_sim.options import shown
from fedjax_sim.presets import preset

PARTS = ("preset", "methods", "seeds", "settings", "grid", "before")
MOST_SEEDS = 10_000
MOST_RUNS = 100_000
LONGEST_NAME = 120  # characters of a folder's name


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    index: int
    name: str  # of its folder: method, what it is given by entry and grid, seed
    experiment: Experiment
    point: dict[str, Any]  # the grid's settings that it has
    digits: str = ""  # of everything that decides what it is
    before: Job | None = None  # the run that it starts from …
    parts: str = ""  # … and what of its state
    kind: str = "run"  # or profile: the parts of a round are timed


def read(path: pathlib.Path) -> dict[str, Any]:
    """A sweep file: TOML, or JSON as `write` leaves it."""
    name = shown(str(path), 200)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as problem:
        raise UserError(f"sweep file '{name}' cannot be read: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise UserError(f"sweep file '{name}' is not TOML: {problem}") from None
    for part in data:
        if part not in PARTS:
            raise unknown("part of a sweep file", shown(part), PARTS)
    return data


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """
    >>> flattened({"lr": 1, "fedprox": {"mu": [1, 2]}})
    {'lr': 1, 'fedprox.mu': [1, 2]}
    """
    out: dict[str, Any] = {}
    for name, value in table.items():
        out |= (
            flattened(value, f"{before}{name}.")
            if isinstance(value, Mapping)
            else {f"{before}{name}": value}
        )
    return out


def seeds_of(data: Mapping[str, Any]) -> list[int]:
    said = data.get("seeds", 1)
    whole = lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0
    seeds = list(range(said)) if whole(said) and 1 <= said <= MOST_SEEDS else said
    if not (
        isinstance(seeds, list)
        and seeds
        and all(map(whole, seeds))
        and len(set(seeds)) == len(seeds)
    ):
        raise UserError(
            f"seeds {shown(str(said))} is not allowed; use a number of 1 or more, or a list of"
            " different seeds"
        )
    return seeds


def points(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the grid."""
    grid = data.get("grid", {})
    if not isinstance(grid, Mapping) or not isinstance(data.get("settings", {}), Mapping):
        raise UserError("[settings] and [grid] are tables; write [grid] on a line of its own")
    flat = flattened(grid)
    for name, values in flat.items():
        if not isinstance(values, list) or not values:
            raise UserError(
                f"grid.{shown(name)} is not a list of values; write for example {shown(name)} ="
                " [1, 2]"
            )
    for chosen in itertools.product(*flat.values()):
        yield dict(zip(flat, chosen, strict=True))


def as_text(value: Any) -> str:
    """
    >>> as_text([64, 32]), as_text(["global", "personal"]), as_text(0.1)
    ('64x32', 'global,personal', '0.1')
    """
    if isinstance(value, (list, tuple)):
        return ("x" if all(isinstance(v, int) for v in value) else ",").join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def handed_over(before: Job) -> str:
    """What another run takes over of this one unless it names parts."""
    method = before.experiment.method
    parts = getattr(make_method(method.name, **method.options), "hands_over", ())
    if not parts:
        raise UserError(
            f"a run of {method.name} hands nothing over by itself; name parts, as in @NAME:server"
        )
    return ",".join(parts)


def befores(
    data: Mapping[str, Any], base: Callable[[str], Mapping[str, Any]], others: Collection[str]
) -> dict[str, Job]:
    """The runs of [before] by name; they have the settings of all runs, and their own."""
    out: dict[str, Job] = {}
    for name, table in data.get("before", {}).items():
        if not isinstance(table, Mapping) or not isinstance(table.get("method"), str):
            raise UserError(
                f'[before.{shown(name)}] needs a method, for example method = "fedpolicy"'
            )
        method, own = read_entry(table["method"])
        chosen = layered(base(method), {"seed": seeds_of(data)[0]}, flattened(table), own)
        chosen = {n: v for n, v in chosen.items() if n not in ("method", "start_from")}
        experiment = experiment_of(method, chosen, {*others, method}, OF_THE_COMMAND)
        digits = digits_of([experiment.hash(), experiment.training.rounds])
        same = next((job for job in out.values() if job.digits == digits), None)
        word = re.sub(r"[^\w.+-]", "_", f"before-{name[:60]}-s{experiment.training.seed}")
        number = len({job.digits for job in out.values()})
        out[name] = same or Job(number, word, experiment, {}, digits)
    return out


def digits_of(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def source(text: str, known: Mapping[str, Job]) -> tuple[Job | None, str]:
    """start_from = '@NAME:PART,PART' -> (that run of [before], the parts); (None, '') for another
    run's directory."""
    if not text.startswith("@"):
        return None, ""
    name, _, parts = text[1:].partition(":")
    before = lookup("run in [before]", shown(name), known)
    return before, parts or handed_over(before)


def jobs_of(data: Mapping[str, Any]) -> list[Job]:
    """All runs, in one order on every machine; mistakes are found here. What is the same run twice
    is one."""
    entries = data.get("methods")
    if not (isinstance(entries, list) and entries and all(isinstance(e, str) for e in entries)):
        raise UserError(
            'a sweep file needs methods, for example methods = ["fedavg", "fedprox:mu=0.1"]'
        )
    read_entries, settings = [read_entry(entry) for entry in entries], data.get("settings", {})
    others = {method for method, _ in read_entries}
    base = preset(data["preset"]) if "preset" in data else None
    usual = lambda method: scoped(method, base.of(method)) if base else {}
    grid = list(points(data))
    settings = flattened(settings)
    first = befores(data, lambda method: layered(usual(method), settings), METHODS)
    found: dict[str, Job] = {job.digits: job for job in first.values()}
    for (method, own), point, seed in itertools.product(read_entries, grid, seeds_of(data)):
        chosen = layered(usual(method), {"seed": seed}, settings, point, own)
        job = job_of(len(found), method, chosen, point, own, others, first)
        found.setdefault(job.digits, job)
        if len(found) > MOST_RUNS:
            raise UserError(f"the sweep has more than {MOST_RUNS} runs; make the grid smaller")
    return distinct(list(found.values()))


def job_of(
    index: int,
    method: str,
    chosen: dict[str, Any],
    point: Mapping[str, Any],
    own: Mapping[str, str],
    others: Collection[str],
    first: Mapping[str, Job],
) -> Job:
    """One run. chosen: all of its settings, of which `point` are the grid's, `own` the entry's."""
    before, parts = source(str(chosen.get("start_from", "")), first)
    if before is not None:
        del chosen["start_from"]
    experiment = experiment_of(method, chosen, others, OF_THE_COMMAND)
    # what the hash leaves out decides nothing, unless somebody sweeps over it
    swept = {key for key in map(key_of, point) if key in SETTINGS}
    also = {k: str(experiment.get(k)) for k in swept if SETTINGS[k][2].hashed == NEVER}
    start = f"@{before.digits}:{parts}" if before else experiment.model.start_from
    digits = digits_of([experiment.hash(), start, also])
    bare = lambda option: key_of(option.removeprefix(f"{method}."))
    said = {bare(option) for option in own}  # by the entry itself, over the grid
    kept = {n: v for n, v in point.items() if bare(n) not in said and concerns(n, method)}
    shown_as = {n: as_text(v) for n, v in kept.items()} | dict(own)
    name = name_of(method, shown_as, experiment.training.seed)
    return Job(index, name, experiment, kept, digits, before, parts)


def distinct(jobs: list[Job]) -> list[Job]:
    """With digits behind names that are too long, or that several runs have."""
    often = collections.Counter(job.name.lower() for job in jobs)  # some systems know no capitals
    apart = lambda job: often[job.name.lower()] == 1 and len(job.name) <= LONGEST_NAME
    longer = lambda job: dataclasses.replace(job, name=f"{job.name[:LONGEST_NAME]}-{job.digits}")
    return [job if apart(job) else longer(job) for job in jobs]


def name_of(method: str, settings: Mapping[str, str], seed: int) -> str:
    """A run as people call it.

    >>> name_of("fedprox", {"fedprox.mu": "0.1", "partition": "dirichlet:0.3", "probe": "true"}, 0)
    'fedprox-mu0.1-dirichlet_0.3-probe_true-s0'
    """
    said = {"true", "false"}
    parts = []
    for name, value in settings.items():
        speaks = (
            value[:1].isalpha() and value not in said
        )  # a word stands for itself, a number needs its name
        option = name.rpartition(".")[2]
        parts.append(
            value if speaks else f"{option}_{value}" if value in said else f"{option}{value}"
        )
    return re.sub(r"[^\w.+-]", "_", "-".join([method, *parts, f"s{seed}"]))
