"""`--chunk auto`: measured once for a long run, remembered, explained, stored in the run and
repeated by resume."""

from __future__ import annotations

import json
import os

import jax
import pytest
import tiny

from fedjax_sim.api import resume, run
from fedjax_sim.engine import layout as layouts
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner import autotune

jax.devices()
ONE = dict(
    model="mlp", model_options={"hidden": (5,)}, devices="1", chunk="1", batch_size=4, lr=0.05
)


class FakeClock:
    """Seconds per layout, and which layouts were asked for."""

    def __init__(self, seconds):
        self.seconds, self.timed = seconds, []

    def __call__(self, choice):
        self.timed.append((choice.chunk, choice.devices))
        return lambda: self.seconds(choice)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "load_per_core", lambda: 0.0)
    return tmp_path / "cache"


LONG = 10 * autotune.LONG_RUN


def test_autotune_takes_the_fastest_and_remembers(cache):
    said = []
    clock = FakeClock(lambda c: 0.5 if (c.chunk, c.devices) == (4, 2) else 1.0 + c.devices)
    config = Experiment.of(devices="2", rounds=100)
    choice = autotune.choose(config, 10, 1000, 5e6, LONG, clock, said.append)
    assert (choice.chunk, choice.devices) == (4, 2) and len(clock.timed) > 1
    assert "0.500 with chunk 4 on 2" in choice.why and len(said) == 1  # explained
    files = list((cache / "chunks").iterdir())
    assert len(files) == 1
    forbidden = lambda c: pytest.fail("measured before")
    again = autotune.choose(config, 10, 1000, 5e6, LONG, forbidden, said.append)
    assert (again.chunk, again.devices) == (4, 2) and "measured before" in again.why
    other = FakeClock(lambda c: c.chunk)
    # another cohort: measured anew
    assert autotune.choose(config, 12, 1000, 5e6, LONG, other, said.append).chunk == 1
    assert other.timed and len(list((cache / "chunks").iterdir())) == 2
    files[0].write_text("not json")
    repaired = FakeClock(lambda c: c.chunk)
    assert (
        autotune.choose(config, 10, 1000, 5e6, LONG, repaired, said.append).chunk == 1
        and repaired.timed
    )


def test_autotune_ignores_one_noisy_moment(cache):
    """The least of several turns counts, and the layouts take turns."""
    order = []

    def timer(choice):
        def clock():
            order.append(choice)
            return 9.0 if len(order) == 1 else 1.0 if choice.chunk == 1 else 2.0

        return clock

    assert (
        autotune.choose(
            Experiment.of(devices="1", rounds=100), 10, 1000, 5e6, LONG, timer, lambda _: None
        ).chunk
        == 1
    )
    assert order[0] != order[1] and order[0] == order[len(set(order))]


def test_autotune_does_not_remember_what_a_busy_machine_says(cache, monkeypatch):
    monkeypatch.setattr(autotune, "load_per_core", lambda: 2.0)
    clock = FakeClock(lambda c: 1.0 / c.chunk)
    choice = autotune.choose(
        Experiment.of(devices="1", rounds=100), 10, 1000, 5e6, LONG, clock, lambda _: None
    )
    assert choice.chunk == 4 and "busy" in choice.why and not (cache / "chunks").exists()


def test_autotune_keeps_the_rule_of_thumb_unless_another_is_clearly_faster(cache):
    close = FakeClock(lambda c: 1.0 if c.chunk == 1 else 0.96)
    assert (
        autotune.choose(
            Experiment.of(devices="1", rounds=100), 10, 1000, 5e6, LONG, close, lambda _: None
        ).chunk
        == 1
    )


def test_short_or_explicit_runs_are_not_measured(cache):
    forbidden = lambda c: pytest.fail("must not measure")
    quiet = lambda _: None
    short = autotune.choose(
        Experiment.of(devices="1", rounds=100),
        10,
        1000,
        5e6,
        autotune.LONG_RUN / 2,
        forbidden,
        quiet,
    )
    assert (
        autotune.choose(
            Experiment.of(devices="1", rounds=49), 10, 1000, 5e6, LONG, forbidden, quiet
        ).chunk
        == 1
    )
    assert short.chunk == 1 and "rule of thumb" in short.why
    given = autotune.choose(
        Experiment.of(devices="1", chunk="3"), 10, 1000, 5e6, LONG, forbidden, quiet
    )
    assert given.chunk == 3 and given.why == "as given"
    assert (
        autotune.choose(
            Experiment.of(devices="2", chunk="30"), 10, 1000, 5e6, LONG, forbidden, quiet
        ).chunk
        == 5
    )
    assert (
        autotune.choose(
            Experiment.of(devices="1", backend="vmap"), 10, 1000, 5e6, LONG, forbidden, quiet
        ).chunk
        == 10
    )
    automatic = autotune.choose(Experiment.of(), 3, 1000, 5e6, 0, forbidden, quiet)
    assert automatic.devices == min(3, layouts.available_devices())
    assert not cache.exists()


def test_several_processes_do_not_measure(cache, monkeypatch):
    """Each would see other times and compile another program."""
    monkeypatch.setattr(autotune.jax, "process_count", lambda: 2)
    choice = autotune.choose(
        Experiment.of(devices="2"),
        10,
        1000,
        5e6,
        LONG,
        lambda c: pytest.fail("must not measure"),
        print,
    )
    assert (choice.chunk, choice.devices) == (1, 2) and "several processes" in choice.why


def test_resolved_layout_is_stored_and_repeated(tmp_path, cache, monkeypatch):
    """chunk auto measured once: the run stores the answer, and resume repeats it without
    measuring."""
    monkeypatch.setattr(autotune, "LONG_RUN", 0.0)
    monkeypatch.setattr(autotune, "MANY_ROUNDS", 0)
    monkeypatch.setattr(
        autotune, "stopwatch", lambda sim, seed, net: lambda: 1.0 / sim.layout.chunk
    )
    options = ONE | dict(chunk="auto")
    first = run(
        "fedavg",
        tiny.federation(),
        out=tmp_path / "run",
        rounds=2,
        epochs=1,
        participation="1",
        **options,
    )
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["resolved"]
    assert (
        stored["chunk"] == first.setup.simulation.layout.chunk == 4
        and "s/round" in stored["chunk_why"]
    )
    monkeypatch.setattr(autotune, "stopwatch", lambda *a: pytest.fail("must not measure again"))
    os.environ["FEDJAX_SIM_CACHE"] = "off"  # (undone by the fixture)
    assert resume(tmp_path / "run", 3, fed=tiny.federation()).setup.simulation.layout.chunk == 4
