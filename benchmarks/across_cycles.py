"""What a federation-round costs on an accelerator that this machine does not have, as its compiler
estimates it.

One round of P policies on one federation, all participants of all policies side by side. A cost
model, not a stopwatch: cycles are the TPU compiler's own estimates; for a GPU there are none, only
the bytes that its kernels touch, at the bandwidth of its memory.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks import hlo
from benchmarks.device_programs import library, whole
from fedjax_sim.engine import episode as episodes
from fedjax_sim.engine.keys import seed_key
from fedjax_sim.engine.round import one_round
from fedjax_sim.engine.simulation import Simulation, blank_state
from fedjax_sim.platform import lowering_for
from fedjax_sim.runner.across.evolve import TUNING, Problem
from fedjax_sim.types import State

POLICIES = (1, 128, 1024)
PARTS = "agent.parameters"
AXES: Any = State(None, None, 0, 0, 0)  # all policies are at the same round, with the same key


def longest(sizes: np.ndarray, participants: int, batch: int, epochs: float) -> int:
    """Local steps of the largest of `participants` clients, the mean over cohorts drawn at random;
    sizes [N]: training examples."""
    rng = np.random.default_rng(0)
    cohorts = [rng.choice(sizes, participants, replace=False).max() for _ in range(1000)]
    return round(float(np.mean(epochs * np.ceil(np.array(cohorts) / batch))))


def compiled_round(sim: Simulation, draw: episodes.Draw, policies: int, device: Any) -> Any:
    """One round of `policies` policies, compiled for `device`."""

    def begin(parameters: Any, draw: episodes.Draw) -> State:
        net = sim.env.model.init(jax.random.key(0))
        state = blank_state(sim.stages, sim.open(draw.data), seed_key(0), net)
        return episodes.replace_at(state, PARTS, parameters)

    def rounds(states: State, draw: episodes.Draw) -> State:
        env = sim.open(draw.data)
        one = lambda state: one_round(sim.stages, env, state, draw.data.dropout)[0]
        return jax.vmap(one, (AXES,), AXES)(states)

    with lowering_for(device.platform):
        like = jnp.zeros((policies, sim.agent().num_parameters))
        states = jax.eval_shape(jax.vmap(begin, (0, None), AXES), like, draw)
    there = SingleDeviceSharding(device.devices[0])
    shapes = library().abstract(states, there), library().abstract(draw, there)
    return library().compile_for(device, rounds, shapes)


def row(problem: Problem, policies: int, device: Any) -> dict[str, Any]:
    """Costs per federation-round; kernels are those of the whole program."""
    layout = library().layout_on(device, problem.sizes.most_participants)
    with lowering_for(device.platform):
        sim = problem.simulation(layout=layout)
        draw = episodes.only(problem.draws(sim, TUNING, 0, 1).draw, 0)
    training = problem.config.training
    sizes = np.asarray(draw.data.fed.size["train"])[: int(draw.clients)]
    steps = longest(sizes, int(draw.participants), int(training.batch_size), training.epochs)
    root = hlo.tree(hlo.parse(compiled_round(sim, draw, policies, device).as_text()))
    hlo.fill(root, steps)
    found = whole(root, device.kind)
    cycles = found["cycles_per_round"]
    return dict(
        device=device.name,
        policies=policies,
        steps=steps,
        cycles=None if cycles is None else cycles / policies,
        clock=device.kind.clock,
        kernels=found["kernels_per_round"],
        unpriced=found["unpriced_per_round"],
        unknown_loops=found["unknown_loops"],
        mb=found["mb_per_round"] / policies,
        memory_us=found["roofline_us_per_round"] / policies,
    )


def write(devices: Iterable[str], problem: Problem, work: pathlib.Path) -> None:
    """cycles.json; a row is there as soon as it is known."""
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in devices:
        for policies in POLICIES:
            rows.append(row(problem, policies, library().target_device(name)))
            print(rows[-1], flush=True)
            (work / "cycles.json").write_text(json.dumps(rows, indent=1))
