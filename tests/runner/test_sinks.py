"""Sinks of a run: progress, JSON lines, TensorBoard, Weights & Biases, a callback."""

from __future__ import annotations

import io
import json
import pathlib
import re
import shutil
import struct
import sys
import types

import pytest
import tiny
from commands import SMALL, empty_folder, refused
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

import fedjax_sim as fs
from fedjax_sim.cli.main import main
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner import compilation, sinks
from fedjax_sim.runner.sinks import Segment

__all__ = ["empty_folder"]  # used by every test


class Heard(fs.Sink):
    def __init__(self):
        self.events = []

    def begin(self, run, done):
        self.events.append(("begin", done))

    def compiling(self, run):
        self.events.append(("compiling",))

    def compiled(self, run, seconds):
        self.events.append(("compiled", seconds > 0))

    def segment(self, run, segment, timings):
        self.events.append(("segment", segment.first, segment.last))

    def end(self, run, summary):
        self.events.append(("end", summary["rounds"]))

    def close(self):
        self.events.append(("close",))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One run with every sink: (what was told, the segments of the callback, the result, WandB's
    stand-in)."""
    out = tmp_path_factory.mktemp("sinks") / "run"
    calls: list = []
    pretend = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finish"),
        summary={},
    )
    sys.modules["wandb"] = types.SimpleNamespace(init=lambda **said: calls.append(said) or pretend)  # type: ignore[assignment]
    heard, segments = Heard(), []
    options = dict(
        model="mlp", clients=6, rounds=4, epochs=1, devices="1", chunk="1", checkpoint_every=2
    )
    try:
        result = fs.run(
            "fedavg",
            out=out,
            log=["tensorboard", "wandb", heard],
            callback=segments.append,
            **options,
        )
    finally:
        del sys.modules["wandb"]
    return heard.events, segments, result, (calls, pretend)


def test_every_sink_hears_the_same_story(ran):
    events, segments, result, _ = ran
    assert [e[0] for e in events] == [
        "begin",
        "compiling",
        "compiled",
        *["segment"] * len(segments),
        "end",
        "close",
    ]
    assert events[0] == ("begin", 0) and events[-2] == ("end", 4)
    assert [(s.first, s.last) for s in segments] == [e[1:] for e in events if e[0] == "segment"]
    assert segments[0].first == 1 and segments[-1].last == segments[-1].total == 4
    assert [row for s in segments for row in s.rows] == result.rows
    assert [row for s in segments for row in s.rounds] == result.rounds


def test_a_callback_may_end_a_run_and_it_goes_on(tmp_path):
    class Enough(Exception):
        pass

    def stop(segment: Segment) -> None:
        if segment.last >= 2:
            raise Enough

    options = dict(
        model="mlp", clients=6, rounds=4, epochs=1, devices="1", chunk="1", checkpoint_every=1
    )
    with pytest.raises(Enough):
        fs.run("fedavg", out=tmp_path / "run", callback=stop, **options)
    heard = Heard()
    assert fs.resume(tmp_path / "run", log=[heard]).summary["rounds"] == 4
    assert heard.events[0][0] == "begin" and heard.events[0][1] in (1, 2)
    with pytest.raises(fs.UserError, match="log takes names"):
        fs.run("fedavg", log=[3])


# ---- tools ---------------------------------------------------------------------------------------
def events_in(file: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """An event file read back, every checksum compared: (step, values) per event."""
    data, at, out = file.read_bytes(), 0, []
    checked = lambda text: struct.pack("<I", masked_crc32c(text))
    while at < len(data):
        head = data[at : at + 8]
        (length,) = struct.unpack("<Q", head)
        content = data[at + 12 : at + 12 + length]
        assert data[at + 8 : at + 12] == checked(head)
        assert data[at + 12 + length : at + 16 + length] == checked(content)
        at += 16 + length
        event = Event.FromString(content)
        out.append((event.step, {v.tag: v.simple_value for v in event.summary.value}))
    return out


def test_tensorboard_files_hold_every_number(ran):
    _, _, result, _ = ran
    (file,) = (result.out / "tensorboard").glob("events.out.tfevents.*")
    events = events_in(file)
    logged = {
        step: values["evaluation/global_acc"]
        for step, values in events
        if "evaluation/global_acc" in values
    }
    assert logged == pytest.approx(
        {row["round"]: row["global_acc"] for row in result.rows}, rel=1e-6
    )
    losses = {
        step: values["round/train_loss"] for step, values in events if "round/train_loss" in values
    }
    assert losses == pytest.approx(
        {row["round"]: row["train_loss"] for row in result.rounds}, rel=1e-6
    )


def test_a_resume_leaves_the_events_before_it(ran, tmp_path):
    """Byte for byte; its own rounds are in a file beside them."""
    _, _, result, _ = ran
    copy = pathlib.Path(shutil.copytree(result.out, tmp_path / "run"))
    before = {file.name: file.read_bytes() for file in (copy / "tensorboard").iterdir()}
    fs.resume(copy, 5, log="tensorboard")
    after = {file.name: file.read_bytes() for file in (copy / "tensorboard").iterdir()}
    (new,) = set(after) - set(before)
    assert {name: after[name] for name in before} == before
    assert {step for step, values in events_in(copy / "tensorboard" / new) if values} == {5}


def test_tensorboard_itself_reads_them(ran):
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed: its files were read by the test's own reader",
    )
    _, _, result, _ = ran
    read = loader.EventAccumulator(str(result.out / "tensorboard"))
    read.Reload()
    assert [e.step for e in read.Scalars("evaluation/global_acc")] == [
        row["round"] for row in result.rows
    ]


def test_wandb_itself_writes_an_offline_run(tmp_path, monkeypatch):
    """Its file holds the names that were logged; its own reader is not part of the package any
    more."""
    pytest.importorskip(
        "wandb", reason="wandb is not installed: the sink was told to a stand-in only"
    )
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = dict(
        model="mlp", clients=6, rounds=2, epochs=1, devices="1", chunk="1", log=["wandb"]
    )
    result = fs.run("fedavg", out=tmp_path / "run", **options)
    (file,) = (result.out / "wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert (
        b"evaluation/global_acc" in data and b"round/train_loss" in data and b"best_global" in data
    )
    fs.resume(result.out, 3, log=["wandb"])  # the same run there, to be joined when it is synced
    ids = {f.name for f in (result.out / "wandb").glob("offline-run-*/run-*.wandb")}
    assert ids == {file.name}


def test_wandb_is_offline_and_gets_every_round(ran, monkeypatch, capsys):
    _, _, result, (calls, pretend) = ran
    said, *steps, last = calls
    assert (
        said["mode"] == "offline"
        and said["config"]["method"] == "fedavg"
        and said["dir"] == str(result.out)
    )
    assert [step for step, _ in steps] == [1, 2, 3, 4] and last == "finish"
    assert (
        steps[-1][1]["evaluation/global_acc"] == result.rows[-1]["global_acc"]
        and "round/train_loss" in steps[0][1]
    )
    assert pretend.summary["best_global"] == result.summary["best_global"]
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    assert "pip install 'fedjax-sim[tensorboard]'" in refused(
        capsys, "run", "fedavg", *SMALL, "--log", "tensorboard"
    )
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install 'fedjax-sim[wandb]'" in refused(
        capsys, "run", "fedavg", *SMALL, "--log", "wandb"
    )
    assert "unknown log 'tensorbord' (did you mean 'tensorboard'?)" in refused(
        capsys, "run", "fedavg", "--log", "tensorbord"
    )


# ---- progress ------------------------------------------------------------------------------------
def test_lines_where_there_is_no_terminal_and_json_for_programs(capsys, tmp_path):
    quiet_not = [word for word in SMALL if word != "--quiet"]
    assert (
        main(
            [
                "run",
                "fedavg",
                *quiet_not,
                "--rounds",
                "2",
                "--checkpoint-every",
                "1",
                "--out",
                "lines",
            ]
        )
        == 0
    )
    err = capsys.readouterr().err
    assert (
        "\r" not in err
        and "fedavg seed 0: compiling …\n" in err
        and re.search(r"compiled in [\d.]+ s\n", err)
    )
    assert re.search(
        r"round 1 of 2, global accuracy \(test\) [\d.]+ %, [\d.e-]+ s/round, \d+:\d\d left\n", err
    )
    assert re.search(r"round 2 of 2, global accuracy \(test\) [\d.]+ %, [\d.e-]+ s/round\n", err)
    assert main(["resume", "lines", "--rounds", "3", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [t["event"] for t in events] == ["begin", "compiling", "compiled", "segment", "end"]
    assert (
        events[0]["round"] == 2
        and events[3]["round"] == events[3]["rounds"] == 3
        and events[3]["rows"][0]["global_acc"] > 0
    )
    stored = json.loads((tmp_path / "lines" / "summary.json").read_text())
    assert events[-1]["summary"] == stored and events[-1]["out"] == "lines"
    assert len((tmp_path / "lines" / "metrics.csv").read_text().splitlines()) == 4


def active(method="fedavg", seed=0, rounds=100):
    experiment = Experiment().replace(method=method, seed=seed, rounds=rounds)
    setup = types.SimpleNamespace(experiment=experiment, resolved={})
    return types.SimpleNamespace(setup=setup, directory=None)


def test_a_terminal_gets_a_bar_that_says_when_it_compiles(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    bar, one, two = sinks.progress_sinks(True)[0], active(), active(seed=1)
    assert isinstance(bar, sinks.Bar)
    for each in (one, two):  # seeds side by side share it
        bar.begin(each, 10)
    bar.compiling(one)
    assert "fedavg, 2 seeds: compiling …" in screen.getvalue()
    bar.compiled(one, 2.0)
    for each, acc in ((one, 0.5), (two, 0.7)):
        bar.segment(each, Segment(11, 30, 100, 2.0, [], [{"round": 30, "global_acc": acc}]), [])
    bar.close()
    assert "30/100" in screen.getvalue() and "global accuracy (test)=60.00%" in screen.getvalue()


def test_the_time_that_is_left():
    assert sinks.left(Segment(1, 10, 20, 10.0, [], [])) == "0:10 left"
    assert sinks.left(Segment(11, 20, 7220, 10.0, [], [])) == "2:00:00 left"


# ---- while it compiles ---------------------------------------------------------------------------
class Clock:
    """Seconds that pass as it is told: nobody waits for a slow compiler."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, call, tick):
        for seconds in self.steps:
            tick(seconds)
        return call()


