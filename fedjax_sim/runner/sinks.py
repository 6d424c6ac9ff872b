"""Where the numbers of a run go: files, progress, JSON lines, TensorBoard, Weights & Biases, a
callback.

The driver calls every sink for every run: begin, compiling, waiting, compiled, then segment after
segment, and end; in process 0 only. `Files` is always used; the others are chosen by name (`SINKS`)
or given.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.metrics.base import About, Primary
from fedjax_sim.runner.figures import Row, Summary, clean, last_value

if TYPE_CHECKING:
    from fedjax_sim.runner.driver import ActiveRun


@dataclasses.dataclass(frozen=True)
class Segment:
    """The results of one call of the compiled program: rounds first..last."""

    first: int
    last: int
    total: int  # rounds of the whole run
    seconds: float
    rounds: list[Row]  # a row per round, as in rounds.csv
    rows: list[Row]  # a row per evaluated round, as in metrics.csv
    method: str = ""
    seed: int = 0


class Sink:
    """Ignores every event; override what you need."""

    def begin(self, run: ActiveRun, done: int) -> None:
        """A run starts, or is resumed after `done` rounds."""

    def compiling(self, run: ActiveRun) -> None: ...

    def waiting(self, run: ActiveRun, seconds: float) -> None:
        """Called several times a second while the run compiles; seconds: so far."""

    def compiled(self, run: ActiveRun, seconds: float) -> None: ...

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None: ...

    def end(self, run: ActiveRun, summary: Summary) -> None: ...

    def close(self) -> None:
        """Called at the end, also after a failure or an interrupt."""


class Files(Sink):
    """metrics.csv, rounds.csv, timings.csv, clients.npz of the run directory."""

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None:
        self.write(run, timings)

    def write(self, run: ActiveRun, timings: list[Row]) -> None:
        if run.directory is not None:
            run.directory.write(run.recorder, timings)


class Callback(Sink):
    """The user's function, called with every `Segment`; an exception in it ends the run."""

    def __init__(self, call: Callable[[Segment], Any]):
        self.call = call

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None:
        self.call(segment)


def name_of(run: ActiveRun) -> str:
    """The name of a run in progress lines."""
    return f"{run.setup.experiment.method.name} seed {run.setup.experiment.training.seed}"


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row that can be plotted over rounds.

    >>> numbers({"round": 3, "global_acc": 0.5, "val_acc": float("nan")})
    {'global_acc': 0.5}
    """
    plotted = lambda k, v: k != "round" and isinstance(v, (int, float)) and v == v
    return {k: float(v) for k, v in row.items() if plotted(k, v)}


# ---- progress ------------------------------------------------------------------------------------
def measured(run: ActiveRun, segment: Segment) -> tuple[str, About, float]:
    """(label, format, last value) of the run's primary metric; NaN if it was not measured."""
    primary = Primary.read(run.setup.resolved)
    whose, value = last_value(segment.rows, primary)
    rows = run.setup.resolved.get("client_rows", {}).get("split")
    where = "test" if whose == "global" else rows
    return f"{whose} {primary.about.label}{f' ({where})' if where else ''}", primary.about, value


def left(segment: Segment) -> str:
    """The remaining time at the speed of this segment.

    >>> left(Segment(1, 10, 110, 5.0, [], []))
    '0:50 left'
    """
    seconds = segment.seconds / (segment.last - segment.first + 1) * (segment.total - segment.last)
    minutes, rest = divmod(round(seconds), 60)
    hours = f"{minutes // 60}:{minutes % 60:02d}" if minutes >= 60 else f"{minutes}"
    return f"{hours}:{rest:02d} left"


LONG = 10.0  # seconds


