"""summary.json: the figures of a whole run."""

from __future__ import annotations

import math
import resource
from typing import Any

from fedjax_sim.metrics.base import Primary
from fedjax_sim.runner import figures
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.recorder import Recorder


def peak_rss_mb() -> float:
    """Of this process since it started: runs before this one (compare, --seeds) are in it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def clean(value: Any) -> Any:
    """What is not a finite number is null in the file.

    >>> clean({"a": math.nan, "b": {"c": math.inf}, "d": 1})
    {'a': None, 'b': {'c': None}, 'd': 1}
    """
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def layer_distances(setup: Setup, recorder: Recorder) -> dict[str, float] | None:
    """Mean distance of the participants' models to the server's in the last round, by parameter
    group, where logged."""
    groups, last = setup.simulation.env.model.groups, recorder.rounds[-1] if recorder.rounds else {}
    if f"layer_dist_{groups[0]}" not in last:
        return None
    return {name: last[f"layer_dist_{name}"] for name in groups}


def training_note(setup: Setup, primary: Primary) -> dict[str, str]:
    """What the figures over clients are worth where nothing was kept apart."""
    if setup.simulation.client_split != "train":
        return {}
    return {
        primary.of_clients(
            "note"
        ): f"training {primary.label}: the clients have no validation or test rows"
    }


def scored_globally(setup: Setup) -> bool:
    """Whether the server's model was scored on the test set: then there is a loss, finite or
    not."""
    asked = setup.simulation.method.has_global_model and "global" in setup.config.evaluations
    return asked and len(setup.fed.server_rows.get("test", ())) > 0


def metric_figures(setup: Setup, recorder: Recorder) -> dict[str, Any]:
    """The last figures over clients of the primary metric, and the last value of every column of
    the others."""
    primary, about = Primary.read(setup.resolved), setup.resolved.get("metrics_about", {})
    last: dict[str, Any] = next((r for r in reversed(recorder.rows) if primary.columns[1] in r), {})
    over = {
        name: last.get(f"client_{primary.over}{name}")
        for name in ("mean", "pooled", "std", "worst10")
    }
    others = {
        name: next((r[name] for r in reversed(recorder.rows) if name in r), None) for name in about
    }
    return dict(
        **{primary.of_clients(name): value for name, value in over.items()},
        metrics={name: value for name, value in others.items() if value is not None},
    )


def summarise(
    setup: Setup, recorder: Recorder, timings: list[dict[str, Any]], compile_seconds: float
) -> dict[str, Any]:
    """The figures of a run. `best_global` is the best over rounds on test data: the papers' figure,
    not a fair one."""
    config = setup.config
    primary = Primary.read(setup.resolved)
    steady = timings[1:] or timings
    rounds = sum(t["last_round"] - t["first_round"] + 1 for t in steady)
    seconds = sum(t["seconds"] for t in steady) / max(rounds, 1)
    needed = sum(r["steps_needed"] for r in recorder.rounds)
    executed = sum(r["steps_executed"] for r in recorder.rounds)
    end = recorder.rows[-1] if recorder.rows else {}
    out = dict(
        method=config.method,
        **figures.summary_figures(recorder.rows, primary),
        **figures.progress_figures(recorder.rows, timings, config.eval_every, primary),
        best_global_note="best over rounds on test data, as the papers report it",
        client_split=setup.simulation.client_split,
        **training_note(setup, primary),
        **metric_figures(setup, recorder),
        layer_dist=layer_distances(setup, recorder),
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
        **figures.divergence_figures(recorder.rounds),
        **figures.explosion_figures(recorder.rounds),
        final_loss_finite=not scored_globally(setup)
        or math.isfinite(end.get("global_loss", math.nan)),
        peak_rss_mb=peak_rss_mb(),
        peak_rss_note="of the process since it started",
        seed=config.seed,
        data_seed=config.data_seed,
        config_hash=config.hash(),
        dataset=config.dataset,
        partition=config.partition,
        model=setup.simulation.env.model.name,
        **{
            k: v
            for k, v in ((k, end.get(k)) for k in (f"unseen_{primary.columns[1]}",))
            if v is not None
        },
        **setup.resolved,
    )
    return clean(out)
