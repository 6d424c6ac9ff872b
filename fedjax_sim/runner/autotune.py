"""`--chunk auto`: how many clients side by side, on how many devices. Measured once per set-up and
remembered.

A short run takes the rule of thumb (on a CPU one client at a time per core; on an accelerator all
at once). A long one times a round's local training under a few layouts and takes the rule of thumb
unless another is clearly faster. The answer is stored in the cache folder, keyed by everything it
depends on, unless the machine was busy; the resolved values are stored in the run, so that rerun
and resume use the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine import round as stages
from fedjax_sim.engine.simulation import Simulation
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner import interrupts
from fedjax_sim.runner.compilation import cache_folder
from fedjax_sim.runner.files import write_json
from fedjax_sim.types import Tree

LONG_RUN = 3e12  # floating-point operations from which measuring pays (about a minute of two cores)
REPEATS = 3
MANY_ROUNDS = 50  # rounds from which it pays: measuring takes as long as a handful
CLEARLY = 0.93  # a faster layout takes at most this share of the rule of thumb's seconds each time
BEHIND = 1.15  # a layout this many times slower than the best is not timed again
BUSY = 0.75  # runnable processes per core from which a measurement is not stored


@dataclasses.dataclass(frozen=True)
class Choice:
    chunk: int
    devices: int
    why: str


def rule_of_thumb(experiment: Experiment, cohort: int) -> Choice:
    """chunk and devices as given, else by the kind of device."""
    have, kind, compute = layouts.available_devices(), jax.default_backend(), experiment.compute
    usual = 1 if compute.backend in ("loop", "chunked", "vmap") else min(have, cohort)
    devices = compute.devices if isinstance(compute.devices, int) else usual
    share = -(-cohort // devices)
    if compute.backend == "vmap":
        return Choice(share, devices, "vmap: the whole cohort side by side")
    if isinstance(compute.chunk, int):
        return Choice(min(compute.chunk, share), devices, "as given")
    return Choice(1 if kind == "cpu" else share, devices, f"rule of thumb for {kind}")


def candidates(experiment: Experiment, cohort: int) -> list[Choice]:
    """A handful of layouts worth timing."""
    have, kind, compute = layouts.available_devices(), jax.default_backend(), experiment.compute
    devices = sorted({1, min(have, cohort)}, reverse=True)
    if isinstance(compute.devices, int):
        devices = [compute.devices]
    # one device, or all
    devices = {"chunked": devices[-1:], "sharded": devices[:1]}.get(compute.backend, devices)
    out = []
    for number in devices:
        share = -(-cohort // number)
        widths = [1, 4] if kind == "cpu" else [share, -(-share // 2), -(-share // 4), 8]
        if kind == "cpu" and number == 1 and len(devices) > 1:
            widths = [1]  # one device with threaded matrix products: only worth it for large models
        out += [Choice(w, number, "") for w in dict.fromkeys(min(w, share) for w in widths)]
    return out


def key_of(experiment: Experiment, cohort: int, floats: int, step_flops: float) -> str:
    """Hash of everything the answer depends on: model, batch, cohort, method, the devices."""
    facts = [
        experiment.method.name,
        experiment.model.name,
        sorted(experiment.model.options.items()),
        experiment.model.conv,
        experiment.training.batch_size,
        cohort,
        floats,
        experiment.compute.activation_type,
        str(experiment.compute.devices),
        experiment.compute.backend,
        round(step_flops),
        jax.default_backend(),
        jax.devices()[0].device_kind,
        layouts.available_devices(),
        layouts.host_cores(),
        jax.__version__,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def choose(
    experiment: Experiment,
    cohort: int,
    floats: int,
    step_flops: float,
    total_flops: float,
    timer: Callable[[Choice], Callable[[], float]],
    say: Callable[[str], None],
) -> Choice:
    """The layout of a run. `timer(choice)` compiles a round under a layout and returns its
    stopwatch."""
    thumb = rule_of_thumb(experiment, cohort)
    if experiment.compute.chunk != "auto" or experiment.compute.backend in ("loop", "vmap"):
        return thumb
    if jax.process_count() > 1:  # times would differ, and all must compile the same program
        return dataclasses.replace(thumb, why=f"{thumb.why}; several processes do not measure")
    name = f"{key_of(experiment, cohort, floats, step_flops)}.json"
    folder = cache_folder()
    file = folder / "chunks" / name if folder else None
    if file is not None and file.is_file():
        try:
            known = json.loads(file.read_text())
            why = f"measured before ({known['why']})"
            return Choice(int(known["chunk"]), int(known["devices"]), why)
        except (ValueError, KeyError, TypeError):
            pass  # an unreadable file: measure again
    options = candidates(experiment, cohort)
    if total_flops < LONG_RUN or experiment.training.rounds < MANY_ROUNDS or len(options) < 2:
        return thumb
    say(f"chunk auto: timing {len(options)} layouts, once for this set-up …")
    busy = load_per_core() > BUSY
    columns = take_turns({option: timer(option) for option in options}, thumb)
    best = clear_winner(columns, thumb)
    why = "s/round " + ", ".join(
        f"{min(c):.3f} with chunk {o.chunk} on {o.devices}" for o, c in columns.items()
    )
    if busy:
        why += "; not remembered, the machine was busy"
    elif file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"chunk": best.chunk, "devices": best.devices, "why": why})
    return Choice(best.chunk, best.devices, why)


def same(a: Choice, b: Choice) -> bool:
    return (a.chunk, a.devices) == (b.chunk, b.devices)


def take_turns(
    clocks: dict[Choice, Callable[[], float]], thumb: Choice
) -> dict[Choice, list[float]]:
    """Seconds of each layout, timed in turn so that noise hits all alike; one that is far behind
    is not timed again."""
    columns: dict[Choice, list[float]] = {option: [] for option in clocks}
    racing = list(clocks)
    for _ in range(REPEATS):
        for option in racing:
            columns[option].append(clocks[option]())
        last = {option: columns[option][-1] for option in racing}
        near = BEHIND * min(last.values())
        racing = [option for option in racing if same(option, thumb) or last[option] <= near]
        if len(racing) == 1:
            break
    return columns


def clear_winner(columns: Mapping[Choice, Sequence[float]], thumb: Choice) -> Choice:
    """The fastest layout if it beats the rule of thumb clearly and in every turn; else the latter.

    >>> one, four = Choice(1, 2, ""), Choice(4, 2, "")
    >>> # not in every turn
    >>> clear_winner({one: (1.0, 1.1, 1.2), four: (0.9, 0.8, 1.3)}, one).chunk
    1
    >>> clear_winner({one: (1.0, 1.1, 1.2), four: (0.9, 0.8, 1.1)}, one).chunk
    4
    """
    usual = next((c for o, c in columns.items() if same(o, thumb)), None)
    turns = max(map(len, columns.values()))
    whole = [option for option in columns if len(columns[option]) == turns]
    best = min(whole, key=lambda option: min(columns[option]))
    if usual is None or all(a < CLEARLY * b for a, b in zip(columns[best], usual, strict=True)):
        return best
    return thumb


def load_per_core() -> float:
    """Runnable processes per core over the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0] / layouts.host_cores()
    except (AttributeError, OSError):
        return 0.0


def stopwatch(sim: Simulation, seed: int, net: Tree) -> Callable[[], float]:
    """A function that returns the seconds of one round's local training; compiled and warm."""
    interrupts.check()
    state, data = layouts.place(sim.layout, sim.init(seed, net), sim.data)
    round_plan = jax.jit(sim.plan_round)(state, data)
    lowered = jax.jit(lambda s, d, o: stages.train(sim.stages, sim.open(d), s, o)).lower(
        state, data, round_plan
    )
    train = interrupts.in_thread(lowered.compile)
    jax.block_until_ready(train(state, data, round_plan))

    def seconds() -> float:
        interrupts.check()
        began = time.perf_counter()
        jax.block_until_ready(train(state, data, round_plan))
        return time.perf_counter() - began

    return seconds
