"""k values of one setting: compiled anew for each, one after another through one program, or side
by side (`--vmap`).

    python -m benchmarks.sweep_values [--networks mlp,lenet5] [--values 2,4,8] [--rounds 30]
    [--repeat 5] [--json FILE]

*anew* is what a value costs where it is part of the program, *after* one program for all values on
all devices, *beside* one program in which the values are a leading axis, on one device. Compilation
is measured once per program, without any cache; rounds are timed in turn (after, beside, beside,
after, …), the best of a few each. The columns are seconds of k × T rounds with their compilation,
as a ratio to *after*: below 1 it pays. `round` is the ratio without compilation, which is what is
left of it in long runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

PER_CALL = 2  # rounds between two looks at the clock, the second with an evaluation


class Side:
    """Prepared runs and their program: one, or several side by side."""

    def __init__(self, setups: Sequence[Any]):
        import jax

        from fedjax_sim.engine import layout as layouts
        from fedjax_sim.runner import compilation, driver, vmapped

        states = [setup.first_state() for setup in setups]
        state = vmapped.stack_states(setups, states)
        data = vmapped.stack_data([setup.simulation.data for setup in setups])
        self.state, self.data = layouts.place(setups[0].simulation.layout, state, data)
        compilation.forget()
        began = time.perf_counter(), time.process_time()
        self.step: Callable = driver.compiled(setups, self.state, self.data)
        self.compile_s, self.compile_cpu_s = (
            time.perf_counter() - began[0],
            time.process_time() - began[1],
        )
        self.wait = jax.block_until_ready
        self.best = self.best_cpu = float("inf")
        self.turn()  # warm
        self.best = self.best_cpu = float("inf")

    def turn(self) -> None:
        """One call; the best seconds per round are kept."""
        import jax.numpy as jnp
        import numpy as np

        began = time.perf_counter(), time.process_time()
        self.state = self.wait(
            self.step(self.state, self.data, jnp.int32(PER_CALL), np.bool_(True))[0]
        )
        self.best = min(self.best, (time.perf_counter() - began[0]) / PER_CALL)
        self.best_cpu = min(self.best_cpu, (time.process_time() - began[1]) / PER_CALL)


def ratios(k: int, rounds: int, after: Side, beside: Side, clock: str = "") -> dict[str, float]:
    """Seconds of k × rounds rounds with their compilation, over those of one program for one value
    after another."""
    cost = lambda side: getattr(side, f"compile{clock}_s")
    each = lambda side: getattr(side, f"best{clock}")
    one = cost(after) + k * rounds * each(after)
    return {
        "anew": k * (cost(after) + rounds * each(after)) / one,
        "beside": (cost(beside) + rounds * each(beside)) / one,
        "round": each(beside) / (k * each(after)),
    }


def measure(network: str, k: int, rounds: int, repeat: int) -> dict[str, Any]:
    from fedjax_sim import Experiment, prepare
    from fedjax_sim.runner.many import with_values

    config = dict(model=network, rounds=10**6, eval_every=PER_CALL, epochs=1.0, participation="0.5")
    alone = prepare(Experiment.of("fedavg", **config), measure=False)
    values = [0.01 * (i + 1) for i in range(k)]
    setups = with_values(
        prepare(Experiment.of("fedavg", devices="1", **config), measure=False), "lr", values
    )
    after, beside = Side([alone]), Side(setups)
    for i in range(repeat):
        for side in (after, beside) if i % 2 == 0 else (beside, after):
            side.turn()
    return dict(
        network=network,
        values=k,
        rounds=rounds,
        devices=alone.simulation.layout.devices,
        compile_after_s=after.compile_s,
        compile_beside_s=beside.compile_s,
        round_after_s=after.best,
        round_beside_s=beside.best,
        wall=ratios(k, rounds, after, beside),
        processor=ratios(k, rounds, after, beside, "_cpu"),
    )


def line(row: dict[str, Any]) -> str:
    """
    >>> ratio = dict(anew=2.0, beside=0.5, round=0.4)
    >>> line(
    ...     dict(network="mlp", values=2, rounds=9, devices=1, wall=ratio, processor=ratio)
    ... ).endswith("pays")
    True
    """
    cells = [
        f"{row[kind][name]:8.2f}"
        for kind in ("wall", "processor")
        for name in ("anew", "beside", "round")
    ]
    pays = (
        "pays" if row["wall"]["beside"] < 1 and row["processor"]["beside"] < 1 else "does not pay"
    )
    return (
        f"{row['network']:10s} {row['values']:3d} {row['rounds']:6d} {row['devices']:4d}"
        f" {''.join(cells)}  {pays}"
    )


HEAD = (
    f"{'network':10s} {'k':>3s} {'rounds':>6s} {'dev':>4s} {'wall: anew, beside, round':>24s}"
    f" {'processor: the same':>24s}"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", default="mlp,lenet5")
    parser.add_argument("--values", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", default=None)
    options = parser.parse_args(argv)
    os.environ["FEDJAX_SIM_CACHE"] = "off"
    print(HEAD)
    rows = []
    for network in options.networks.split(","):
        for k in map(int, options.values.split(",")):
            rows.append(measure(network, k, options.rounds, options.repeat))
            print(line(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
