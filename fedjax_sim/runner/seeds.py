"""Several seeds of one set-up: one compilation, one run directory each, mean and standard
deviation.

loop: one seed after another through the same compiled program (the default: every loop keeps its
own bounds). vmap: all seeds side by side in one program. Loops then run to the longest seed and
server-level branches compute both
      sides, so on a CPU this is slower; on an accelerator with a small model it may pay. Measure.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from fedjax_sim import options
from fedjax_sim.errors import UserError
from fedjax_sim.runner.driver import Result, drive
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.run_directory import RunDirectory
from fedjax_sim.runner.weights import initial_net

MODES = ("loop", "vmap")


def with_seed(setup: Setup, seed: int) -> Setup:
    """The same compiled simulation, another seed: other cohorts and shuffles, and other initial
    weights unless given."""
    net = setup.net if setup.given_net else initial_net(setup.simulation.env.model, seed)
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, seed=seed), net=net)


def run_seeds(
    setup: Setup,
    number: int,
    out: str | pathlib.Path | None,
    mode: str = "loop",
    *,
    progress: bool | None = None,
    **more: Any,
) -> list[Result]:
    """Runs with seeds s, s+1, …; directories out/seed-s. progress, more: see `driver.drive`."""
    options.choice("seeds-mode", mode, MODES)
    if number < 1:
        raise UserError(f"seeds {number} is not allowed; use a whole number of 1 or more")
    setups = [with_seed(setup, setup.config.seed + i) for i in range(number)]
    root = pathlib.Path(out) if out is not None else None
    folders = [
        RunDirectory(root / f"seed-{s.config.seed}") if root is not None else None for s in setups
    ]
    if mode == "vmap":
        return drive(setups, folders, progress=progress, **more)
    results: list[Result] = []
    for one, folder in zip(setups, folders, strict=True):
        program = results[0].program if results else None
        results += drive([one], [folder], progress=progress, program=program, **more)
    return results
