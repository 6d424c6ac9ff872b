"""Figures of a run: plain numbers computed on the host from the program's logs and scores.
Accuracies are fractions in [0, 1].

Five places deal with results, one step each: `metrics` defines the sums over rows and the values
computed from them; `local.score` adds up for ONE predictor on given rows; `engine.evaluation`
decides which model is scored on whose rows (the modes); this module computes thresholds, bests over
rounds and summary.json; `report` draws them. No JAX.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedjax_sim.metrics.base import Metric, Primary, Sums, over_clients

if TYPE_CHECKING:
    from fedjax_sim.runner.prepare import Setup
    from fedjax_sim.runner.recorder import Recorder

Row = dict[str, float]  # of rounds.csv, metrics.csv or timings.csv
Summary = dict[str, Any]  # summary.json
# in every evaluated row
COUNTED = ["bytes_down", "bytes_up", "participants", "dropped", "diverged", "exploding"]
COUNTED += ["train_loss"]


def recent_shares(rounds: Sequence[Row], window: int = 10) -> dict[str, float]:
    """`share_NAME`: how often each action was taken in the last `window` rounds, from the counts
    `action_NAME`.

    >>> recent_shares([{"action_a": 2, "action_b": 0}, {"action_a": 1, "action_b": 1}])
    {'share_a': 0.75, 'share_b': 0.25}
    """
    names = [n for n in rounds[-1] if n.startswith("action_") and n != "action_entropy"]
    counts = {n: sum(r[n] for r in rounds[-window:]) for n in names}
    total = max(sum(counts.values()), 1)
    return {f"share_{n.removeprefix('action_')}": count / total for n, count in counts.items()}


DEAD_FOR, BLIND_FOR = 10, 25  # rounds
BLIND = 1e-3  # the share of π that depends on the state


def training_warnings(rounds: Sequence[Row]) -> list[str]:
    """Warnings about training that fails: exploding updates, a controller without live units, a
    policy that ignores the state.

    >>> training_warnings([{"round": t, "agent_live_policy": 0.0} for t in range(1, 11)])
    ['the controller has no live unit in its policy network: its answer is the same for every state;
    try a smaller agent.lr']
    """
    out = []
    if rounds[-1].get("exploding"):
        now = rounds[-1]
        out.append(
            f"an update exploded but is finite, so it is averaged in: client {now['exploding_id']}"
            f" in round {now['round']} ({now['exploding']} such updates), norm"
            f" {now['update_norm_max']:.2g} where the median of the round is"
            f" {now['update_norm']:.2g}; check its data, use --transform clip:NORM, or a smaller"
            " --lr"
        )
    for name, what in (("agent_live_policy", "policy network"), ("agent_live_critic", "critic")):
        last = [r.get(name, 1) for r in rounds[-DEAD_FOR:]]
        if len(last) == DEAD_FOR and max(last) == 0:
            out.append(
                f"the controller has no live unit in its {what}: its answer is the same for every"
                " state; try a smaller agent.lr"
            )
    last = [r.get("agent_sensitivity", 1) for r in rounds[-BLIND_FOR:]]
    if len(last) == BLIND_FOR and max(last) < BLIND:
        out.append(f"the controller's policy has not depended on the state for {BLIND_FOR} rounds")
    return out


def probe_figures(
    log: dict[str, np.ndarray],
    resident: Sums | None,
    metric: Metric,
    seen: Sequence[int] | None = None,
) -> dict[str, float]:
    """BP and AP: the primary metric before and after local training of the round's participants.

    Over the participants; with the `resident` evaluation (its sums [N]) also over all clients that
    can take part (`seen`; None: all N), the others with their resident nets: the same population as
    that of the `resident` figures, so the two can be compared.
    """
    rest = lambda prefix: {
        n.removeprefix(prefix): v for n, v in log.items() if n.startswith(prefix)
    }
    probed = {when: rest(f"probe_{when}_") for when in ("before", "after")}
    filled = log["probe_ids"] >= 0  # slots with a participant
    over = metric.over or ""
    out = {}
    for when, slots in probed.items():
        values = metric.values({k: v[filled] for k, v in slots.items()})
        out[f"{when}_{over}mean"] = float(values.mean()) if len(values) else math.nan
    if resident is not None:
        before = {k: np.array(v, np.float64) for k, v in resident.items()}
        real = filled & (probed["before"]["count"] > 0)
        for name, sums in before.items():
            sums[log["probe_ids"][real]] = probed["before"][name][real]
        ids = range(len(before["count"])) if seen is None else seen
        found = over_clients([metric], {metric.name: before}, ids)
        out |= {f"before_all_{over}{name}": found[f"{over}{name}"] for name in ("mean", "pooled")}
    return out


def last_value(rows: Sequence[Row], primary: Primary) -> tuple[str, float]:
    """(whose, the last value of the primary metric): of the global model, or the clients' mean;
    ('', NaN) for none.

    >>> last_value([{"global_acc": 0.25, "client_mean": 0.5}], Primary()), last_value(
    ...     [{"client_mean": 0.5}], Primary()
    ... )
    (('global', 0.25), ('client mean', 0.5))
    """
    for whose, column in zip(("global", "client mean"), primary.columns, strict=True):
        if rows and column in rows[-1]:
            return whose, rows[-1][column]
    return "", math.nan


def rounds_to(rounds: Sequence[int], values: Sequence[float], threshold: float) -> int | None:
    """First round with a value of at least `threshold`; None if never.

    >>> rounds_to([1, 2, 3], [0.1, 0.5, 0.4], 0.4)
    2
    """
    return next((r for r, v in zip(rounds, values, strict=True) if v >= threshold), None)


def convergence(
    times: Sequence[float], values: Sequence[float], window: int = 20, change: float = 0.002
) -> float | None:
    """First time after which the moving average over `window` values stays within `change` until
    the end.

    None if it never does; the last value alone does not count.
    """
    if len(values) <= window:
        return None
    smooth = np.convolve(values, np.ones(window) / window, "valid")
    # from each value to the end
    highest, lowest = (f.accumulate(smooth[::-1])[::-1] for f in (np.maximum, np.minimum))
    first = int(np.argmax(highest - lowest < change))
    return float(times[first + window - 1]) if first < len(smooth) - 1 else None


TARGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # accuracies whose first round is reported
WINDOW = 20  # rounds of the moving average that decides convergence


def seconds_at(round_: int, timings: Sequence[Row]) -> float:
    """Seconds (without compilation) until `round_` was done; the rounds of a segment count as
    equally long.

    >>> seconds_at(
    ...     3,
    ...     [
    ...         dict(first_round=1, last_round=2, seconds=4.0),
    ...         dict(first_round=3, last_round=6, seconds=2.0),
    ...     ],
    ... )
    4.5
    """
    share = lambda t: min(
        max((round_ - t["first_round"] + 1) / (t["last_round"] - t["first_round"] + 1), 0.0), 1.0
    )
    return float(sum(t["seconds"] * share(t) for t in timings))


def progress_figures(
    rows: Sequence[Row],
    timings: Sequence[Row],
    eval_every: int = 1,
    primary: Primary = Primary(),  # noqa: B008 - a constant
) -> dict[str, Any]:
    """When each accuracy of `TARGETS` was first reached, in rounds, GB (10^9 bytes, down and up)
    and minutes; convergence.

    Of the global model's primary metric, or of the clients' mean where there is no global model;
    targets only where it is a share of which more is better. None: never.
    """
    has = lambda row, column: not math.isnan(row.get(column, math.nan))
    column = next((c for c in primary.columns if any(has(r, c) for r in rows)), "")
    scored = [r for r in rows if has(r, column)]
    rounds, values = [int(r["round"]) for r in scored], [r[column] for r in scored]
    cost = {r["round"]: r["bytes_down"] + r["bytes_up"] for r in scored}
    targets = TARGETS if primary.unit == "percent" and primary.better > 0 else ()
    first = {f"{100 * x:.0f}": rounds_to(rounds, values, x) for x in targets}
    converged = convergence(rounds, values, max(2, round(WINDOW / eval_every)))
    return dict(
        targets_of=column or None,
        rounds_to=first,
        comm_gb_to={x: r and cost[r] / 1e9 for x, r in first.items()},
        time_min_to={x: r and seconds_at(r, timings) / 60 for x, r in first.items()},
        convergence_round=converged and int(converged),
        convergence_seconds=converged and seconds_at(int(converged), timings),
    )


def explosion_figures(rounds: Sequence[Row]) -> dict[str, Any]:
    """How many finite updates exploded (`engine.round.exploding_updates`), and the client with the
    largest one of each such round.

    >>> explosion_figures(
    ...     [
    ...         dict(round=1, exploding=0, exploding_id=-1),
    ...         dict(round=2, exploding=2, exploding_id=7),
    ...     ]
    ... )
    {'exploding': 2, 'exploding_first': {'round': 2, 'client': 7}, 'exploding_clients': [7],
    'exploding_rounds': [2]}
    """
    seen = [r for r in rounds if r.get("exploding")]
    first = dict(round=seen[0]["round"], client=seen[0]["exploding_id"]) if seen else None
    return dict(
        exploding=sum(r["exploding"] for r in seen),
        exploding_first=first,
        exploding_clients=sorted({r["exploding_id"] for r in seen}),
        exploding_rounds=[r["round"] for r in seen],
    )


def divergence_figures(rounds: Sequence[Row]) -> dict[str, Any]:
    """How many updates were not finite (they weigh nothing), their share, the first of them; rounds
    without any upload.

    >>> divergence_figures([dict(round=1, participants=4, dropped=1, diverged=3, diverged_id=2)])
    {'diverged': 3, 'diverged_share': 1.0, 'diverged_first': {'round': 1, 'client': 2},
    'rounds_without_upload': 1}
    """
    failed = sum(r["diverged"] for r in rounds)
    trained = sum(r["participants"] - r["dropped"] for r in rounds)
    seen = [r for r in rounds if r["diverged"]]
    first = dict(round=seen[0]["round"], client=seen[0].get("diverged_id", -1)) if seen else None
    sent = [r["participants"] - r["dropped"] - r["diverged"] for r in rounds]
    return dict(
        diverged=failed,
        diverged_share=failed / trained if trained else 0.0,
        diverged_first=first,
        rounds_without_upload=sum(number <= 0 for number in sent),
    )


def half_width(values: npt.ArrayLike) -> float:
    """Half the width of the 95 % confidence interval of the mean, by Student's t; NaN for fewer
    than two values.

    >>> round(half_width([1.0, 0.5, 1.5]), 3)
    1.242
    """
    from scipy.stats import sem, t  # slow to load

    values = np.asarray(values, float)
    return float(t.ppf(0.975, len(values) - 1) * sem(values)) if len(values) > 1 else math.nan


def relative_gain(ours: float, best: float) -> float:
    """(ours − best)/best in percent.

    >>> round(relative_gain(0.6, 0.5), 6)
    20.0
    """
    return 100 * (ours - best) / best


def summary_figures(rows: Sequence[Row], primary: Primary = Primary()) -> dict[str, Any]:  # noqa: B008
    """The figures that papers report: best over rounds on test, best by validation, last, mean of
    the last 10."""
    column, by = f"global_{primary.figure}", f"val_{primary.figure}"
    scored = [r for r in rows if not math.isnan(r.get(column, math.nan))]
    if not scored:
        names = ("best_global", "best_global_round", "best_by_val", "last_global", "mean_last10")
        return dict.fromkeys(names)
    rounds, values = [r["round"] for r in scored], [r[column] for r in scored]
    val = [r.get(by, math.nan) for r in scored]
    best = lambda scores: int(np.argmax(primary.better * np.array(scores)))
    return dict(
        best_global=values[best(values)],
        best_global_round=rounds[best(values)],
        best_by_val=values[best(val)] if not any(math.isnan(v) for v in val) else None,
        last_global=values[-1],
        mean_last10=float(np.mean(values[-10:])),
    )


# ---- summary.json --------------------------------------------------------------------------------
def peak_rss_mb() -> float:
    """Peak memory of this process since it started, earlier runs (compare, --seeds) included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def clean(value: Any) -> Any:
    """`value` with None for every number that is not finite, as JSON needs it.

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
    """A note on the figures over clients where these are scored on their training rows."""
    if setup.simulation.client_split != "train":
        return {}
    text = f"training {primary.label}: the clients have no validation or test rows"
    return {primary.of_clients("note"): text}


def scored_globally(setup: Setup) -> bool:
    """Whether the server's model was scored on the test set, so that it has a loss."""
    evaluated = "global" in setup.experiment.evaluation.evaluations
    tested = len(setup.fed.server_rows.get("test", ())) > 0
    return setup.simulation.method.has_global_model and evaluated and tested


def metric_figures(setup: Setup, recorder: Recorder) -> dict[str, Any]:
    """The last figures over clients of the primary metric, and the last value of every column of
    the others."""
    primary, about = Primary.read(setup.resolved), setup.resolved.get("metrics_about", {})
    last: dict[str, Any] = next((r for r in reversed(recorder.rows) if primary.columns[1] in r), {})
    names = ("mean", "pooled", "std", "worst10")
    over = {primary.of_clients(name): last.get(f"client_{primary.over}{name}") for name in names}
    ends = {name: row[name] for row in recorder.rows for name in about if row.get(name) is not None}
    return dict(**over, metrics={name: ends[name] for name in about if name in ends})


def summarise(
    setup: Setup, recorder: Recorder, timings: list[Row], compile_seconds: float
) -> dict[str, Any]:
    """The figures of a run. `best_global` is the best over rounds on test data: the papers' figure,
    not a fair one."""
    config = setup.experiment
    primary = Primary.read(setup.resolved)
    steady = timings[1:] or timings
    rounds = sum(t["last_round"] - t["first_round"] + 1 for t in steady)
    seconds = sum(t["seconds"] for t in steady) / max(rounds, 1)
    needed = sum(r["steps_needed"] for r in recorder.rounds)
    executed = sum(r["steps_executed"] for r in recorder.rounds)
    end = recorder.rows[-1] if recorder.rows else {}
    unseen = f"unseen_{primary.columns[1]}"
    out = dict(
        method=config.method.name,
        **summary_figures(recorder.rows, primary),
        **progress_figures(recorder.rows, timings, config.evaluation.eval_every, primary),
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
        **divergence_figures(recorder.rounds),
        **explosion_figures(recorder.rounds),
        final_loss_finite=not scored_globally(setup)
        or math.isfinite(end.get("global_loss", math.nan)),
        peak_rss_mb=peak_rss_mb(),
        peak_rss_note="of the process since it started",
        seed=config.training.seed,
        data_seed=config.data.data_seed,
        config_hash=setup.hash,
        dataset=config.data.dataset,
        partition=config.data.partition,
        model=setup.simulation.env.model.name,
        **({unseen: end[unseen]} if end.get(unseen) is not None else {}),
        **setup.resolved,
    )
    return clean(out)
