"""The one loop that drives runs: segments of about ten seconds, rows, files, checkpoints,
summaries.

It drives one run, or several: seeds or values of one set-up side by side under `vmap`, in one
program. Each has its own recorder and run directory, written after every segment, so each can be
resumed alone.
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
from fedjax_sim.runner.compilation import compile_once, first_process
from fedjax_sim.runner.figures import Row, summarise
from fedjax_sim.runner.files import as_stored
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.recorder import Recorder, personal_due
from fedjax_sim.runner.result import Result
from fedjax_sim.runner.run_directory import CHECKPOINTS, RunDirectory
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
    resume_command: str = "",
) -> list[Result]:
    """Drive prepared runs that share one simulation to their end.

    sinks: called for every segment, beside the files; progress: a bar or lines, None: a line only
    where compiling takes long. resume_from: the checkpoint of a single run that is resumed.
    program: compiled rounds of an earlier run of the same simulation, for a single run.
    resume_command: shown after an interrupt, if these runs are part of something larger.
    """
    vmapped.check(setups)
    runs = [ActiveRun(s, d, Recorder(s)) for s, d in zip(setups, directories, strict=True)]
    say = say or (lambda text: print(text, file=sys.stderr))
    all_sinks = [Files(), *progress_sinks(progress), *sinks] if first_process() else []
    try:
        with interrupts.guard(), floats(setups[0].experiment.compute.dtype):
            return Driver(runs, all_sinks, resume_from, say).run(program, resume_command)
    finally:
        for sink in all_sinks:
            sink.close()
        for run in runs:
            if run.directory is not None:
                run.directory.lock.release()


class Driver:
    """Runs that are driven together: their State, the rounds done and the rounds saved."""

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

    def run(self, program: Callable | None, resume_command: str) -> list[Result]:
        """Run the remaining rounds; a signal ends it after a checkpoint of the rounds done."""
        self.notify(lambda sink, run: sink.begin(run, self.done))
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
            if first_process():
                interrupted(self.runs, self.done, self.saved_round, self.say, resume_command)
            raise
        results = [
            finish(run, self.state_of(i), self.timings, compile_seconds, step)
            for i, run in enumerate(self.runs)
        ]
        ends = {id(run): result.summary for run, result in zip(self.runs, results, strict=True)}
        self.notify(lambda sink, run: sink.end(run, ends[id(run)]))
        return results

    def notify(self, event: Callable[[Sink, ActiveRun], None]) -> None:
        for sink in self.sinks:
            for run in self.runs:
                event(sink, run)

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

        self.notify(lambda sink, run: sink.compiling(run))
        step = compiled(self.setups, self.state, self.data, tick)
        self.notify(lambda sink, run: sink.compiled(run, time.perf_counter() - began))
        return step

    def segment(self, step: Callable) -> None:
        """One call of the program, its rows, and the sinks."""
        if signal_pending():
            self.stopped = True
            interrupts.check()
            raise KeyboardInterrupt  # the signal came to another process
        done, config = self.done, self.experiment
        count = segment_length(config, self.sim.capacity, done, self.speed)
        count = min(count, self.sim.most_rounds)
        if self.adapt is None and adapts_after(self.sim, config, done + count):
            # compiled before the segment: an interrupt can still save the rounds done
            self.adapt = compiled_alone(
                self.sim.adapt, self.state_of(0), data_of(self.runs[0], self.data)
            )
        began = time.perf_counter()
        ends = evaluated(config, done + count)
        self.state, logs, scores = step(self.state, self.data, jnp.int32(count), ends)
        jax.block_until_ready(self.state)
        seconds = time.perf_counter() - began
        self.speed = agreed(seconds / count)
        span = dict(first_round=done + 1, last_round=done + count)
        self.timings.append(span | dict(seconds=seconds, seconds_per_round=self.speed))
        self.collect(layouts.as_numpy((logs, scores)), count)
        self.done += count
        # before the checkpoint, which keeps a copy of the files
        segment = lambda run: segment_of(run, done + 1, self.done, seconds)
        self.notify(lambda sink, run: sink.segment(run, segment(run), self.timings))

    def collect(self, results: tuple[dict, dict], count: int) -> None:
        """Add the rows of a segment to every run; results: (logs, scores) of all of them."""
        adapt = self.adapt
        for i, run in enumerate(self.runs):
            logs, scores = (vmapped.pick(tree, i, len(self.runs)) for tree in results)
            fine_tuned = lambda i=i, run=run: (
                adapt(self.state_of(i), data_of(run, self.data)) if adapt is not None else {}
            )
            collect(run, fine_tuned, logs, scores, self.done, count)

    def save(self) -> None:
        save(self.runs, self.state, lambda state, i: self.state_of(i))
        self.saved_at, self.saved_round = time.perf_counter(), self.done

    def save_unsaved(self) -> None:
        """After an interrupt: save the rounds that no checkpoint has yet, if possible."""
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


def signal_pending() -> bool:
    """Whether a signal waits in any process."""
    pending = interrupts.pending() is not None
    if jax.process_count() == 1:
        return pending
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.bool_(pending))))


def complete(state: State, done: int) -> bool:
    """Whether `state` is that after round `done` and not deleted: an interrupted call has donated
    its buffers."""
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        return False
    return int(np.asarray(state.t).max()) == done


# ---- the start -----------------------------------------------------------------------------------
def begin(
    runs: Sequence[ActiveRun], resume_from: pathlib.Path | None, say: Callable[[str], None]
) -> tuple[State, list[Row]]:
    """Create or reopen the run directories; return the State to start from (stacked for several
    runs) and the timings so far."""
    if resume_from is not None:
        (run,) = runs
        return reopen(run, resume_from, say)
    for run in runs:
        if run.directory is not None and first_process():
            run.directory.check_free(run.setup.hash)
    states = [run.setup.first_state() for run in runs]
    for run in runs:
        if run.directory is not None and first_process():
            run.directory.create(run.setup, say)
            run.directory.write_labels(run.setup.fed.label_counts())
    return vmapped.stack_states([run.setup for run in runs], states), []


def reopen(
    run: ActiveRun, resume_from: pathlib.Path, say: Callable[[str], None]
) -> tuple[State, list[Row]]:
    """Resume a run: return its State and timings at the checkpoint, and restore its rows."""
    setup, directory = run.setup, run.directory
    assert directory is not None
    if first_process():
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
    if first_process():
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
    """The compiled (state, data, rounds, ends) -> (state, logs, scores). tick: called with the
    seconds so far."""
    config, run = setups[0].experiment, setups[0].simulation.run
    if len(setups) > 1:
        run = vmapped.side_by_side(setups, run)
    elif config.compute.backend == "loop":
        return first_in_thread(LoopBackend(setups[0].simulation).run)
    elif config.compute.state_on == "host":
        return first_in_thread(run)
    return compiled_alone(run, state, data, jnp.int32(1), np.bool_(True), tick=tick)


def compiled_alone(
    function: Callable, *args: Any, tick: Callable[[float], None] = lambda seconds: None
) -> Callable:
    """A jitted function, compiled; a signal interrupts tracing and compiling."""
    if not hasattr(function, "lower"):
        return function  # client states on the host: it compiles when called
    with interrupts.immediate():
        lowered = function.lower(*args)
    return compile_once(lowered, tick)


def first_in_thread(run: Callable) -> Callable:
    """`run`; its first call compiles, and therefore runs in another thread."""
    calls = iter((interrupts.in_thread,))

    def called(*args: Any) -> Any:
        return next(calls, lambda call: call())(lambda: run(*args))

    return called


def data_of(run: ActiveRun, data: Data) -> Data:
    return data._replace(numbers=run.setup.simulation.data.numbers)


# ---- one segment ---------------------------------------------------------------------------------
def segment_length(config: Experiment, capacity: int, done: int, speed: float | None) -> int:
    """Rounds of the next call: about ten seconds, ending at an evaluation or a checkpoint where one
    is near."""
    every = config.evaluation.eval_every
    longest = capacity * every - done % every
    # the first call measures the speed: it must be short even if evaluations are rare
    wanted = min(every, FIRST_ROUNDS)
    if speed is not None:
        wanted = max(1, int(SEGMENT_SECONDS / max(speed, 1e-9)))
    count = min(wanted, longest, config.training.rounds - done)
    if done + count < config.training.rounds and count >= every:
        count -= (done + count) % every  # end at an evaluation
    for grid in (config.compute.checkpoint_every, config.evaluation.personal_every):
        if grid:  # never run past a checkpoint or a personal evaluation
            count = min(count, grid - done % grid)
    return max(1, count)


def evaluated(config: Experiment, done: int) -> np.bool_:
    """Whether a segment that ends after round `done` needs an evaluation there, also between those
    of eval_every."""
    return np.bool_(done == config.training.rounds or personal_due(config, done))


def save_due(config: Experiment, done: int, saved_round: int, saved_at: float) -> bool:
    """Whether a checkpoint is due, by rounds or by time; the same in all processes."""
    if config.compute.checkpoint_every:
        return done - max(saved_round, 0) >= config.compute.checkpoint_every
    return agreed(time.perf_counter() - saved_at) > CHECKPOINT_SECONDS


def adapts_after(sim: Simulation, config: Experiment, at: int) -> bool:
    """Whether clients fine-tune for their evaluation after round `at`."""
    adapts = bool(adapted_modes(sim.method, config.evaluation.evaluations))
    return adapts and (at == config.training.rounds or personal_due(config, at))


def collect(
    run: ActiveRun, fine_tuned: Callable[[], dict], logs: dict, scores: dict, done: int, count: int
) -> None:
    """Add the rows of one segment to a run.

    fine_tuned: () -> the evaluation for which the run's clients fine-tune.
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
            score |= layouts.as_numpy(fine_tuned())
        run.recorder.add_evaluation(score, {k: v[at - done - 1] for k, v in logs.items()})


