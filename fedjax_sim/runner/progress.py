"""How far a run is: a bar on a terminal, a line per segment elsewhere, or JSON lines for
programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from fedjax_sim.metrics.base import About, Primary
from fedjax_sim.runner.figures import last_value
from fedjax_sim.runner.sinks import Segment, Sink, name_of
from fedjax_sim.runner.summary import clean

if TYPE_CHECKING:
    from fedjax_sim.runner.driver import ActiveRun


def measured(run: ActiveRun, segment: Segment) -> tuple[str, About, float]:
    """(whose and what, how it is read, the last value) of the run's primary metric; NaN for
    none."""
    primary = Primary.read(run.setup.resolved)
    whose, value = last_value(segment.rows, primary)
    rows = run.setup.resolved.get("client_rows", {}).get("split")
    where = "test" if whose == "global" else rows
    return f"{whose} {primary.about.label}{f' ({where})' if where else ''}", primary.about, value


def left(segment: Segment) -> str:
    """How long the rest will take, at the speed of this segment.

    >>> left(Segment(1, 10, 110, 5.0, [], []))
    '0:50 left'
    """
    seconds = segment.seconds / (segment.last - segment.first + 1) * (segment.total - segment.last)
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} left"
        if minutes >= 60
        else f"{minutes}:{rest:02d} left"
    )


LONG = 10.0  # seconds


class Lines(Sink):
    """One line per event; nothing is ever overwritten."""

    def __init__(self, out: TextIO | None = None):
        self.out = out
        self.next = (
            LONG  # seconds of compiling after which it is said that it goes on; then twice as many
        )

    def say(self, text: str) -> None:
        print(text, file=self.out or sys.stderr, flush=True)

    def compiling(self, run: ActiveRun) -> None:
        self.say(f"{name_of(run)}: compiling …")

    def waiting(self, run: ActiveRun, seconds: float) -> None:
        if seconds >= self.next:
            self.say(f"{name_of(run)}: compiling … {seconds:.0f} s")
            self.next = 2 * self.next

    def compiled(self, run: ActiveRun, seconds: float) -> None:
        self.next = LONG
        self.say(f"{name_of(run)}: compiled in {seconds:.1f} s")

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None:
        each = segment.seconds / (segment.last - segment.first + 1)
        what, about, value = measured(run, segment)
        shown = f", {what} {about.text(value, sign=True)}" if value == value else ""
        rest = f", {left(segment)}" if segment.last < segment.total else ""
        self.say(
            f"{name_of(run)}: round {segment.last} of {segment.total}{shown}, {each:.3g}"
            f" s/round{rest}"
        )


class LongCompilation(Lines):
    """Nothing but that it compiles, where that takes long: nobody should wait in front of a silent
    notebook."""

    def compiling(self, run: ActiveRun) -> None: ...

    def compiled(self, run: ActiveRun, seconds: float) -> None:
        if seconds >= LONG:
            super().compiled(run, seconds)

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None: ...


class Bar(Sink):
    """A bar that is drawn over itself, for a terminal; runs side by side share it."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.runs: list[ActiveRun] = []
        self.last: dict[int, float] = {}
        self.seconds = 0  # of compiling, as last shown

    def begin(self, run: ActiveRun, done: int) -> None:
        from tqdm import tqdm

        self.runs.append(run)
        if self.bar is None:
            total = run.setup.config.rounds
            self.bar = tqdm(
                total=total, initial=done, unit="round", file=sys.stderr, dynamic_ncols=True
            )
        self.bar.set_description(self.name())

    def name(self) -> str:
        return (
            name_of(self.runs[0])
            if len(self.runs) == 1
            else f"{self.runs[0].setup.config.method}, {len(self.runs)} seeds"
        )

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

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None:
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


def told(event: str, **facts: Any) -> str:
    """A JSON line for programs.

    >>> told("end", accuracy=float("nan"))
    '{"event": "end", "accuracy": null}'
    """
    return json.dumps(clean({"event": event} | facts), allow_nan=False)


class JsonLines(Sink):
    """An object per line on the standard output: event, method, seed, and what the event brings."""

    def __init__(self, out: TextIO | None = None):
        self.out = out

    def tell(self, run: ActiveRun, event: str, **more: Any) -> None:
        config, directory = run.setup.config, run.directory
        base = dict(
            method=config.method, seed=config.seed, out=str(directory.path) if directory else None
        )
        print(told(event, **base | more), file=self.out or sys.stdout, flush=True)

    def begin(self, run: ActiveRun, done: int) -> None:
        self.tell(
            run,
            "begin",
            round=done,
            rounds=run.setup.config.rounds,
            config_hash=run.setup.config.hash(),
        )

    def compiling(self, run: ActiveRun) -> None:
        self.tell(run, "compiling")

    def compiled(self, run: ActiveRun, seconds: float) -> None:
        self.tell(run, "compiled", seconds=seconds)

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None:
        facts = dict(round=segment.last, rounds=segment.total, seconds=segment.seconds)
        self.tell(run, "segment", **facts, rows=[clean(row) for row in segment.rows])

    def end(self, run: ActiveRun, summary: dict[str, Any]) -> None:
        self.tell(run, "end", summary=summary)


def progress_sinks(wanted: bool | None) -> list[Sink]:
    """What fits the standard error stream; None: only what nobody should wait for in silence."""
    if wanted is None:
        return [LongCompilation()]
    return [] if not wanted else [Bar() if sys.stderr.isatty() else Lines()]
