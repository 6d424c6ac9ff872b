"""The one loop that drives runs: segments of about ten seconds, rows, files, checkpoints,
summaries.

It drives one lane, or several: seeds or values of one set-up side by side under `vmap`, in one
program (`vmapped`). Each lane has its own recorder and its own directory, written as the run goes
on, so a lane is resumed alone like any other run.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.engine import host_rows
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.evaluation import adapted_modes
from fedjax_sim.engine.loop_backend import LoopBackend
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.platform import floats
from fedjax_sim.runner import checkpoint, interrupts, manifest, vmapped
from fedjax_sim.runner.directory import RunDirectory
from fedjax_sim.runner.files import as_stored
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.programs import compile_once
from fedjax_sim.runner.progress import progress_sinks
from fedjax_sim.runner.recorder import Recorder
from fedjax_sim.runner.result import Result
from fedjax_sim.runner.sinks import Files, Segment, Sink
from fedjax_sim.runner.summary import summarise
from fedjax_sim.types import State

SEGMENT_SECONDS = 10.0
FIRST_ROUNDS = 5  # of the first call, at most
CHECKPOINT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Lane:
    """One run among those driven together."""

    setup: Setup
    directory: RunDirectory | None
    recorder: Recorder


def drive(
    setups: Sequence[Setup],
    directories: Sequence[RunDirectory | None],
    *,
    progress: bool | None = False,
    sinks: Sequence[Sink] = (),
    resume_from: pathlib.Path | None = None,
    say: Callable[[str], None] | None = None,
    program: Callable | None = None,
    again: str = "",
) -> list[Result]:
    """Drive prepared runs that share one simulation to their end.

    sinks: who else is told of every segment; progress: a bar or lines among them, None: a line only
    where compiling takes long. resume_from: the checkpoint from which a single lane goes on.
    program: compiled rounds of an earlier run of the same simulation, for a single lane. again:
    what goes on with all that was asked for, of which these runs are a part; said after an
    interrupt.
    """
    vmapped.check(setups)
    lanes = [Lane(s, d, Recorder(s)) for s, d in zip(setups, directories, strict=True)]
    say = say or (lambda text: print(text, file=sys.stderr))
    told = [Files(), *progress_sinks(progress), *sinks] if writes() else []
    try:
        with interrupts.guard(), floats(setups[0].experiment.compute.dtype):
            return _drive(lanes, told, resume_from, say, program, again)
    finally:
        for sink in told:
            sink.close()
        for lane in lanes:
            if lane.directory is not None:
                lane.directory.lock.release()


def _drive(
    lanes: Sequence[Lane],
    sinks: Sequence[Sink],
    resume_from: pathlib.Path | None,
    say: Callable[[str], None],
    program: Callable | None,
    again: str,
) -> list[Result]:
    config, sim = lanes[0].setup.experiment, lanes[0].setup.simulation
    state, timings = begin(lanes, resume_from, say)
    data = vmapped.stack_data([lane.setup.simulation.data for lane in lanes])
    state, data = (host_rows.place if config.compute.state_on == "host" else layouts.place)(
        sim.layout, state, data
    )
    done = int(np.asarray(state.t).max())
    speed, saved_at, saved_round = (
        None,
        time.perf_counter(),
        done if resume_from is not None else -1,
    )
    axes = vmapped.state_axes([lane.setup for lane in lanes])
    of_state = lambda state, i: vmapped.pick_state(axes, state, i)
    tell(sinks, lanes, lambda sink, lane: sink.begin(lane, done))
    stopped, adapt = (
        False,
        None,
    )  # by a signal, and all processes know; the evaluation that fine-tunes
    try:
        began, step = time.perf_counter(), program
        if step is None and done < config.training.rounds:
            tell(sinks, lanes, lambda sink, lane: sink.compiling(lane))
            tick = lambda seconds: tell(
                sinks, lanes[:1], lambda sink, lane: sink.waiting(lane, seconds)
            )
            step = compiled([lane.setup for lane in lanes], state, data, tick)
            tell(sinks, lanes, lambda sink, lane: sink.compiled(lane, time.perf_counter() - began))
        compile_seconds = time.perf_counter() - began
        while step is not None and done < config.training.rounds:
            if stopped := asked_to_stop():
                interrupts.check()
                raise KeyboardInterrupt  # another process was asked
            ask = min(segment_length(config, sim.capacity, done, speed), sim.most_rounds)
            if adapt is None and adapts_after(
                sim, config, done + ask
            ):  # before the segment: what is done can be saved
                adapt = compiled_alone(sim.adapt, of_state(state, 0), data_of(lanes[0], data))
            began = time.perf_counter()
            state, logs, scores = step(state, data, jnp.int32(ask), evaluated(config, done + ask))
            jax.block_until_ready(state)
            seconds = time.perf_counter() - began
            speed = agreed(seconds / ask)
            timings.append(
                dict(
                    first_round=done + 1,
                    last_round=done + ask,
                    seconds=seconds,
                    seconds_per_round=speed,
                )
            )
            collect_all(
                lanes, of_state, state, data, adapt, layouts.as_numpy((logs, scores)), done, ask
            )
            done += ask
            # before the checkpoint: it keeps a copy of the files
            part = lambda lane: segment_of(lane, done - ask + 1, done, seconds)
            tell(sinks, lanes, lambda sink, lane: sink.segment(lane, part(lane), timings))
            if save_due(config, done, saved_round, saved_at) or done >= config.training.rounds:
                save(lanes, state, of_state)
                saved_at, saved_round = time.perf_counter(), done
    except (KeyboardInterrupt, SystemExit):
        needed = done > 0 or any(
            lane.setup.given_net and not lane.setup.experiment.model.init for lane in lanes
        )
        if (
            needed
            and saved_round != done
            and (stopped or jax.process_count() == 1)
            and complete(state, done)
        ):
            tell(
                [s for s in sinks if isinstance(s, Files)],
                lanes,
                lambda sink, lane: sink.write(lane, timings),
            )
            save(lanes, state, of_state)
            saved_round = done
        if writes():
            interrupted(lanes, done, saved_round, say, again)
        raise
    results = [
        finish(lane, of_state(state, i), timings, compile_seconds, step)
        for i, lane in enumerate(lanes)
    ]
    for lane, result in zip(lanes, results, strict=True):
        tell(sinks, [lane], lambda sink, lane: sink.end(lane, result.summary))
    return results


def asked_to_stop() -> bool:
    """Whether a signal waits in any process."""
    asked = interrupts.pending() is not None
    if jax.process_count() == 1:
        return asked
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.bool_(asked))))


def complete(state: State, done: int) -> bool:
    """Whether `state` is what round `done` left, and still there: a call that was broken off has
    used it up."""
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        return False
    return int(np.asarray(state.t).max()) == done


# ---- the start -----------------------------------------------------------------------------------
def begin(
    lanes: Sequence[Lane], resume_from: pathlib.Path | None, say: Callable[[str], None]
) -> tuple[State, list[dict[str, Any]]]:
    """The State to start from (stacked for several lanes) and the timings so far; run directories
    are made or reopened."""
    if resume_from is not None:
        (lane,) = lanes
        return reopen(lane, resume_from, say)
    for lane in lanes:
        if lane.directory is not None and writes():
            lane.directory.check_free(lane.setup.hash)
    states = [lane.setup.first_state() for lane in lanes]
    for lane in lanes:
        if lane.directory is not None and writes():
            lane.directory.create(lane.setup, say)
            lane.directory.write_labels(lane.setup.fed.label_counts())
    return vmapped.stack_states([lane.setup for lane in lanes], states), []


def reopen(
    lane: Lane, resume_from: pathlib.Path, say: Callable[[str], None]
) -> tuple[State, list[dict[str, Any]]]:
    """A run goes on: its State and its rows as they were at the checkpoint."""
    setup, directory = lane.setup, lane.directory
    assert directory is not None
    if writes():
        directory.open()
    files = checkpoint.read_files(resume_from)
    state = setup.simulation.init(setup.experiment.training.seed, setup.net)
    state = checkpoint.load(resume_from, state, setup.hash, setup.fed.num_clients)
    round_ = int(state.t)
    if resume_from.name != f"{round_:08d}":
        raise UserError(
            f"checkpoint '{resume_from}' is of round {round_}; restore its name to resume"
        )
    timings = directory.read(lane.recorder, files, round_)
    if round_ == setup.experiment.training.rounds:
        directory.read_end(round_)
    if writes():
        changed = manifest.changed(directory.path)
        if changed:
            say(
                f"{', '.join(changed)} in '{directory.path}' were changed, or cut short by a kill;"
                f" written anew from the checkpoint of round {round_}"
            )
        directory.write_config(setup)
        directory.write_labels(setup.fed.label_counts())
        directory.write(lane.recorder, timings)
    if round_ < setup.experiment.training.rounds:
        lane.recorder.reopen(round_)
    return state, timings


def compiled(
    setups: Sequence[Setup],
    state: State,
    data: Any,
    tick: Callable[[float], None] = lambda seconds: None,
) -> Callable:
    """(state, data, rounds, ends) -> (state, logs, scores), ready to be called. tick: hears how
    long it takes."""
    config, run = setups[0].experiment, setups[0].simulation.run
    if len(setups) > 1:
        run = vmapped.side_by_side(setups, run)
    elif config.compute.backend == "loop":
        return first_aside(LoopBackend(setups[0].simulation).run)
    elif config.compute.state_on == "host":
        return first_aside(run)
    return compiled_alone(run, state, data, jnp.int32(1), np.bool_(True), tick=tick)


def compiled_alone(
    function: Callable, *args: Any, tick: Callable[[float], None] = lambda seconds: None
) -> Callable:
    """A jitted function, ready to be called; tracing and compiling it may be broken off by a
    signal."""
    if not hasattr(function, "lower"):
        return function  # of rows on the host: compiles when it is called
    with interrupts.at_once():
        lowered = function.lower(*args)
    return compile_once(lowered, tick)


def first_aside(run: Callable) -> Callable:
    """`run`, which compiles in its first call."""
    calls = iter((interrupts.aside,))

    def called(*args: Any) -> Any:
        return next(calls, lambda call: call())(lambda: run(*args))

    return called


def data_of(lane: Lane, data: Any) -> Any:
    return data._replace(numbers=lane.setup.simulation.data.numbers)


# ---- one segment ---------------------------------------------------------------------------------
def segment_length(config: Experiment, capacity: int, done: int, speed: float | None) -> int:
    """Rounds of the next call: about ten seconds, ending on the evaluation and checkpoint grids
    where they are near."""
    every = config.evaluation.eval_every
    longest = capacity * every - done % every
    # the first call tells how fast it goes: with rare evaluations it must not be all rounds up to
    # the first of them
    wish = (
        min(every, FIRST_ROUNDS)
        if speed is None
        else max(1, int(SEGMENT_SECONDS / max(speed, 1e-9)))
    )
    ask = min(wish, longest, config.training.rounds - done)
    if done + ask < config.training.rounds and ask >= every:
        ask -= (done + ask) % every  # end on the grid
    for grid in (config.compute.checkpoint_every, config.evaluation.personal_every):
        if grid:
            ask = min(
                ask, grid - done % grid
            )  # never run past a checkpoint or a personal evaluation
    return max(1, ask)


def evaluated(config: Experiment, done: int) -> np.bool_:
    """Whether a segment that ends after round `done`, perhaps off the evaluation grid, needs an
    evaluation there."""
    return np.bool_(
        done == config.training.rounds
        or bool(config.evaluation.personal_every and done % config.evaluation.personal_every == 0)
    )


def save_due(config: Experiment, done: int, saved_round: int, saved_at: float) -> bool:
    """Whether it is time for a checkpoint: after so many rounds, or after some time; all processes
    agree."""
    if config.compute.checkpoint_every:
        return done - max(saved_round, 0) >= config.compute.checkpoint_every
    return agreed(time.perf_counter() - saved_at) > CHECKPOINT_SECONDS


def collect_all(
    lanes: Sequence[Lane],
    of_state: Callable,
    state: State,
    data: Any,
    adapt: Callable | None,
    told: tuple[dict, dict],
    done: int,
    count: int,
) -> None:
    """`collect` for every lane; told: logs and scores of all of them."""
    for i, lane in enumerate(lanes):
        logs, scores = (vmapped.pick(tree, i, len(lanes)) for tree in told)
        tuned = lambda i=i, lane=lane: (
            adapt(of_state(state, i), data_of(lane, data)) if adapt is not None else {}
        )
        collect(lane, tuned, logs, scores, done, count)


def adapts_after(sim: Any, config: Experiment, at: int) -> bool:
    """Whether clients fine-tune for their evaluation after round `at`."""
    if not adapted_modes(sim.method, config.evaluation.evaluations):
        return False
    return at == config.training.rounds or bool(
        config.evaluation.personal_every and at % config.evaluation.personal_every == 0
    )


def collect(
    lane: Lane, tuned: Callable[[], dict], logs: dict, scores: dict, done: int, count: int
) -> None:
    """Rows of one segment; off the grid only the evaluations that `evaluated` asked for are there.

    tuned: () -> the evaluation for which the lane's clients fine-tune.
    """
    config, sim = lane.setup.experiment, lane.setup.simulation
    lane.recorder.add_rounds(logs, count)
    for i in range(len(scores["round"])):
        at = int(scores["round"][i])
        if not done < at <= done + count:
            continue
        personal_due = adapts_after(sim, config, at)
        if at % config.evaluation.eval_every and at != config.training.rounds and not personal_due:
            continue
        score = jax.tree.map(lambda a: a[i], scores)
        if personal_due and at == done + count:
            score |= layouts.as_numpy(tuned())
        lane.recorder.add_evaluation(score, {k: v[at - done - 1] for k, v in logs.items()})


def agreed(value: float) -> float:
    """What process 0 says: decisions that depend on a clock must be the same in every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


