"""Start a run or continue one, from Python: `run` and `resume`; `execute` for a run that is prepared already.

out/config.json    everything needed to repeat the run          out/rounds.csv     a row per round
out/metrics.csv    a row per evaluated round, no clock          out/clients.npz    per-client counts per evaluation
out/timings.csv    seconds per segment                          out/checkpoints/   the whole State
out/summary.json   the figures of the run
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from fedjax_sim.errors import UserError
from fedjax_sim.runner import checkpoint
from fedjax_sim.runner.config import Config
from fedjax_sim.runner.directory import RunDirectory
from fedjax_sim.runner.driver import Result, drive
from fedjax_sim.runner.prepare import Setup, prepare


def run(
    method: Any = "fedavg",
    fed: Any = None,
    *,
    out: str | pathlib.Path | None = None,
    progress: bool = False,
    model: Any = None,
    net: Any = None,
    **options: Any,
) -> Result:
    """Run one method and return its Result; the Python form of `fedjax-sim run`.

    >>> result = run("fedavg", model="mlp", clients=4, participation="1", rounds=2, epochs=1)    # digits
    >>> [row["round"] for row in result.rows]
    [1, 2]
    """
    own = not isinstance(method, str)
    if isinstance(model, str):
        options, model = {**options, "model": model}, None
    config = Config(method=method.name if own else method, **options)
    setup = prepare(config, fed=fed, model=model, net=net, method=method if own else None)
    return execute(setup, RunDirectory(pathlib.Path(out)) if out is not None else None, progress=progress)


def resume(
    path: str | pathlib.Path,
    rounds: int | None = None,
    *,
    progress: bool = False,
    fed: Any = None,
    data_dir: str | None = None,
) -> Result:
    """Continue a run directory from its newest checkpoint; `rounds` may extend it."""
    directory = RunDirectory(pathlib.Path(path))
    if not directory.path.is_dir():
        raise UserError(f"there is no run directory '{path}'")
    config, resolved, _ = directory.read_config()
    folder = directory.path / "checkpoints"
    found = checkpoint.latest(folder)
    start = checkpoint.read_meta(found)["round"]
    total = config.rounds if rounds is None else rounds
    if total < start:
        raise UserError(f"rounds {total} is less than the {start} rounds already done in '{path}'")
    config = dataclasses.replace(
        config,
        rounds=total,
        chunk=str(resolved.get("chunk", config.chunk)),
        devices=str(resolved.get("devices", config.devices)),
        data_dir=data_dir or config.data_dir,
    )
    setup = prepare(config, fed=fed)
    return execute(setup, directory, progress=progress, resume_from=found)


def execute(
    setup: Setup,
    directory: RunDirectory | None,
    *,
    progress: bool = False,
    resume_from: pathlib.Path | None = None,
    say: Callable[[str], None] | None = None,
    program: Callable | None = None,
) -> Result:
    """Drive one prepared run to its end; see `driver.drive`."""
    (result,) = drive([setup], [directory], progress=progress, resume_from=resume_from, say=say, program=program)
    return result


__all__ = ["Result", "execute", "resume", "run"]
