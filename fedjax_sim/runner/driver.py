"""The one loop that drives runs: segments of about ten seconds, rows, files, checkpoints,
summaries.

It drives one run, or several: seeds or values of one set-up side by side under `vmap`, in one
program. Each has its own recorder and its own directory, written as the run goes on, so each is
resumed alone like any other run.
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

from fedjax_sim.engine import host_clients
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.evaluation import adapted_modes
from fedjax_sim.engine.loop_backend import LoopBackend
from fedjax_sim.engine.records import Data
from fedjax_sim.engine.simulation import Simulation
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.platform import floats
from fedjax_sim.runner import checkpoint, interrupts, run_directory, vmapped
from fedjax_sim.runner.compilation import compile_once
from fedjax_sim.runner.figures import summarise
from fedjax_sim.runner.files import as_stored
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.recorder import Recorder
from fedjax_sim.runner.result import Result
from fedjax_sim.runner.run_directory import RunDirectory
from fedjax_sim.runner.sinks import Files, Segment, Sink, progress_sinks
from fedjax_sim.types import State

SEGMENT_SECONDS = 10.0
FIRST_ROUNDS = 5  # of the first call, at most
CHECKPOINT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class ActiveRun:
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

    sinks: who else hears of every segment; progress: a bar or lines among them, None: a line only
    where compiling takes long. resume_from: the checkpoint of a single run that is resumed.
    program: compiled rounds of an earlier run of the same simulation, for a single run. again: the
    command that resumes everything these runs are a part of; shown after an interrupt.
    """
    vmapped.check(setups)
    runs = [ActiveRun(s, d, Recorder(s)) for s, d in zip(setups, directories, strict=True)]
    say = say or (lambda text: print(text, file=sys.stderr))
    listening = [Files(), *progress_sinks(progress), *sinks] if writes() else []
    try:
        with interrupts.guard(), floats(setups[0].experiment.compute.dtype):
            return Driver(runs, listening, resume_from, say).run(program, again)
    finally:
        for sink in listening:
            sink.close()
        for run in runs:
            if run.directory is not None:
                run.directory.lock.release()


