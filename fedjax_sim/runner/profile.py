"""Seconds of each stage of a round, each compiled as a program of its own and run on the same
State; the best of several repetitions counts. Their sum is a little more than the fused round,
because nothing is shared or overlapped between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine import round as stages
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Controlled
from fedjax_sim.runner import interrupts
from fedjax_sim.runner.prepare import Setup, in_its_floats


def best_of(fn: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """(least seconds, result) of `fn()`; the first call, which compiles, is not timed."""
    out = interrupts.in_thread(lambda: jax.block_until_ready(fn()))
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        out = jax.block_until_ready(fn())
        least = min(least, time.perf_counter() - began)
    return least, out


@in_its_floats
def stage_seconds(
    setup: Setup, repeats: int = 3, say: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Seconds of: plan (sampling, observing, acting), local, aggregation, controller, evaluation,
    and a whole round. say: called with a line of progress for each."""
    sim = setup.simulation
    if setup.experiment.compute.state_on == "host":
        raise UserError("profile takes a round apart on the device; allowed: --state-on device")
    state, data = layouts.place(sim.layout, setup.first_state(), sim.data)
    r = sim.stages
    make = jax.jit(sim.plan_round)
    train = jax.jit(lambda s, d, o: stages.train(r, sim.open(d), s, o))
    aggregate = jax.jit(lambda s, d, *rest: stages.aggregate(r, sim.open(d), s, *rest))
    learn = jax.jit(lambda s, d, *rest: stages.learn(r, sim.open(d), s, *rest))
    whole = jax.jit(sim.round)
    seconds: dict[str, float] = {}

    def timed(name: str, fn: Callable[[], Any]) -> Any:
        say(f"{setup.experiment.method.name}: compiling and timing {name} …")
        seconds[name], out = best_of(fn, repeats)
        return out

    round_plan = timed("plan", lambda: make(state, data))
    outcome = timed("local", lambda: train(state, data, round_plan))
    server, cohort, _ = timed("aggregation", lambda: aggregate(state, data, round_plan, outcome))
    timed("controller", lambda: learn(state, data, round_plan, server, outcome.clients, cohort))
    if sim.method.ask(Controlled) is None:
        seconds["controller"] = 0.0
    timed("evaluation", lambda: sim.evaluate(state, data))
    timed("round (fused, no evaluation)", lambda: whole(state, data))
    return seconds
