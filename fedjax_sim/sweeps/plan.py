"""A sweep file as a list of runs: methods × grid × seeds.

preset = "fedpolicy-fmnist"                              # optional: settings to start from
methods = ["fedavg", "fedprox:mu=0.1", "fedpolicy"]      # entries as `compare` takes them
seeds = 3                                                # 0, 1, 2; or a list of seeds

[settings]                                               # the same in every run
rounds = 50
"model.hidden" = [64]

[grid]                                                   # every combination
partition = ["dirichlet:0.3", "dirichlet:0.05"]
agent = ["sac", "ppo"]                                   # for the methods that have this option
"fedprox.mu" = [0.01, 0.1]

[before.agent]                                           # a run that others start from:
method = "fedpolicy"                                     # start_from = "@agent"
rounds = 200                                             # or "@agent:PART,PART"
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
    name: str  # of its folder: method, settings of entry and grid, seed
    experiment: Experiment
    point: dict[str, Any]  # its settings from the grid
    digits: str = ""  # a hash that identifies it
    before: Job | None = None  # the run that it starts from
    parts: str = ""  # the parts of that run's state
    kind: str = "run"  # or profile: the stages of a round are timed


def read(path: pathlib.Path) -> dict[str, Any]:
    """The content of a sweep file: TOML, or JSON as `Folder.begin` writes it."""
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
    """A nested table with dotted names.

    >>> flattened({"lr": 1, "fedprox": {"mu": [1, 2]}})
    {'lr': 1, 'fedprox.mu': [1, 2]}
    """
    out: dict[str, Any] = {}
    for name, value in table.items():
        inside = isinstance(value, Mapping)
        out |= flattened(value, f"{before}{name}.") if inside else {f"{before}{name}": value}
    return out


def seeds_of(data: Mapping[str, Any]) -> list[int]:
    given = data.get("seeds", 1)
    whole = lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0
    seeds = list(range(given)) if whole(given) and 1 <= given <= MOST_SEEDS else given
    numbers = isinstance(seeds, list) and seeds and all(map(whole, seeds))
    if not numbers or len(set(seeds)) != len(seeds):
        raise UserError(
            f"seeds {shown(str(given))} is not allowed; use a number of 1 or more, or a list of"
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
    """A value as on the command line.

    >>> as_text([64, 32]), as_text(["global", "personal"]), as_text(0.1)
    ('64x32', 'global,personal', '0.1')
    """
    if isinstance(value, (list, tuple)):
        return ("x" if all(isinstance(v, int) for v in value) else ",").join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def handed_over(before: Job) -> str:
    """The parts of this run's state that another one starts from by default."""
    method = before.experiment.method
    parts = getattr(make_method(method.name, **method.options), "hands_over", ())
    if not parts:
        raise UserError(
            f"a run of {method.name} has no default parts to start from; name them, as in"
            " @NAME:server"
        )
    return ",".join(parts)


def befores(
    data: Mapping[str, Any], base: Callable[[str], Mapping[str, Any]], others: Collection[str]
) -> dict[str, Job]:
    """The runs of [before] by name, with the settings of all runs and their own."""
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
        folder = re.sub(r"[^\w.+-]", "_", f"before-{name[:60]}-s{experiment.training.seed}")
        number = len({job.digits for job in out.values()})
        out[name] = same or Job(number, folder, experiment, {}, digits)
    return out


def digits_of(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def source(text: str, known: Mapping[str, Job]) -> tuple[Job | None, str]:
    """start_from = '@NAME:PARTS' -> (that run of [before], the parts); (None, '') for a path."""
    if not text.startswith("@"):
        return None, ""
    name, _, parts = text[1:].partition(":")
    before = lookup("run in [before]", shown(name), known)
    return before, parts or handed_over(before)


def jobs_of(data: Mapping[str, Any]) -> list[Job]:
    """All runs, without duplicates, in the same order on every machine; errors in the file are
    raised here."""
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
    """One run. chosen: all of its settings; point: those of the grid, own: those of the entry."""
    before, parts = source(str(chosen.get("start_from", "")), first)
    if before is not None:
        del chosen["start_from"]
    experiment = experiment_of(method, chosen, others, OF_THE_COMMAND)
    # settings outside the hash identify a run only if the grid varies them
    swept = {key for key in map(key_of, point) if key in SETTINGS}
    also = {k: str(experiment.get(k)) for k in swept if SETTINGS[k][2].hashed == NEVER}
    start = f"@{before.digits}:{parts}" if before else experiment.model.start_from
    digits = digits_of([experiment.hash(), start, also])
    bare = lambda option: key_of(option.removeprefix(f"{method}."))
    overridden = {bare(option) for option in own}  # the entry overrides the grid
    kept = {n: v for n, v in point.items() if bare(n) not in overridden and concerns(n, method)}
    texts = {n: as_text(v) for n, v in kept.items()} | dict(own)
    name = name_of(method, texts, experiment.training.seed)
    return Job(index, name, experiment, kept, digits, before, parts)


def distinct(jobs: list[Job]) -> list[Job]:
    """The jobs, with digits after names that are too long or not unique."""
    count = collections.Counter(job.name.lower() for job in jobs)  # file systems may ignore case
    unique = lambda job: count[job.name.lower()] == 1 and len(job.name) <= LONGEST_NAME
    longer = lambda job: dataclasses.replace(job, name=f"{job.name[:LONGEST_NAME]}-{job.digits}")
    return [job if unique(job) else longer(job) for job in jobs]


def name_of(method: str, settings: Mapping[str, str], seed: int) -> str:
    """A readable name of a run.

    >>> name_of("fedprox", {"fedprox.mu": "0.1", "partition": "dirichlet:0.3", "probe": "true"}, 0)
    'fedprox-mu0.1-dirichlet_0.3-probe_true-s0'
    """
    parts = []
    for name, value in settings.items():
        option = name.rpartition(".")[2]
        if value in ("true", "false"):
            parts.append(f"{option}_{value}")
        else:  # a word needs no name, a number does
            parts.append(value if value[:1].isalpha() else f"{option}{value}")
    return re.sub(r"[^\w.+-]", "_", "-".join([method, *parts, f"s{seed}"]))
