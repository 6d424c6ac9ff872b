"""The host's part of a run: segments of about ten seconds, a progress bar, a run directory, exact resume.

out/config.json    everything needed to repeat the run          out/rounds.csv     a row per round
out/metrics.csv    a row per evaluated round, no clock          out/clients.npz    per-client counts per evaluation
out/timings.csv    seconds per segment                          out/checkpoints/   the whole State
out/summary.json   the figures of the run
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.engine import host_rows
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.loop_backend import LoopBackend
from fedjax_sim.errors import UserError
from fedjax_sim.runner import checkpoint, figures
from fedjax_sim.runner.config import Config
from fedjax_sim.runner.directory import RunDirectory
from fedjax_sim.runner.files import write_json
from fedjax_sim.runner.prepare import Setup, prepare
from fedjax_sim.runner.recorder import Recorder
from fedjax_sim.types import State

SEGMENT_SECONDS = 10.0
CHECKPOINT_SECONDS = 60.0


@dataclasses.dataclass
class Result:
    """What a run leaves: evaluated rows, per-round rows, per-client counts, the summary, the final State."""

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    clients: dict[str, np.ndarray]
    state: State
    setup: Setup
    out: pathlib.Path | None = None
    program: Callable | None = None  # the compiled rounds, for further seeds of the same set-up


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(
    method: Any = "fedavg",
    fed: Any = None,
    *,
    out: str | pathlib.Path | None = None,
    progress: bool = False,
    model: Any = None,
    net: Any = None,
    **options: Any,
) -> Result:
    """Run one method and return its Result; the Python form of `fedjax-sim run`.

    >>> result = run("fedavg", model="mlp", clients=4, participation="1", rounds=2, epochs=1)    # digits
    >>> [row["round"] for row in result.rows]
    [1, 2]
    """
    own = not isinstance(method, str)
    if isinstance(model, str):
        options, model = {**options, "model": model}, None
    config = Config(method=method.name if own else method, **options)
    setup = prepare(config, fed=fed, model=model, net=net, method=method if own else None)
    return execute(setup, RunDirectory(pathlib.Path(out)) if out is not None else None, progress=progress)


def resume(
    path: str | pathlib.Path,
    rounds: int | None = None,
    *,
    progress: bool = False,
    fed: Any = None,
    data_dir: str | None = None,
) -> Result:
    """Continue a run directory from its newest checkpoint; `rounds` may extend it."""
    directory = RunDirectory(pathlib.Path(path))
    if not directory.path.is_dir():
        raise UserError(f"there is no run directory '{path}'")
    config, resolved, _ = directory.read_config()
    folder = directory.path / "checkpoints"
    found = checkpoint.latest(folder)
    start = checkpoint.read_meta(found)["round"]
    total = config.rounds if rounds is None else rounds
    if total < start:
        raise UserError(f"rounds {total} is less than the {start} rounds already done in '{path}'")
    config = dataclasses.replace(
        config,
        rounds=total,
        chunk=str(resolved.get("chunk", config.chunk)),
        devices=str(resolved.get("devices", config.devices)),
        data_dir=data_dir or config.data_dir,
    )
    setup = prepare(config, fed=fed)
    return execute(setup, directory, progress=progress, start_from=found)


def execute(
    setup: Setup,
    directory: RunDirectory | None,
    *,
    progress: bool = False,
    start_from: pathlib.Path | None = None,
    say: Callable[[str], None] | None = None,
    program: Callable | None = None,
) -> Result:
    """Drive a prepared run to its end. program: compiled rounds of an earlier run of the same simulation."""
    config, sim = setup.config, setup.simulation
    say = say or (lambda text: print(text, file=sys.stderr))
    recorder = Recorder(setup)
    timings: list[dict[str, Any]] = []
    writes = jax.process_index() == 0
    if directory is not None and writes and start_from is None:
        directory.create(config, setup.resolved)
    state = sim.init(config.seed, setup.net)
    if start_from is not None and directory is not None:
        state = checkpoint.load(start_from, state, config.hash())
        timings = directory.read(recorder, int(state.t))
        if int(state.t) < config.rounds:
            recorder.reopen(int(state.t))
        if writes:
            directory.write_config(config, setup.resolved)
    on_host = config.state_on == "host"
    state, data = (host_rows.place if on_host else layouts.place)(sim.layout, state, sim.data)

    began = time.perf_counter()
    if program is not None:
        step = program
    elif config.backend == "loop":
        step = LoopBackend(sim).run
    elif on_host:
        step = sim.run  # compiles in its first round
    else:
        step = sim.run.lower(state, data, jnp.int32(1)).compile()  # type: ignore[attr-defined]
    compile_seconds = time.perf_counter() - began
    done, speed, saved_at, saved_round = int(state.t), None, time.perf_counter(), int(state.t)
    bar = None
    if progress and writes:
        from tqdm import tqdm

        bar = tqdm(total=config.rounds, initial=done, unit="round", desc=config.method, file=sys.stderr)
    busy, fresh = 0.0, 0
    try:
        while done < config.rounds:
            ask = segment_length(config, sim.capacity, done, speed)
            began = time.perf_counter()
            state, logs, scores = step(state, data, jnp.int32(ask))
            jax.block_until_ready(state)
            seconds = time.perf_counter() - began
            if fresh or ask == config.rounds:  # the first segment of a longer run warms caches
                busy, fresh = busy + seconds, fresh + ask
            else:
                fresh, busy = ask, seconds
            speed = agreed(seconds / ask)
            timings.append(dict(first_round=done + 1, last_round=done + ask, seconds=seconds, seconds_per_round=speed))
            collect(recorder, setup, state, data, layouts.as_numpy(logs), layouts.as_numpy(scores), done, ask)
            done += ask
            if bar is not None:
                bar.update(ask)
                if recorder.rows:
                    shown = recorder.rows[-1].get("global_acc", recorder.rows[-1].get("client_mean", math.nan))
                    bar.set_postfix(acc=f"{100 * shown:.2f}%")
            if directory is not None:
                if writes:  # before the checkpoint: what is resumed from must find its rows
                    directory.write(recorder, timings)
                due = (
                    done - saved_round >= config.checkpoint_every
                    if config.checkpoint_every
                    else agreed(time.perf_counter() - saved_at) > CHECKPOINT_SECONDS
                )
                if due or done >= config.rounds:
                    checkpoint.save(directory.path / "checkpoints", state, config.hash(), config.keep)
                    saved_at, saved_round = time.perf_counter(), done
    except KeyboardInterrupt:
        if directory is not None:
            say(
                f"interrupted after round {done}; continue with: fedjax-sim resume {directory.path}"
                if saved_round
                else f"interrupted after round {done}, before the first checkpoint"
            )
        raise
    finally:
        if bar is not None:
            bar.close()
    summary = summarise(setup, recorder, timings, compile_seconds)
    if directory is not None and writes:
        directory.write(recorder, timings)
        write_json(directory.path / "summary.json", summary)
    return Result(
        summary, recorder.rows, recorder.rounds, recorder.arrays(), state, setup, directory.path if directory else None, step
    )


def agreed(value: float) -> float:
    """What process 0 says: decisions that depend on a clock must be the same in every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