# ---- what is left behind -------------------------------------------------------------------------
def writes() -> bool:
    """Of several processes only the first writes and speaks."""
    return jax.process_index() == 0


def tell(sinks: Sequence[Any], lanes: Sequence[Lane], what: Callable[[Any, Lane], None]) -> None:
    for sink in sinks:
        for lane in lanes:
            what(sink, lane)


def segment_of(lane: Lane, first: int, last: int, seconds: float) -> Segment:
    config, recorder = lane.setup.experiment, lane.recorder
    recent = lambda rows: [row for row in rows[-(last - first + 1) :] if row["round"] >= first]
    rounds, rows = recent(recorder.rounds), recent(recorder.rows)
    return Segment(
        first,
        last,
        config.training.rounds,
        seconds,
        rounds,
        rows,
        config.method.name,
        config.training.seed,
    )


def save(lanes: Sequence[Lane], state: State, of_state: Callable[[State, int], State]) -> None:
    """A checkpoint of every lane; every process takes part."""
    for i, lane in enumerate(lanes):
        if lane.directory is not None:
            config = lane.setup.experiment
            folder, one, rows = (
                lane.directory.path / "checkpoints",
                of_state(state, i),
                lane.directory.rows,
            )
            checkpoint.save(folder, one, lane.setup.hash, config.compute.keep, rows)