@pytest.mark.parametrize("wanted, lines", [(True, 3), (None, 2), (False, 0)])
def test_compiling_is_not_silent(monkeypatch, capsys, wanted, lines):
    """With progress from the start; from Python, by default, where it takes long; asked to be
    quiet, never."""

    compilation.forget()
    monkeypatch.setattr(compilation.interrupts, "in_thread", Clock([0.1, 5, 11, 12, 19, 25, 30]))
    tiny_run = dict(
        model="mlp",
        model_options={"hidden": (3,)},
        devices="1",
        chunk="1",
        rounds=1,
        epochs=1.0,
        batch_size=4,
    )
    fs.run("fedavg", tiny.federation(), participation="1", progress=wanted, **tiny_run)
    said = [line for line in capsys.readouterr().err.splitlines() if "compiling" in line]
    assert (
        said
        == [
            "fedavg seed 0: compiling …",
            "fedavg seed 0: compiling … 11 s",
            "fedavg seed 0: compiling … 25 s",
        ][3 - lines :]
    )
    compilation.forget()


def test_a_bar_counts_the_seconds_of_compiling():
    bar, one = sinks.Bar(), active()
    bar.begin(one, 0)
    bar.compiling(one)
    for seconds in (0.4, 1.2, 1.4, 62.0):
        bar.waiting(one, seconds)
    assert "compiling … 62 s" in bar.bar.desc
    bar.compiled(one, 63.0)
    assert "compiling" not in bar.bar.desc
    bar.close()