class Driver:
    """Runs that are driven together: their State, how far they are, and what of it is saved."""

    def __init__(
        self,
        runs: Sequence[ActiveRun],
        sinks: Sequence[Sink],
        resume_from: pathlib.Path | None,
        say: Callable[[str], None],
    ):
        self.runs, self.sinks, self.say = runs, sinks, say
        self.setups = [run.setup for run in runs]
        self.experiment, self.sim = self.setups[0].experiment, self.setups[0].simulation
        self.state, self.timings = begin(runs, resume_from, say)
        data = vmapped.stack_data([setup.simulation.data for setup in self.setups])
        place: Callable = (
            host_clients.place if self.experiment.compute.state_on == "host" else layouts.place
        )
        self.state, self.data = place(self.sim.layout, self.state, data)
        self.axes = vmapped.state_axes(self.setups)
        self.done = int(np.asarray(self.state.t).max())
        self.saved_round = self.done if resume_from is not None else -1
        self.saved_at = time.perf_counter()
        self.speed: float | None = None  # seconds per round
        self.adapt: Callable | None = None  # the evaluation that fine-tunes
        self.stopped = False  # by a signal, and all processes know

    def run(self, program: Callable | None, again: str) -> list[Result]:
        """All rounds that are left; what is done is saved when a signal ends it."""
        self.tell(lambda sink, run: sink.begin(run, self.done))
        try:
            began = time.perf_counter()
            step = program or self.compile()
            compile_seconds = time.perf_counter() - began
            while step is not None and self.done < self.experiment.training.rounds:
                self.segment(step)
                if self.done >= self.experiment.training.rounds or save_due(
                    self.experiment, self.done, self.saved_round, self.saved_at
                ):
                    self.save()
        except (KeyboardInterrupt, SystemExit):
            self.save_unsaved()
            if writes():
                interrupted(self.runs, self.done, self.saved_round, self.say, again)
            raise
        results = [
            finish(run, self.state_of(i), self.timings, compile_seconds, step)
            for i, run in enumerate(self.runs)
        ]
        ends = {id(run): result.summary for run, result in zip(self.runs, results, strict=True)}
        self.tell(lambda sink, run: sink.end(run, ends[id(run)]))
        return results

    def tell(self, what: Callable[[Sink, ActiveRun], None]) -> None:
        for sink in self.sinks:
            for run in self.runs:
                what(sink, run)

    def state_of(self, i: int) -> State:
        """The State of one of the runs."""
        return vmapped.pick_state(self.axes, self.state, i)

    def compile(self) -> Callable | None:
        """The program of the rounds; None where none are left."""
        if self.done >= self.experiment.training.rounds:
            return None
        began = time.perf_counter()

        def tick(seconds: float) -> None:
            for sink in self.sinks:
                sink.waiting(self.runs[0], seconds)

        self.tell(lambda sink, run: sink.compiling(run))
        step = compiled(self.setups, self.state, self.data, tick)
        self.tell(lambda sink, run: sink.compiled(run, time.perf_counter() - began))
        return step

    def segment(self, step: Callable) -> None:
        """One call of the program, its rows, and everybody who hears of it."""
        if asked_to_stop():
            self.stopped = True
            interrupts.check()
            raise KeyboardInterrupt  # another process was asked
        done, config = self.done, self.experiment
        ask = min(segment_length(config, self.sim.capacity, done, self.speed), self.sim.most_rounds)
        if self.adapt is None and adapts_after(self.sim, config, done + ask):
            # before the segment: what is done can be saved
            self.adapt = compiled_alone(
                self.sim.adapt, self.state_of(0), data_of(self.runs[0], self.data)
            )
        began = time.perf_counter()
        ends = evaluated(config, done + ask)
        self.state, logs, scores = step(self.state, self.data, jnp.int32(ask), ends)
        jax.block_until_ready(self.state)
        seconds = time.perf_counter() - began
        self.speed = agreed(seconds / ask)
        span = dict(first_round=done + 1, last_round=done + ask)
        self.timings.append(span | dict(seconds=seconds, seconds_per_round=self.speed))
        self.collect(layouts.as_numpy((logs, scores)), ask)
        self.done += ask
        # before the checkpoint: it keeps a copy of the files
        part = lambda run: segment_of(run, done + 1, self.done, seconds)
        self.tell(lambda sink, run: sink.segment(run, part(run), self.timings))

    def collect(self, results: tuple[dict, dict], count: int) -> None:
        """`collect` for every run, from logs and scores of all of them."""
        adapt = self.adapt
        for i, run in enumerate(self.runs):
            logs, scores = (vmapped.pick(tree, i, len(self.runs)) for tree in results)
            tuned = lambda i=i, run=run: (
                adapt(self.state_of(i), data_of(run, self.data)) if adapt is not None else {}
            )
            collect(run, tuned, logs, scores, self.done, count)

    def save(self) -> None:
        save(self.runs, self.state, lambda state, i: self.state_of(i))
        self.saved_at, self.saved_round = time.perf_counter(), self.done

    def save_unsaved(self) -> None:
        """After an interrupt: the rounds that no checkpoint has yet, where they can be saved."""
        needed = self.done > 0 or any(
            s.given_net and not s.experiment.model.init for s in self.setups
        )
        together = self.stopped or jax.process_count() == 1
        if not (needed and together and self.saved_round != self.done):
            return
        if complete(self.state, self.done):
            for sink in (s for s in self.sinks if isinstance(s, Files)):
                for run in self.runs:
                    sink.write(run, self.timings)
            self.save()


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
    runs: Sequence[ActiveRun], resume_from: pathlib.Path | None, say: Callable[[str], None]
) -> tuple[State, list[dict[str, Any]]]:
    """The State to start from (stacked for several runs) and the timings so far; run directories
    are made or reopened."""
    if resume_from is not None:
        (run,) = runs
        return reopen(run, resume_from, say)
    for run in runs:
        if run.directory is not None and writes():
            run.directory.check_free(run.setup.hash)
    states = [run.setup.first_state() for run in runs]
    for run in runs:
        if run.directory is not None and writes():
            run.directory.create(run.setup, say)
            run.directory.write_labels(run.setup.fed.label_counts())
    return vmapped.stack_states([run.setup for run in runs], states), []


