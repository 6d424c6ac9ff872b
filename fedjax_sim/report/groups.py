"""Groups of runs: a scene (data and participation) is a panel, a label (method and options) a
colour.

Runs of one scene and label differ only in their seeds; their mean and standard deviation are drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.options import shown
from fedjax_sim.report.runs import Run

# settings that define a scene; the first four are in every title
SCENE = (
    *("dataset", "partition", "clients", "participation", "protocol", "norm", "unseen"),
    *("dropout", "stragglers", "server_val", "val_fraction"),
)
# in neither scene nor label: seeds, paths, fingerprints, how it was computed
ASIDE = (
    *("seed", "data_seed", "data", "data_fingerprint", "own_data", "own_model", "model_shapes"),
    *("data_dir", "download", "init", "chunk", "devices", "backend", "checkpoint_every", "keep"),
    *("state_on", "rounds", "schedule_rounds", "cohorts", "eval_every", "evaluations"),
    *("personal_every", "probe", "method"),
)

Curve = tuple[np.ndarray, np.ndarray, np.ndarray]  # x, mean, standard deviation


@dataclasses.dataclass(frozen=True)
class Group:
    """Seeds of one label in one scene."""

    label: str
    scene: str
    runs: tuple[Run, ...]

    def series(self, column: str, place: Callable[[Run, np.ndarray], np.ndarray]) -> Curve:
        """(x, mean, std) of an evaluated column over seeds, at the rounds evaluated in every
        seed."""
        points = [(run, *run.points(column)) for run in self.runs]
        points = [(run, rounds, values) for run, rounds, values in points if len(rounds)]
        if not points:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        common = sorted(set.intersection(*(set(rounds.tolist()) for _, rounds, _ in points)))
        values = np.stack([v[np.isin(r, common)] for _, r, v in points])
        x = np.mean([place(run, np.array(common)) for run, _, _ in points], 0)
        return x, values.mean(0), spread(values)

    def per_round(self, column: Callable[[Run], np.ndarray]) -> Curve:
        """(rounds, mean, std) over seeds of a value per round, up to the shortest run."""
        values = [column(run) for run in self.runs]
        least = min(map(len, values))
        stacked = np.stack([v[:least] for v in values])
        return self.runs[0].rounds["round"][:least], stacked.mean(0), spread(stacked)

    @property
    def ended(self) -> bool:
        """Whether all seeds have all of their rounds."""
        return all(run.stored for run in self.runs)

    def figure(self, name: str) -> np.ndarray:
        """[n] a figure of the summary per seed, without missing ones."""
        found = [run.summary.get(name) for run in self.runs]
        return np.array([v for v in found if isinstance(v, (int, float)) and np.isfinite(v)], float)


def spread(values: np.ndarray) -> np.ndarray:
    """Standard deviation over the first axis, with n - 1; 0 for one seed."""
    return values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1:])


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the options of method, model and loss beside the others.

    >>> flat(
    ...     {
    ...         "method": "fedprox",
    ...         "lr": 0.1,
    ...         "options": {"mu": 0.5},
    ...         "model_options": {"stem": "cifar"},
    ...     }
    ... )
    {'method': 'fedprox', 'lr': 0.1, 'mu': 0.5, 'model.stem': 'cifar'}
    """
    out = {k: v for k, v in config.items() if k not in ("options", "model_options", "loss_options")}
    for owner, prefix in (("options", ""), ("model_options", "model."), ("loss_options", "loss.")):
        out |= {prefix + name: value for name, value in (config.get(owner) or {}).items()}
    return out


def text_of(value: Any) -> str:
    """A value for a label; equal numbers give the same text."""
    try:
        return f"{float(value):g}" if not isinstance(value, bool) else str(value)
    except (TypeError, ValueError):
        several = isinstance(value, (list, tuple))
        return "x".join(map(text_of, value)) if several else shown(str(value), 40)


def varying(configs: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Names whose values differ between the configurations."""
    return [name for name in names if len({text_of(c.get(name)) for c in configs}) > 1]


def share(text: str) -> str:
    """The participation, for a title.

    >>> share("0.5"), share("10/50"), share("0.5:1"), share("10")
    ('50 %', '10/50', '0.5:1', '10')
    """
    try:
        return f"{100 * float(text):g} %" if float(text) <= 1 else text
    except ValueError:
        return text


def scene_of(config: dict[str, Any], different: Sequence[str]) -> str:
    """Title of a scene: data, split, participation, and the settings that differ between
    scenes."""
    parts = [text_of(config.get("dataset", "")), text_of(config.get("partition", ""))]
    if config.get("clients") is not None:
        cohort = config.get("participation")
        per_round = f", {share(text_of(cohort))} per round" if cohort else ""
        parts.append(f"{text_of(config['clients'])} clients{per_round}")
    parts += [f"{n} {text_of(config.get(n))}" for n in different if n not in SCENE[:4]]
    return " · ".join(part for part in parts if part)


def label_of(config: dict[str, Any], different: Sequence[str]) -> str:
    """Method, its agent, and the options that differ between runs of this method."""
    names = dict.fromkeys([*(["agent"] if "agent" in config else []), *different])
    inside = [
        text_of(config[n]) if n == "agent" else f"{n}={text_of(config[n])}"
        for n in names
        if n in config
    ]
    return shown(config["method"], 60) + (f" ({', '.join(inside)})" if inside else "")


def grouped(runs: Sequence[Run], say: Callable[[str], None] = lambda text: None) -> list[Group]:
    """Runs by scene and label, in order of first appearance; of two with the same seeds the longer
    one."""
    configs = [flat(run.config) for run in runs]
    # a run without an option has an unknown default, so it counts as different
    scene_names = varying(configs, SCENE)
    options: dict[str, list[str]] = {}
    for method in {c["method"] for c in configs}:
        mine = [c for c in configs if c["method"] == method]
        names = dict.fromkeys(n for c in mine for n in c if n not in (*SCENE, *ASIDE))
        options[method] = varying(mine, list(names))
    found: dict[tuple[str, str], dict[Any, Run]] = {}
    for run, config in zip(runs, configs, strict=True):
        key = scene_of(config, scene_names), label_of(config, options[config["method"]])
        seeds = config.get("seed", 0), config.get("data_seed", 0)
        other = found.setdefault(key, {}).setdefault(seeds, run)
        if other is not run:
            long, short = sorted((run, other), key=lambda r: -len(r.rounds["round"]))
            found[key][seeds] = long
            say(
                f"skipped: '{shown(str(short.path), 200)}' is the same run as"
                f" '{shown(str(long.path), 200)}', not longer"
            )
    return [Group(label, scene, tuple(same.values())) for (scene, label), same in found.items()]


def labels(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(g.label for g in groups))


def scenes(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(g.scene for g in groups))