def segment_length(config: Config, capacity: int, done: int, speed: float | None) -> int:
    """Rounds of the next call: about ten seconds, ending on the evaluation and checkpoint grids where they are near."""
    every = config.eval_every
    longest = capacity * every - done % every
    wish = every if speed is None else max(1, int(SEGMENT_SECONDS / max(speed, 1e-9)))
    ask = min(wish, longest, config.rounds - done)
    if done + ask < config.rounds and ask >= every:
        ask -= (done + ask) % every  # end on the grid
    for grid in (config.checkpoint_every, config.personal_every):
        if grid:
            ask = min(ask, grid - done % grid)  # never run past a checkpoint or a personal evaluation
    return max(1, ask)


def collect(
    recorder: Recorder, setup: Setup, state: State, data: Any, logs: dict, scores: dict, done: int, count: int
) -> None:
    """Rows of one segment; evaluations off the grid (a segment cut short) are only kept at the end of the run."""
    config, sim = setup.config, setup.simulation
    recorder.add_rounds(logs, count)
    adapts = sim.method.adapts and "personal" in config.evaluations
    for i in range(len(scores["round"])):
        at = int(scores["round"][i])
        if not done < at <= done + count:
            continue
        last = at == config.rounds
        personal_due = adapts and (last or (config.personal_every and at % config.personal_every == 0))
        if at % config.eval_every and not last and not personal_due:
            continue
        score = jax.tree.map(lambda a: a[i], scores)
        if personal_due and at == done + count:
            score |= layouts.as_numpy(sim.adapt(state, data))
        recorder.add_evaluation(score, {k: v[at - done - 1] for k, v in logs.items()})


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