def finish(
    lane: Lane,
    state: State,
    timings: list[dict[str, Any]],
    compile_seconds: float,
    program: Callable | None,
) -> Result:
    recorder, directory = lane.recorder, lane.directory
    told = copy.copy(
        recorder
    )  # as the files have it: a resumed run knows no more digits, and gets the same figures
    told.rows, told.rounds = (
        [as_stored(row) for row in rows] for rows in (recorder.rows, recorder.rounds)
    )
    kept = (
        directory.ended if directory is not None else None
    )  # nothing was left to do: not even the clock has moved
    summary = kept or summarise(
        lane.setup, told, [as_stored(row) for row in timings], compile_seconds
    )
    if directory is not None and writes():
        directory.write_summary(summary)
    out = directory.path if directory else None
    return Result(
        summary, recorder.rows, recorder.rounds, recorder.arrays(), state, lane.setup, out, program
    )


def interrupted(
    lanes: Sequence[Lane], done: int, saved_round: int, say: Callable[[str], None], again: str
) -> None:
    """Say what is saved, and how to go on."""
    paths = [str(lane.directory.path) for lane in lanes if lane.directory is not None]
    if not paths:
        return
    saved = f"saved at round {saved_round}" if saved_round >= 0 else "nothing had to be saved"
    when = f"after round {done}" if done else "before the first round was done"
    commands = again or "; ".join(shlex.join(["fedjax-sim", "resume", path]) for path in paths)
    say(f"interrupted {when}, {saved}; continue with: {commands}")
