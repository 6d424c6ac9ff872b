"""Rows of a run: named numbers from the arrays that the compiled program returns."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import numpy as np

from fedjax_sim.engine.evaluation import adapted_modes
from fedjax_sim.experiment import Experiment
from fedjax_sim.metrics.base import OF_CLIENTS, OF_SERVER, Metric, columns_of, over_clients
from fedjax_sim.plans import payload_bytes
from fedjax_sim.runner import figures
from fedjax_sim.runner.figures import Row
from fedjax_sim.runner.prepare import Setup

log = logging.getLogger(__name__)


def personal_due(experiment: Experiment, round_: int) -> bool:
    """Whether clients fine-tune for their evaluation after this round, by --personal-every."""
    every = experiment.evaluation.personal_every
    return bool(every and round_ % every == 0)


class Recorder:
    """Turns the arrays that the compiled program returns into rows; no times, no files."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.rounds: list[Row] = []
        self.rows: list[Row] = []
        self.clients: dict[str, list[Any]] = {}
        self.warned: set[str] = set()  # each warning is given once
        env, net = setup.simulation.env, setup.net
        self.wire = setup.simulation.method.wire(env, net)
        self.restart_totals()

    def restart_totals(self) -> None:
        """Count from round 1 again at the next evaluation, after the rows were replaced."""
        self.counted, self.bytes_down, self.bytes_up = 0, 0, 0  # counted: rounds in the totals

    def count_to(self, round_: int, after: int) -> list[Row]:
        """Advance the totals to `round_`; return the newly counted rounds after round `after`."""
        start = self.counted
        while self.counted < len(self.rounds) and self.rounds[self.counted]["round"] <= round_:
            self.bytes_down += int(self.rounds[self.counted]["bytes_down"])
            self.bytes_up += int(self.rounds[self.counted]["bytes_up"])
            self.counted += 1
        return [r for r in self.rounds[start : self.counted] if r["round"] > after]

    def add_rounds(self, logs: dict[str, np.ndarray], count: int) -> None:
        logs = {k: v[:count] for k, v in logs.items()}
        down, up = payload_bytes(logs["taken"], logs["sent"], self.wire, logs["down"], logs["up"])
        for i in range(count):
            row: Row = {"round": int(logs["round"][i])}
            for name, values in logs.items():
                if name in ("round", "down", "up") or name.startswith(("probe_", "acted_")):
                    continue
                if values.ndim == 1:
                    row[name] = values[i].item()
                elif values.ndim == 3:  # a matrix: who mixes whose model
                    row.update({f"{name}_{a}_{b}": v for (a, b), v in np.ndenumerate(values[i])})
                else:
                    flat = values[i].reshape(-1).tolist()
                    row.update({f"{name}_{j}": v for j, v in enumerate(flat)})
            row |= dict(bytes_down=int(down[i]), bytes_up=int(up[i]))
            self.rounds.append(row)
            row |= figures.recent_shares(self.rounds)
            if "acted_ids" in logs:  # the controller's action and reward of each participant
                self.clients.setdefault("acted_rounds", []).append(np.int64(row["round"]))
                for name in (n for n in logs if n.startswith("acted_")):
                    self.clients.setdefault(name, []).append(logs[name][i])
            warnings = self.setup.simulation.method.warnings(self.rounds)
            for sentence in (*figures.training_warnings(self.rounds), *warnings):
                if sentence.split(":")[0] not in self.warned:
                    self.warned.add(sentence.split(":")[0])
                    name = self.setup.experiment.method.name
                    log.warning("%s, round %d: %s", name, row["round"], sentence)

    def add_evaluation(self, scores: dict[str, Any], log: dict[str, np.ndarray] | None) -> None:
        at = int(scores["round"])
        row: Row = {"round": at}
        recent = self.count_to(at, int(self.rows[-1]["round"]) if self.rows else 0)
        metrics = self.metrics
        for mode, prefix in OF_SERVER.items():
            for metric in metrics if mode in scores else ():
                found = metric.of_rows(scores[mode].get(metric.name, {}))
                row |= {f"{prefix}_{name}": value for name, value in found.items()}
        for mode, prefix in OF_CLIENTS.items():
            if mode in scores and (
                mode != "global@clients" or mode in self.setup.experiment.evaluation.evaluations
            ):
                row |= self.of_clients(mode, prefix, scores[mode], at)
        if log is not None and "probe_ids" in log:
            # the probe does not fine-tune, so for a method that does, its figures must not be mixed
            # with those of the other clients
            mixed = "resident" in scores and not self.setup.simulation.method.adapts
            resident = scores["resident"][metrics[0].name] if mixed else None
            row |= figures.probe_figures(log, resident, metrics[0], self.setup.participation.seen)
        on_client_rows = [m for m in OF_CLIENTS if m in scores and not m.startswith("personal@")]
        if on_client_rows:
            counts = np.asarray(scores[on_client_rows[0]][metrics[0].name]["count"])
            counts = counts[list(self.setup.participation.seen)]
            row["client_rows_least"] = float(counts.min())
            row["client_rows_mean"] = float(counts.mean())
            if self.setup.simulation.client_split == "train":  # a training accuracy
                row["client_on_train_rows"] = 1
        for name in ("participants", "dropped", "diverged", "exploding"):
            row[name] = sum(r.get(name, 0) for r in recent)
        row |= dict(
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
            train_loss=recent[-1]["train_loss"] if recent else math.nan,
        )
        self.rows.append(row)

    @property
    def columns(self) -> list[str]:
        """The first columns of metrics.csv: those of the run's metrics, then those of every run."""
        measured = columns_of(
            self.metrics, ("global", "personal", *self.setup.experiment.evaluation.evaluations)
        )
        return ["round", *measured, *figures.COUNTED]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The run's metrics, the primary one first."""
        return self.setup.simulation.env.metrics

    def of_clients(
        self, mode: str, prefix: str, found: dict[str, Any], round_: int
    ) -> dict[str, float]:
        """Columns of one evaluation mode over clients; also keeps the primary metric's sums per
        client."""
        seen, unseen, first = self.setup.participation.seen, self.setup.unseen, self.metrics[0]
        over = over_clients(self.metrics, found, seen)
        row = {f"{prefix}_{name}": value for name, value in over.items()}
        if unseen:
            mean = f"{first.over or ''}mean"
            row[f"unseen_{prefix}_{mean}"] = over_clients([first], found, unseen)[mean]
        place = mode.replace("@", "_at_")
        sums = {name: np.asarray(value, np.float64) for name, value in found[first.name].items()}
        self.clients[f"{place}_count"] = [sums["count"]]
        kept = {name: value for name, value in sums.items() if name != "count"}
        real = sums["count"] > 0
        if len(kept) > 1 or not np.array_equal(
            first.values(sums), next(iter(kept.values()))[real] / sums["count"][real]
        ):
            # not a plain ratio of the sums, so the file needs the values too
            kept["values"] = np.full(len(real), np.nan)
            kept["values"][real] = first.values(sums)
        for name, value in (kept | dict(rounds=np.int64(round_))).items():
            self.clients.setdefault(f"{place}_{name}", []).append(value)
        return row

    def truncate(self, round_: int, rounds: bool = True) -> None:
        """Drop everything after `round_`; rounds=False: only the evaluations."""
        self.restart_totals()
        self.rows = [r for r in self.rows if r["round"] <= round_]
        if rounds:
            self.rounds = [r for r in self.rounds if r["round"] <= round_]
        for name in list(self.clients):
            if name.endswith("_rounds") and (rounds or name != "acted_rounds"):
                self.drop_clients(name.removesuffix("_rounds"), round_)

    def reopen(self, round_: int) -> None:
        """Continue a run that had ended at `round_`: drop what was recorded only because it was the
        last round."""
        config, method = self.setup.experiment, self.setup.simulation.method
        if not self.rows or self.rows[-1]["round"] != round_:
            return
        adapts = adapted_modes(method, config.evaluation.evaluations)
        adapted = bool(adapts) and personal_due(config, round_)
        if round_ % config.evaluation.eval_every and not adapted:
            self.truncate(round_ - 1, rounds=False)
        elif adapts and not adapted:
            for mode, prefix in ((m.replace("@", "_at_"), OF_CLIENTS[m]) for m in adapts):
                self.drop_clients(mode, round_ - 1)
                for name in list(self.rows[-1]):
                    if name.removeprefix("unseen_").startswith(f"{prefix}_"):
                        del self.rows[-1][name]

    def drop_clients(self, mode: str, round_: int) -> None:
        """Drop the per-client counts of one evaluation mode after `round_`; mode 'acted': the
        actions."""
        keep = [int(r) <= round_ for r in self.clients.get(f"{mode}_rounds", ())]
        for name, values in self.clients.items():
            if re.match(rf"{mode}_(?!count$|at_)", name):
                self.clients[name] = [v for v, k in zip(values, keep, strict=True) if k]

    def arrays(self) -> dict[str, np.ndarray]:
        return {k: v[0] if k.endswith("_count") else np.asarray(v) for k, v in self.clients.items()}