def agreed(value: float) -> float:
    """The value of process 0: decisions that depend on a clock must be the same in every
    process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


# ---- what is left behind -------------------------------------------------------------------------
def segment_of(run: ActiveRun, first: int, last: int, seconds: float) -> Segment:
    config, recorder = run.setup.experiment, run.recorder
    recent = lambda rows: [row for row in rows[-(last - first + 1) :] if row["round"] >= first]
    rounds, rows, train = recent(recorder.rounds), recent(recorder.rows), config.training
    return Segment(first, last, train.rounds, seconds, rounds, rows, config.method.name, train.seed)


def save(runs: Sequence[ActiveRun], state: State, of_state: Callable[[State, int], State]) -> None:
    """Write a checkpoint of every run; every process takes part."""
    for i, run in enumerate(runs):
        if run.directory is not None:
            folder, keep = run.directory.path / CHECKPOINTS, run.setup.experiment.compute.keep
            checkpoint.save(folder, of_state(state, i), run.setup.hash, keep, run.directory.rows)


def finish(
    run: ActiveRun,
    state: State,
    timings: list[Row],
    compile_seconds: float,
    program: Callable | None,
) -> Result:
    recorder, directory = run.recorder, run.directory
    stored = copy.copy(recorder)  # rounded as in the files, so that a resumed run has the same
    stored.rows = list(map(as_stored, recorder.rows))
    stored.rounds = list(map(as_stored, recorder.rounds))
    # a run that had ended keeps its summary, timings included
    ended = directory.ended if directory is not None else None
    spans = list(map(as_stored, timings))
    summary = ended or summarise(run.setup, stored, spans, compile_seconds)
    if directory is not None and first_process():
        directory.write_summary(summary)
    out = directory.path if directory else None
    return Result(
        summary, recorder.rows, recorder.rounds, recorder.arrays(), state, run.setup, out, program
    )


def interrupted(
    runs: Sequence[ActiveRun],
    done: int,
    saved_round: int,
    say: Callable[[str], None],
    resume_command: str,
) -> None:
    """Print what is saved and how to resume."""
    paths = [str(run.directory.path) for run in runs if run.directory is not None]
    if not paths:
        return
    saved = f"saved at round {saved_round}" if saved_round >= 0 else "nothing had to be saved"
    when = f"after round {done}" if done else "before the first round was done"
    commands = resume_command or "; ".join(
        shlex.join(["fedjax-sim", "resume", path]) for path in paths
    )
    say(f"interrupted {when}, {saved}; continue with: {commands}")