class Lines(Sink):
    """One line per event; nothing is ever overwritten."""

    def __init__(self, out: TextIO | None = None):
        self.out = out
        self.next = LONG  # seconds of compiling until the next line, doubled every time

    def print(self, text: str) -> None:
        print(text, file=self.out or sys.stderr, flush=True)

    def compiling(self, run: ActiveRun) -> None:
        self.print(f"{name_of(run)}: compiling …")

    def waiting(self, run: ActiveRun, seconds: float) -> None:
        if seconds >= self.next:
            self.print(f"{name_of(run)}: compiling … {seconds:.0f} s")
            self.next = 2 * self.next

    def compiled(self, run: ActiveRun, seconds: float) -> None:
        self.next = LONG
        self.print(f"{name_of(run)}: compiled in {seconds:.1f} s")

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None:
        each = segment.seconds / (segment.last - segment.first + 1)
        what, about, value = measured(run, segment)
        shown = f", {what} {about.text(value, sign=True)}" if value == value else ""
        rest = f", {left(segment)}" if segment.last < segment.total else ""
        self.print(
            f"{name_of(run)}: round {segment.last} of {segment.total}{shown}, {each:.3g}"
            f" s/round{rest}"
        )


class LongCompilation(Lines):
    """A line only where compiling takes long, so that a notebook does not seem to hang."""

    def compiling(self, run: ActiveRun) -> None: ...

    def compiled(self, run: ActiveRun, seconds: float) -> None:
        if seconds >= LONG:
            super().compiled(run, seconds)

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None: ...


def bar_of(unit: str, done: int, total: int) -> Any:
    """A bar on the standard error stream."""
    from tqdm import tqdm

    return tqdm(total=total, initial=done, unit=unit, file=sys.stderr, dynamic_ncols=True)


class Bar(Sink):
    """A progress bar for a terminal; runs side by side share it."""

    bar: Any = None

    def __init__(self) -> None:
        self.runs: list[ActiveRun] = []
        self.last: dict[int, float] = {}
        self.seconds = 0  # of compiling, as last shown

    def begin(self, run: ActiveRun, done: int) -> None:
        self.runs.append(run)
        if self.bar is None:
            self.bar = bar_of("round", done, run.setup.experiment.training.rounds)
        self.bar.set_description(self.name())

    def name(self) -> str:
        if len(self.runs) == 1:
            return name_of(self.runs[0])
        return f"{self.runs[0].setup.experiment.method.name}, {len(self.runs)} seeds"

    def compiling(self, run: ActiveRun) -> None:
        self.bar.set_description(f"{self.name()}: compiling …")

    def waiting(self, run: ActiveRun, seconds: float) -> None:
        if int(seconds) > self.seconds:
            self.seconds = int(seconds)
            self.bar.set_description(f"{self.name()}: compiling … {self.seconds} s")

    def compiled(self, run: ActiveRun, seconds: float) -> None:
        self.seconds = 0
        self.bar.set_description(self.name())
        self.bar.unpause()  # the time left is that of the rounds alone

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None:
        what, about, self.last[id(run)] = measured(run, segment)
        if run is not self.runs[-1]:
            return
        self.bar.update(segment.last - segment.first + 1)
        values = [v for v in self.last.values() if v == v]
        if values:
            self.bar.set_postfix({what: about.text(sum(values) / len(values)) + about.sign.strip()})

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Steps:
    """Progress of a search: a bar on a terminal, otherwise a line per step."""

    def __init__(
        self, unit: str, done: int, total: int, say: Callable[[str], None], bar: bool = False
    ):
        self.unit, self.done, self.total, self.say = unit, done, total, say
        self.bar = bar_of(unit, done, total) if bar else None

    def step(self, text: str, seconds: float) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
            return
        rest = left(Segment(self.done, self.done, self.total, seconds, [], []))
        self.say(f"{self.unit} {self.done} of {self.total}: {text}, {rest}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def json_line(event: str, **facts: Any) -> str:
    """An event as one line of JSON.

    >>> json_line("end", accuracy=float("nan"))
    '{"event": "end", "accuracy": null}'
    """
    return json.dumps(clean({"event": event} | facts), allow_nan=False)


class JsonLines(Sink):
    """One JSON object per event on the standard output: event, method, seed, and its data."""

    def __init__(self, out: TextIO | None = None):
        self.out = out

    def emit(self, run: ActiveRun, event: str, **more: Any) -> None:
        config, directory = run.setup.experiment, run.directory
        base = dict(method=config.method.name, seed=config.training.seed)
        base |= dict(out=str(directory.path) if directory else None)
        print(json_line(event, **base | more), file=self.out or sys.stdout, flush=True)

    def begin(self, run: ActiveRun, done: int) -> None:
        rounds = run.setup.experiment.training.rounds
        self.emit(run, "begin", round=done, rounds=rounds, config_hash=run.setup.hash)

    def compiling(self, run: ActiveRun) -> None:
        self.emit(run, "compiling")

    def compiled(self, run: ActiveRun, seconds: float) -> None:
        self.emit(run, "compiled", seconds=seconds)

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None:
        facts = dict(round=segment.last, rounds=segment.total, seconds=segment.seconds)
        self.emit(run, "segment", **facts, rows=[clean(row) for row in segment.rows])

    def end(self, run: ActiveRun, summary: Summary) -> None:
        self.emit(run, "end", summary=summary)


def progress_sinks(wanted: bool | None) -> list[Sink]:
    """Sinks that show progress on the standard error stream: a bar on a terminal, else lines; None:
    only long compilations."""
    if wanted is None:
        return [LongCompilation()]
    return [] if not wanted else [Bar() if sys.stderr.isatty() else Lines()]


# ---- other tools ---------------------------------------------------------------------------------
class TensorBoard(Sink):
    """One event file per run, in OUT/tensorboard (a run without a directory: runs/tensorboard):
    every number of metrics.csv and rounds.csv over rounds."""

    def __init__(self) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
        except ImportError:
            raise UserError(
                "--log tensorboard needs tensorboardX; install it with: pip install"
                " 'fedjax-sim[tensorboard]'"
            ) from None
        self.writer, self.event = EventsWriter, Event
        self.files: dict[int, EventsWriter] = {}

    def begin(self, run: ActiveRun, done: int) -> None:
        folder = (run.directory.path if run.directory else pathlib.Path("runs")) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}.{run.setup.hash}"  # a resume has a file of its own
        self.files[id(run)] = self.writer(str(folder / "events"), suffix)

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None:
        file, now = self.files[id(run)], time.time()
        for kind, rows in (("evaluation", segment.rows), ("round", segment.rounds)):
            for row in rows:
                event = self.event(wall_time=now, step=int(row["round"]))
                for name, value in numbers(row).items():
                    event.summary.value.add(tag=f"{kind}/{name}", simple_value=value)
                file.write_event(event)
        file.flush()

    def close(self) -> None:
        while self.files:
            self.files.popitem()[1].close()