def reopen(
    run: ActiveRun, resume_from: pathlib.Path, say: Callable[[str], None]
) -> tuple[State, list[dict[str, Any]]]:
    """A run goes on: its State and its rows as they were at the checkpoint."""
    setup, directory = run.setup, run.directory
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
    timings = directory.read(run.recorder, files, round_)
    if round_ == setup.experiment.training.rounds:
        directory.read_end(round_)
    if writes():
        changed = run_directory.changed(directory.path)
        if changed:
            say(
                f"{', '.join(changed)} in '{directory.path}' were changed, or cut short by a kill;"
                f" written anew from the checkpoint of round {round_}"
            )
        directory.write_config(setup)
        directory.write_labels(setup.fed.label_counts())
        directory.write(run.recorder, timings)
    if round_ < setup.experiment.training.rounds:
        run.recorder.reopen(round_)
    return state, timings


def compiled(
    setups: Sequence[Setup],
    state: State,
    data: Data,
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


def data_of(run: ActiveRun, data: Data) -> Data:
    return data._replace(numbers=run.setup.simulation.data.numbers)


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


def adapts_after(sim: Simulation, config: Experiment, at: int) -> bool:
    """Whether clients fine-tune for their evaluation after round `at`."""
    if not adapted_modes(sim.method, config.evaluation.evaluations):
        return False
    return at == config.training.rounds or bool(
        config.evaluation.personal_every and at % config.evaluation.personal_every == 0
    )


def collect(
    run: ActiveRun, tuned: Callable[[], dict], logs: dict, scores: dict, done: int, count: int
) -> None:
    """Rows of one segment; off the grid only the evaluations that `evaluated` asked for are there.

    tuned: () -> the evaluation for which the run's clients fine-tune.
    """
    config, sim = run.setup.experiment, run.setup.simulation
    run.recorder.add_rounds(logs, count)
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
        run.recorder.add_evaluation(score, {k: v[at - done - 1] for k, v in logs.items()})


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


def segment_of(run: ActiveRun, first: int, last: int, seconds: float) -> Segment:
    config, recorder = run.setup.experiment, run.recorder
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


def save(runs: Sequence[ActiveRun], state: State, of_state: Callable[[State, int], State]) -> None:
    """A checkpoint of every run; every process takes part."""
    for i, run in enumerate(runs):
        if run.directory is not None:
            config = run.setup.experiment
            folder, one, rows = (
                run.directory.path / "checkpoints",
                of_state(state, i),
                run.directory.rows,
            )
            checkpoint.save(folder, one, run.setup.hash, config.compute.keep, rows)


def finish(
    run: ActiveRun,
    state: State,
    timings: list[dict[str, Any]],
    compile_seconds: float,
    program: Callable | None,
) -> Result:
    recorder, directory = run.recorder, run.directory
    stored = copy.copy(
        recorder
    )  # as the files have it: a resumed run knows no more digits, and gets the same figures
    stored.rows, stored.rounds = (
        [as_stored(row) for row in rows] for rows in (recorder.rows, recorder.rounds)
    )
    kept = (
        directory.ended if directory is not None else None
    )  # nothing was left to do: not even the clock has moved
    summary = kept or summarise(
        run.setup, stored, [as_stored(row) for row in timings], compile_seconds
    )
    if directory is not None and writes():
        directory.write_summary(summary)
    out = directory.path if directory else None
    return Result(
        summary, recorder.rows, recorder.rounds, recorder.arrays(), state, run.setup, out, program
    )


def interrupted(
    runs: Sequence[ActiveRun], done: int, saved_round: int, say: Callable[[str], None], again: str
) -> None:
    """Say what is saved, and how to go on."""
    paths = [str(run.directory.path) for run in runs if run.directory is not None]
    if not paths:
        return
    saved = f"saved at round {saved_round}" if saved_round >= 0 else "nothing had to be saved"
    when = f"after round {done}" if done else "before the first round was done"
    commands = again or "; ".join(shlex.join(["fedjax-sim", "resume", path]) for path in paths)
    say(f"interrupted {when}, {saved}; continue with: {commands}")
