"""`--dry-run --device`: sentences, sizes, and what is compiled. The device is a CPU that is called
by another name."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import pytest
from commands import SMALL, empty_folder, refused

from fedjax_sim import accelerators
from fedjax_sim.accelerators import DEVICES, Device
from fedjax_sim.cli.main import main
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner import ahead
from fedjax_sim.runner.facts import tree_bytes
from fedjax_sim.runner.prepare import load_federation

__all__ = ["empty_folder"]  # used by every test

DRY_RUN = [*SMALL, "--dry-run", "--device", "v5e"]
libtpu = pytest.mark.skipif(
    not accelerators.installed("tpu"), reason="the extra [aot] is not installed"
)


@pytest.fixture
def stand_in(monkeypatch):
    """v5e is one CPU device, v5e:2x2 the CPU devices that are there."""

    def device(name: str) -> Device:
        kind, topology = accelerators.parse(name)
        return Device(name, kind, tuple(jax.devices()[: 2 if topology else 1]))

    monkeypatch.setattr(accelerators, "target_device", device)
    return device


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (
            ["--dry-run", "--device", "v9"],
            "unknown device 'v9'; allowed: a100, h100, v5e, v5p, v6e",
        ),
        (
            ["--dry-run", "--device", "v5e:big"],
            "topology 'big' of device 'v5e:big' cannot be read; use v5e:2x2",
        ),
        (["--device", "v5e"], "--device needs --dry-run; a run uses the devices that JAX finds"),
        (
            ["--dry-run", "--device", "v5e", "--devices", "2"],
            "devices 2 does not fit device 'v5e', which is 1",
        ),
        (
            ["--dry-run", "--device", "v5e", "--backend", "loop"],
            "backend 'loop' compiles no rounds",
        ),
        (
            ["--dry-run", "--device", "v5e", "--vmap", "lr=0.1,0.2"],
            "--device is for one run, not several side by side",
        ),
    ],
)
def test_refused_in_one_sentence(argv, sentence, capsys, stand_in):
    without = [w for i, w in enumerate(SMALL) if "--devices" not in (w, SMALL[i - 1])]
    assert sentence in refused(capsys, "run", "fedavg", *without, *argv)


@pytest.mark.parametrize("name, title", [("v5e", "TPU v5e"), ("h100", "NVIDIA H100 SXM")])
def test_a_missing_compiler_is_one_sentence(name, title, capsys, monkeypatch):
    from jax.experimental import topologies

    accelerators.target_device.cache_clear()
    monkeypatch.setattr(accelerators, "installed", lambda platform: False)
    monkeypatch.setattr(
        topologies,
        "get_topology_desc",
        lambda **asked: pytest.fail("not asked") if not asked else 1 / 0,
    )
    said = refused(capsys, "run", "fedavg", *SMALL, "--dry-run", "--device", name)
    assert (
        f"device '{name}' needs the compiler of {title}; install it with: pip install"
        " 'fedjax-sim[aot]'" in said
    )


def test_what_a_compiler_refuses_is_one_sentence(capsys, monkeypatch):
    from jax.experimental import topologies

    def refuse(**asked):
        raise RuntimeError("not divisible\nby anything")

    accelerators.target_device.cache_clear()
    monkeypatch.setattr(accelerators, "installed", lambda platform: True)
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    said = refused(capsys, "run", "fedavg", *SMALL, "--dry-run", "--device", "v5e:3x5")
    assert "the compiler for TPU v5e refuses device 'v5e:3x5': not divisible" in said


def test_a_tpu_that_is_there_is_left_alone(monkeypatch):
    monkeypatch.setattr(accelerators.os, "environ", {})
    accelerators.quiet_environment()
    assert (
        accelerators.os.environ["JAX_PLATFORMS"] == "cpu"
        and "TPU_SKIP_MDS_QUERY" in accelerators.os.environ
    )
    monkeypatch.setattr(accelerators.os, "environ", {"JAX_PLATFORMS": "tpu"})
    monkeypatch.setattr(accelerators, "here", lambda platform: True)
    accelerators.quiet_environment()
    assert accelerators.os.environ == {"JAX_PLATFORMS": "tpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


def config_of(**more) -> Experiment:
    small = dict(
        model="mlp",
        model_options={"hidden": "8"},
        clients=6,
        participation="0.5",
        rounds=2,
        batch_size=16,
    )
    return Experiment.of(more.pop("method", "scaffold"), **(small | more))


def test_the_whole_cohort_side_by_side(stand_in):
    """On a CPU it would be one client at a time."""
    config = config_of()
    fed = load_federation(config)
    assert ahead.prepare_for("v5e", config, fed).simulation.layout.chunk == 3
    assert ahead.prepare_for("v5e", config_of(chunk="2"), fed).simulation.layout.chunk == 2
    assert ahead.prepare_for("v5e:2x2", config, fed).simulation.layout.chunk == 2


@pytest.mark.parametrize("state_on, rows", [("device", 6), ("host", 3)])
def test_arguments_are_what_the_run_holds(stand_in, state_on, rows):
    """Nothing is allocated to find out: the shapes are those of the first State."""
    config = config_of(state_on=state_on)
    setup = ahead.prepare_for("v5e", config, load_federation(config))
    program, arguments = ahead.rounds_of(setup, stand_in("v5e"))
    state = setup.first_state()
    like = lambda tree: jax.tree.map(lambda a: (np.shape(a), str(np.asarray(a).dtype)), tree)
    expected = jax.tree.map(lambda a: (a.shape, str(a.dtype)), arguments[0])
    if state_on == "host":
        state = state._replace(clients=jax.tree.map(lambda a: a[:rows], state.clients))
    assert like(state) == expected
    assert {a.shape[0] for a in jax.tree.leaves(arguments[0].clients)} == {rows}
    assert jax.eval_shape(program, *arguments)[0].t.dtype == np.int32


def test_agents_are_part_of_the_state(stand_in):
    config = config_of(method="fedpolicy")
    setup = ahead.prepare_for("v5e", config, load_federation(config))
    like = lambda tree: jax.tree.map(lambda a: (np.shape(a), str(a.dtype)), tree)
    assert like(accelerators.state_like(setup.simulation, setup.net)) == like(setup.first_state())


@pytest.mark.parametrize("name", ["v5e", "v5e:2x2"])
def test_fits_from_the_compilers_account(stand_in, name):
    config = config_of()
    setup = ahead.prepare_for(name, config, load_federation(config))
    found = ahead.fits(setup, name)
    assert found["fits"] and found["memory"] == DEVICES["v5e"].memory
    assert (
        found["needed"]
        == found["arguments"] + found["scratch"] + found["results"] - found["donated"]
    )
    many, stored = found["devices"], accelerators.state_like(setup.simulation, setup.net)
    state_bytes = tree_bytes(stored._replace(clients=())) + tree_bytes(stored.clients) // many
    assert found["donated"] == state_bytes  # the whole state, and nothing else
    data = tree_bytes(jax.eval_shape(lambda d: d, setup.simulation.data))
    assert state_bytes + 0.9 * data <= found["arguments"] <= state_bytes + data + 64


def test_does_not_fit(stand_in, monkeypatch):
    config = config_of()
    setup = ahead.prepare_for("v5e", config, load_federation(config))
    stats = types.SimpleNamespace(
        argument_size_in_bytes=10 << 30,
        temp_size_in_bytes=7 << 30,
        output_size_in_bytes=9 << 30,
        alias_size_in_bytes=9 << 30,
    )
    compiled = types.SimpleNamespace(memory_analysis=lambda: stats)
    monkeypatch.setattr(accelerators, "compile_for", lambda *a: compiled)
    found = ahead.fits(setup, "v5e")
    assert (found["needed"], found["fits"]) == (17 << 30, False)

    def refuse(*a):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (22.00G) exceeds"
        )

    monkeypatch.setattr(accelerators, "compile_for", refuse)
    found = ahead.fits(setup, "v5e")
    assert (found["needed"], found["fits"], found["arguments"]) == (22 << 30, False, None)


def test_the_command_says_it(stand_in, capsys):
    assert main(["run", "scaffold", *DRY_RUN]) == 0
    out = capsys.readouterr().out
    assert "\n  fits TPU v5e: " in out and "of 16.9114 GB (arguments" in out
    assert main(["compare", "fedavg", "scaffold", *DRY_RUN, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [
        (one["method"], one["on_device"]["device"], one["on_device"]["fits"]) for one in events
    ] == [("fedavg", "v5e", True), ("scaffold", "v5e", True)]
    profiled = [word for word in DRY_RUN if word != "--quiet"]
    assert main(["profile", "fedavg", *profiled]) == 0
    assert "\n  fits TPU v5e: " in capsys.readouterr().out


@libtpu
def test_a_real_compiler(capsys):
    accelerators.target_device.cache_clear()
    assert main(["run", "scaffold", *DRY_RUN]) == 0
    assert "\n  fits TPU v5e: " in capsys.readouterr().out
