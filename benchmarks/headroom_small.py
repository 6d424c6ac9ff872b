"""What `headroom_pfedrlla` and `headroom_qbandit` share: small federations of one shape, paired
differences, and the files they leave.

A federation of a seed has other images, other labels per client and another order; its row tables
have the same sizes for all seeds, so that one compiled program serves them all.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_sim.api import set_up
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.sources import load
from fedjax_sim.engine.layout import place
from fedjax_sim.engine.records import make_data
from fedjax_sim.engine.simulation import start
from fedjax_sim.runner.figures import half_width


def images(name: str, data_dir: str | None, pool: int) -> tuple[np.ndarray, ...]:
    """(x_train, y_train, x_test, y_test), averaged over squares of `pool` pixels."""
    data = load(name, data_dir)

    def smaller(x: np.ndarray) -> np.ndarray:
        n, height, width, channels = x.shape
        cut = x[:, : height // pool * pool, : width // pool * pool]
        cut = cut.reshape(n, height // pool, pool, width // pool, pool, channels)
        return np.round(cut.mean((2, 4), dtype=np.float32)).astype(np.uint8)

    return smaller(data.x_train), data.y_train, smaller(data.x_test), data.y_test


def federation(
    data: tuple[np.ndarray, ...],
    shares: np.ndarray,
    sizes: Sequence[Sequence[int]],
    rng: np.random.Generator,
    test: int = 1000,
) -> Federation:
    """Client k has sizes[k] = (train, val, test) examples with labels drawn from shares[k] [C], as
    long as there are any."""
    x, y, x_test, y_test = data
    by_class = [list(rng.permutation(np.flatnonzero(y == c))) for c in range(shares.shape[1])]
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
    for own, counts in zip(shares, sizes, strict=True):
        labels = rng.choice(len(own), sum(counts), p=own)
        rows = np.array([take(by_class, c) for c in labels])
        for name, piece in zip(parts, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
            parts[name].append(piece)
    some = rng.permutation(len(y_test))[:test]
    return Federation.from_arrays(
        np.concatenate([x, x_test[some]]),
        np.concatenate([y, y_test[some]]),
        parts,
        test=np.arange(len(y), len(y) + len(some)),
        classes=shares.shape[1],
        name="headroom",
    )


def take(by_class: list[list[int]], wanted: int) -> int:
    """A row of the class; where it has none left, of the one that has most."""
    there = by_class[wanted] or max(by_class, key=len)
    return there.pop()


def few_classes(clients: int, classes: int, each: int, rng: np.random.Generator) -> np.ndarray:
    """[N, C] equal shares of `each` classes per client."""
    out = np.zeros((clients, classes))
    for k in range(clients):
        out[k, rng.permutation(classes)[:each]] = 1 / each
    return out


class Program:
    """A method's compiled rounds, for federations of one shape and any seed."""

    def __init__(self, method: str, fed: Federation, mode: str, **settings: Any):
        self.mode = mode
        setup = set_up(method, fed, evaluate=(mode,), devices="1", **settings)
        self.sim: Any = setup.simulation
        self.rounds = setup.experiment.training.rounds

    def run(
        self, fed: Federation, seed: int, last: int, change: Callable[[Any], Any] = lambda s: s
    ) -> tuple[float, dict[str, np.ndarray]]:
        """(% accuracy, mean over clients and the last evaluations, the log of all rounds); change:
        of the State before round 1."""
        sim = self.sim
        data = make_data(sim.stages, fed)
        net = sim.env.model.init(jax.random.key(seed))
        state, data = place(sim.layout, change(start(sim.stages, data, seed, net)), data)
        logs, scores = [], []
        for first in range(0, self.rounds, sim.most_rounds):
            count = min(sim.most_rounds, self.rounds - first)
            state, log, score = sim.run(state, data, count, True)
            logs.append({k: np.asarray(v)[:count] for k, v in log.items()})
            done = np.asarray(score["round"]) > 0
            found = {k: np.asarray(v)[done] for k, v in score[self.mode]["accuracy"].items()}
            scores += list((found["correct"] / np.maximum(found["count"], 1)).mean(1))
        log = {k: np.concatenate([one[k] for one in logs]) for k in logs[0]}
        return 100 * float(np.mean(scores[-last:])), log


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """(mean difference, half of its 95 % interval) of values on the same draws.

    >>> tuple(round(v, 2) for v in paired([1.0, 2.0, 3.0], [0.0, 1.5, 1.5]))
    (1.0, 1.24)
    """
    differ = np.asarray(ours, float) - np.asarray(theirs, float)
    return float(differ.mean()), half_width(differ)


def table(found: Mapping[str, Sequence[float]], reference: str) -> list[str]:
    """Lines of Markdown: mean of every rule, and its difference to the reference."""
    lines = [f"| rule | mean, % | minus {reference} | seeds |", "|---|---|---|---|"]
    for rule, values in found.items():
        both = min(len(values), len(found[reference]))
        mean, half = paired(values[:both], found[reference][:both])
        differ = "" if rule == reference else f"{mean:+.2f} ± {half:.2f}"
        lines.append(f"| `{rule}` | {np.mean(values):.2f} | {differ} | {len(values)} |")
    return lines


def write(path: pathlib.Path, facts: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read(path: pathlib.Path) -> dict[str, Any]:
    """What an earlier call has left; it goes on from there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
