"""summary.json: the figures of a whole run."""

from __future__ import annotations

import math
import resource
from typing import Any

from fedjax_sim.runner import figures
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.recorder import Recorder


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def summarise(setup: Setup, recorder: Recorder, timings: list[dict[str, Any]], compile_seconds: float) -> dict[str, Any]:
    """The figures of a run. `best_global` is the best over rounds on test data: the papers' figure, not a fair one."""
    config = setup.config
    clean = lambda v: None if isinstance(v, float) and math.isnan(v) else v
    last: dict[str, Any] = next((r for r in reversed(recorder.rows) if "client_mean" in r), {})
    steady = timings[1:] or timings
    rounds = sum(t["last_round"] - t["first_round"] + 1 for t in steady)
    seconds = sum(t["seconds"] for t in steady) / max(rounds, 1)
    needed = sum(r["steps_needed"] for r in recorder.rounds)
    executed = sum(r["steps_executed"] for r in recorder.rounds)
    end = recorder.rows[-1] if recorder.rows else {}
    out = dict(
        method=config.method,
        **figures.summary_figures(recorder.rows),
        best_global_note="best over rounds on test data, as the papers report it",
        client_acc_mean=last.get("client_mean"),
        client_acc_pooled=last.get("client_pooled"),
        client_acc_std=last.get("client_std"),
        client_acc_worst10=last.get("client_worst10"),
        client_split=setup.simulation.client_split,
        rounds=recorder.rounds[-1]["round"] if recorder.rounds else 0,
        seconds_per_round=seconds,
        rounds_per_second=1 / seconds if seconds else None,
        compile_seconds=compile_seconds,
        steps_needed=needed,
        steps_executed=executed,
        padding_waste=executed / needed if needed else None,
        bytes_down=end.get("bytes_down", 0),
        bytes_up=end.get("bytes_up", 0),
        dropped=sum(r["dropped"] for r in recorder.rounds),
        diverged=sum(r["diverged"] for r in recorder.rounds),
        peak_rss_mb=peak_rss_mb(),
        seed=config.seed,
        data_seed=config.data_seed,
        config_hash=config.hash(),
        dataset=config.dataset,
        partition=config.partition,
        model=setup.simulation.env.model.name,
        **{f"unseen_{k}": v for k, v in (("client_mean", end.get("unseen_client_mean")),) if v is not None},
        **setup.resolved,
    )
    return {k: clean(v) for k, v in out.items()}
