"""Drive a prepared run to its end, or resume one.

out/config.json    everything needed to repeat the run
out/rounds.csv     a row per round
out/metrics.csv    a row per evaluated round, without times
out/clients.npz    per-client counts per evaluation
out/timings.csv    seconds per segment
out/labels.npz     training examples per client and class
out/summary.json   the figures of the run
out/checkpoints/   the whole State
out/manifest.json  size and checksum of every file
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.experiment.tree import Stored
from fedjax_sim.methods.controllers import learns
from fedjax_sim.runner import checkpoint, provenance, run_directory, weights
from fedjax_sim.runner.compilation import first_process, start_jax
from fedjax_sim.runner.driver import Result, drive
from fedjax_sim.runner.files import exists
from fedjax_sim.runner.prepare import Objects, Setup, prepare
from fedjax_sim.runner.run_directory import RunDirectory
from fedjax_sim.runner.sinks import Sink


def resume(
    path: str | pathlib.Path,
    rounds: int | None,
    given: Objects,
    *,
    progress: bool | None = None,
    sinks: Sequence[Sink] = (),
    data_dir: str | None = None,
    say: Callable[[str], None] | None = None,
    resume_command: str = "",
) -> Result:
    """Continue a run directory from its newest checkpoint; see `fedjax_sim.resume`."""
    say = say or (lambda text: print(text, file=sys.stderr))
    directory = RunDirectory(pathlib.Path(path))
    if not directory.path.is_dir():
        raise UserError(f"there is no run directory '{path}'")
    stored = directory.read_config()
    provenance.check_given(path, stored, **vars(given))
    start_jax(stored.experiment.replace(devices=devices_before(stored)))
    if first_process():
        directory.lock.take()
    try:
        setup, found = reopened(directory, rounds, given, data_dir, say)
        more: dict[str, Any] = dict(progress=progress, sinks=sinks, say=say)
        more |= dict(resume_from=found, resume_command=resume_command)
        return execute(setup, directory, **more)
    finally:
        directory.lock.release()


def reopened(
    directory: RunDirectory,
    rounds: int | None,
    given: Objects,
    data_dir: str | None,
    say: Callable[[str], None],
) -> tuple[Setup, pathlib.Path | None]:
    """The set-up of a run directory, and the checkpoint from which it continues."""
    stored = directory.read_config()  # read again, now that the directory is locked
    experiment = stored.experiment
    begun = run_directory.unfinished(directory.path)  # killed before its first checkpoint
    found = None if begun else checkpoint.latest(directory.path / run_directory.CHECKPOINTS)
    start = 0 if found is None else checkpoint.read_meta(found)["round"]
    planned = experiment.training.rounds
    total = planned if rounds is None else rounds
    if total < start:
        raise UserError(
            f"rounds {total} is less than the {start} rounds already done in '{directory.path}'"
        )
    experiment = experiment.replace(
        rounds=total,
        chunk=stored.resolved.get("chunk", experiment.compute.chunk),
        devices=devices_now(stored, say),
        data_dir=data_dir or experiment.data.data_dir,
    )
    setup = prepare(experiment, **vars(given), stored=stored.found, say=say)
    if found is None:
        setup = with_first_weights(setup, directory.path)
    changes = extension(setup, planned) if total != planned else ""
    if changes and first_process():
        say(changes)
    return setup, found


def with_first_weights(setup: Setup, path: pathlib.Path) -> Setup:
    """`setup` of a run that starts over, with its first weights where they do not come from the
    seed."""
    init, wanted = setup.experiment.model.init, setup.found.initial_weights
    if not wanted:
        return setup
    like = jax.eval_shape(setup.simulation.env.model.init, jax.random.key(0))
    net = weights.load_net(init, like) if init else None
    if net is None or weights.checksum(net) != wanted:
        what = f"other weights than '{init}' holds now" if net else "weights given from Python"
        raise UserError(
            f"'{path}' has no checkpoint yet and was begun with {what}; begin it again with these"
        )
    return dataclasses.replace(setup, net=net, given_net=True)


def resumed(setup: Setup, path: pathlib.Path, **more: Any) -> Result | None:
    """Resume the run in `path` from its newest checkpoint; None if there is nothing to resume.
    more: see `resume`."""
    if not exists(path) or run_directory.empty(path):
        return None
    RunDirectory(path).check_same(setup.hash)
    if run_directory.unfinished(path):  # killed before its first checkpoint: begun again
        return None
    if not run_directory.saved_rounds(path / run_directory.CHECKPOINTS):
        raise UserError(
            f"'{path}' has ended, or is damaged, and has no checkpoint to resume from; it is left"
            " unchanged: move it away, or choose another --out"
        )
    more.setdefault("progress", False)
    experiment, rounds = setup.experiment, setup.experiment.training.rounds
    return resume(path, rounds, setup.given, data_dir=experiment.data.data_dir, **more)


def devices_before(stored: Stored) -> int | str:
    return stored.resolved.get("devices", stored.experiment.compute.devices)


def devices_now(stored: Stored, say: Callable[[str], None]) -> int | str:
    """As many devices as the run had, or as many as there are."""
    had, have = devices_before(stored), layouts.available_devices()
    if isinstance(had, str) or had <= have:
        return had
    say(
        f"the run was on {had} devices and there are {have}: it continues with the same values up"
        " to rounding"
    )
    return have


def extension(setup: Setup, planned: int) -> str:
    """What another number of rounds changes for a run planned with `planned`; "" for most runs."""
    train, rounds = setup.experiment.training, setup.experiment.training.rounds
    changes = []
    if train.schedule.startswith("cosine"):
        changes.append(f"the schedule of the learning rate still spans {train.schedule_rounds}")
    agent = setup.simulation.agent()
    if agent is not None and learns(agent.name):
        changes.append(
            f"the agent's exploration decay and the end of its episode refer to {rounds} rounds"
            f" from here on, so the result differs from a run planned with {rounds}"
        )
    text = f"{planned} rounds were planned and it continues to {rounds}: {'; '.join(changes)}"
    return text if changes else ""


def execute(setup: Setup, directory: RunDirectory | None, **more: Any) -> Result:
    """Drive one prepared run to its end; more: see `driver.drive`."""
    (result,) = drive([setup], [directory], **more)
    return result