class WandB(Sink):
    """Project WANDB_PROJECT or fedjax_sim; files in OUT/wandb."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "--log wandb needs Weights & Biases; install it with: pip install"
                " 'fedjax-sim[wandb]'"
            ) from None
        self.wandb = wandb
        self.runs: dict[int, Any] = {}

    def begin(self, run: ActiveRun, done: int) -> None:
        config = run.setup.experiment
        online = "WANDB_API_KEY" in os.environ
        self.runs[id(run)] = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedjax_sim"),
            name=run.directory.path.name if run.directory else name_of(run),
            id=None if not run.directory else f"{run.setup.hash}-{run.directory.path.name}",
            resume="allow",
            config=config.flat(),
            dir=str(run.directory.path if run.directory else pathlib.Path(".")),
            mode=os.environ.get("WANDB_MODE", "online" if online else "offline"),
            reinit="create_new",
        )

    def segment(self, run: ActiveRun, segment: Segment, timings: list[Row]) -> None:
        steps: dict[int, dict[str, float]] = {}
        for kind, rows in (("round", segment.rounds), ("evaluation", segment.rows)):
            for row in rows:
                step = steps.setdefault(int(row["round"]), {})
                step |= {f"{kind}/{k}": v for k, v in numbers(row).items()}
        for number, values in sorted(steps.items()):
            self.runs[id(run)].log(values, step=number)

    def end(self, run: ActiveRun, summary: Summary) -> None:
        self.runs[id(run)].summary.update(summary)

    def close(self) -> None:
        while self.runs:
            self.runs.popitem()[1].finish()


# name -> (sink, one line)
SINKS: dict[str, tuple[type[Sink], str]] = {
    "tensorboard": (TensorBoard, "event files in the run directory (view them with tensorboard)"),
    "wandb": (WandB, "Weights & Biases; offline unless WANDB_MODE or WANDB_API_KEY says otherwise"),
}


def named(names: Sequence[str]) -> list[Sink]:
    """The sinks with these names; a missing package raises a UserError."""
    return [lookup("log", name, SINKS)[0]() for name in names]
