"""Several seeds of one set-up: one compilation, one run directory each, mean and standard deviation.

loop: one seed after another through the same compiled program (the default: every loop keeps its own bounds).
vmap: all seeds side by side in one program. Loops then run to the longest seed and server-level branches compute both
      sides, so on a CPU this is slower; on an accelerator with a small model it may pay. Measure.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.runner import checkpoint
from fedjax_sim.runner import execute as runner
from fedjax_sim.runner.directory import RunDirectory
from fedjax_sim.runner.files import write_json
from fedjax_sim.runner.prepare import Setup, initial_net
from fedjax_sim.runner.recorder import Recorder


def with_seed(setup: Setup, seed: int) -> Setup:
    """The same compiled simulation, another seed: other initial weights, cohorts and shuffles."""
    net = setup.net if setup.config.init else initial_net(setup.simulation.env.model, seed)
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, seed=seed), net=net)


def run_seeds(
    setup: Setup, number: int, out: pathlib.Path | None, mode: str = "loop", *, progress: bool = False
) -> list[runner.Result]:
    """Runs with seeds s, s+1, …; directories out/seed-s."""
    setups = [with_seed(setup, setup.config.seed + i) for i in range(number)]
    folders = [RunDirectory(out / f"seed-{s.config.seed}") if out is not None else None for s in setups]
    if mode == "vmap":
        return side_by_side(setups, folders, progress)
    results: list[runner.Result] = []
    for one, folder in zip(setups, folders, strict=True):
        results.append(runner.execute(one, folder, progress=progress, program=results[0].program if results else None))
    return results


def side_by_side(setups: list[Setup], folders: list[Any], progress: bool) -> list[runner.Result]:
    sim, config = setups[0].simulation, setups[0].config
    if config.state_on == "host":
        raise UserError("state-on host is not possible with seeds-mode 'vmap'; allowed: loop")
    for one, folder in zip(setups, folders, strict=True):
        if folder is not None:
            folder.create(one.config, one.resolved)
    stack = lambda trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
    pick = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    states = stack([sim.init(s.config.seed, s.net) for s in setups])
    data = jax.device_put(sim.data)
    recorders = [Recorder(s) for s in setups]
    began = time.perf_counter()
    many = jax.jit(jax.vmap(sim.run.__wrapped__, in_axes=(0, None, None)), donate_argnums=0)  # type: ignore[attr-defined]
    step = many.lower(states, data, jnp.int32(1)).compile()
    compile_seconds = time.perf_counter() - began
    timings: list[dict[str, Any]] = []
    done, speed = 0, None
    while done < config.rounds:
        ask = runner.segment_length(config, sim.capacity, done, speed)
        began = time.perf_counter()
        states, logs, scores = step(states, data, jnp.int32(ask))
        jax.block_until_ready(states)
        speed = (time.perf_counter() - began) / ask
        timings.append(dict(first_round=done + 1, last_round=done + ask, seconds=speed * ask, seconds_per_round=speed))
        logs, scores = layouts.as_numpy(logs), layouts.as_numpy(scores)
        for i, one in enumerate(setups):
            runner.collect(recorders[i], one, pick(states, i), data, pick(logs, i), pick(scores, i), done, ask)
        done += ask
        if progress:
            print(f"{config.method}: round {done} of {config.rounds}, {len(setups)} seeds side by side", file=sys.stderr)
    results = []
    for i, (one, folder) in enumerate(zip(setups, folders, strict=True)):
        state = pick(states, i)
        summary = runner.summarise(one, recorders[i], timings, compile_seconds)
        if folder is not None:
            folder.write(recorders[i], timings)
            checkpoint.save(folder.path / "checkpoints", state, one.config.hash(), one.config.keep)
            write_json(folder.path / "summary.json", summary)
        results.append(
            runner.Result(
                summary,
                recorders[i].rows,
                recorders[i].rounds,
                recorders[i].arrays(),
                state,
                one,
                folder.path if folder else None,
            )
        )
    return results


def seeds_line(summaries: list[dict[str, Any]]) -> str:
    """mean ± standard deviation over seeds, in percent.

    >>> seeds_line([{"best_global": 0.5, "last_global": 0.4, "client_acc_mean": None},
    ...             {"best_global": 0.6, "last_global": 0.4, "client_acc_mean": None}])
    'over 2 seeds: best 55.00 ± 7.07, last 40.00 ± 0.00'
    """
    parts = []
    for name, key in (("best", "best_global"), ("last", "last_global"), ("client mean", "client_acc_mean")):
        values = [s[key] for s in summaries if s.get(key) is not None and not math.isnan(s[key])]
        if len(values) == len(summaries):
            parts.append(f"{name} {100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f}")
    return f"over {len(summaries)} seeds: {', '.join(parts)}"
