"""Start a run or continue one, from Python: `run` and `resume`; `execute` for a run that is
prepared already.

out/config.json    everything needed to repeat the run
out/rounds.csv     a row per round
out/metrics.csv    a row per evaluated round, no clock
out/timings.csv    seconds per segment
out/clients.npz    per-client counts per evaluation
out/labels.npz     training examples per client and class
out/checkpoints/   the whole State
out/summary.json   the figures of the run
out/manifest.json  size and checksum of every file
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.methods.controllers import learns
from fedjax_sim.options import names as list_names
from fedjax_sim.options import shown
from fedjax_sim.runner import checkpoint, provenance, run_directory, weights
from fedjax_sim.runner.compilation import start_jax
from fedjax_sim.runner.config import Config, check
from fedjax_sim.runner.driver import Result, drive
from fedjax_sim.runner.facts import check_reach
from fedjax_sim.runner.files import exists
from fedjax_sim.runner.keywords import sorted_out
from fedjax_sim.runner.prepare import Setup, prepare
from fedjax_sim.runner.run_directory import RunDirectory, saved_rounds
from fedjax_sim.runner.sinks import SINKS, Callback, Segment, Sink, named
from fedjax_sim.types import Tree


def run(
    method: str | Method = "fedavg",
    fed: Federation | None = None,
    *,
    out: str | pathlib.Path | None = None,
    progress: bool | None = None,
    callback: Callable[[Segment], Any] | None = None,
    log: str | Sequence[str | Sink] = (),
    model: Any = None,
    net: Tree | None = None,
    optimizer: Any = None,
    loss: Any = None,
    **options: Any,
) -> Result:
    """Run one method and return its Result; the Python form of `fedjax-sim run`.

    options: fields of `Config`, and options of the method by their names. method, model, optimizer:
    names or objects of your own, such as optax.adamw(1e-3); fed: data of your own, instead of
    `dataset` and what belongs to it; net: initial weights; cohorts: the participants of every
    round, taken in turn, instead of drawn ones. progress: a bar or lines (default: a line only
    where compiling takes long). callback: called with every `Segment` (its rounds, its rows); log:
    where else the numbers go, names as in `--log` ("tensorboard,wandb") or sinks of your own.

    >>> # digits
    >>> result = run("fedavg", model="mlp", clients=4, participation=1, rounds=2, epochs=1)
    >>> [row["round"] for row in result.rows]
    [1, 2]
    >>> run(
    ...     "fedprox", model="mlp", clients=4, cohorts=[[0, 1], [2, 3]], rounds=1, mu=0.1
    ... ).setup.config.options
    {'mu': 0.1}
    """
    sinks = sinks_of(callback, log)
    setup = set_up(method, fed, model=model, net=net, optimizer=optimizer, loss=loss, **options)
    directory = RunDirectory(pathlib.Path(out)) if out is not None else None
    return execute(setup, directory, progress=progress, sinks=sinks)


def set_up(
    method: str | Method = "fedavg",
    fed: Federation | None = None,
    *,
    model: Any = None,
    net: Tree | None = None,
    optimizer: Any = None,
    loss: Any = None,
    load: Callable[[Config], Federation] | None = None,
    **options: Any,
) -> Setup:
    """A run as `run` takes it, prepared. load: reads the data that the options name (default:
    afresh)."""
    if not isinstance(method, str | Method):
        raise UserError(
            "method is a name or a Method, such as fedjax_sim.FedProx(mu=0.1), not"
            f" {shown(repr(method))}"
        )
    if isinstance(model, str):
        options, model = {**options, "model": model}, None
    if isinstance(optimizer, str):
        options, optimizer = {**options, "optimizer": optimizer}, None
    if isinstance(loss, str):
        options, loss = {**options, "loss": loss}, None
    name = method if isinstance(method, str) else method.name
    config = Config(method=name, **sorted_out(method, fed, model, options))
    loaded = fed is None and load is not None
    if fed is None and load is not None:
        check(config)
        start_jax(config)
        fed = load(config)
    setup = prepare(
        config,
        fed=fed,
        model=model,
        net=net,
        method=None if isinstance(method, str) else method,
        optimizer=optimizer,
        loss=loss,
        loaded=loaded,
    )
    check_reach(setup)
    return setup


def sinks_of(
    callback: Callable[[Segment], Any] | None, log: str | Sequence[str | Sink]
) -> list[Sink]:
    """A function and names or sinks as sinks."""
    items = list_names(log) if isinstance(log, str) else tuple(log)
    for item in items:
        if not isinstance(item, (str, Sink)):
            raise UserError(
                f"log takes names ({', '.join(SINKS)}) and objects of fedjax_sim.runner.sinks.Sink,"
                f" not {item!r}"
            )
    given = [item if isinstance(item, Sink) else named([item])[0] for item in items]
    return [*([Callback(callback)] if callback is not None else []), *given]


def resume(
    path: str | pathlib.Path,
    rounds: int | None = None,
    *,
    progress: bool | None = None,
    callback: Callable[[Segment], Any] | None = None,
    log: str | Sequence[str | Sink] = (),
    fed: Federation | None = None,
    method: Method | None = None,
    model: Any = None,
    optimizer: Any = None,
    loss: Any = None,
    data_dir: str | None = None,
    say: Callable[[str], None] | None = None,
    again: str = "",
) -> Result:
    """Continue a run directory from its newest checkpoint, or from its start where it has none yet;
    `rounds` may extend it.

    fed, method, model, optimizer, loss: what was given as an object when the run was started; it
    must be the same. On fewer devices than before the run goes on with other rounding. say: where
    remarks go (default: the standard error stream). again: what goes on after an interrupt with all
    that was asked for (default: this run's own command).
    """
    say = say or (lambda text: print(text, file=sys.stderr))
    directory = RunDirectory(pathlib.Path(path))
    if not directory.path.is_dir():
        raise UserError(f"there is no run directory '{path}'")
    config, resolved, _ = directory.read_config()
    given = dict(fed=fed, method=method, model=model, optimizer=optimizer, loss=loss)
    provenance.check_given(path, config, **given)
    start_jax(dataclasses.replace(config, devices=str(resolved.get("devices", config.devices))))
    if jax.process_index() == 0:
        directory.lock.take()
    try:
        more = dict(progress=progress, sinks=sinks_of(callback, log), again=again)
        return _resume(directory, rounds, data_dir, given, say, **more)
    finally:
        directory.lock.release()


def _resume(
    directory: RunDirectory,
    rounds: int | None,
    data_dir: str | None,
    given: dict[str, Any],
    say: Callable[[str], None],
    **more: Any,
) -> Result:
    config, resolved, _ = directory.read_config()  # again: nobody else changes it now
    begun = run_directory.unfinished(directory.path)  # killed before its first checkpoint
    found = None if begun else checkpoint.latest(directory.path / run_directory.CHECKPOINTS)
    start = 0 if found is None else checkpoint.read_meta(found)["round"]
    planned, total = config.rounds, config.rounds if rounds is None else rounds
    if total < start:
        raise UserError(
            f"rounds {total} is less than the {start} rounds already done in '{directory.path}'"
        )
    config = dataclasses.replace(
        config,
        rounds=total,
        chunk=str(resolved.get("chunk", config.chunk)),
        devices=str(devices_now(config, resolved, say)),
        data_dir=data_dir or config.data_dir,
    )
    setup = prepare(config, **given, going_on=True, say=say)
    if found is None:
        setup = with_first_weights(setup, directory.path)
    changes = extension(setup, planned) if total != planned else ""
    if changes and jax.process_index() == 0:
        say(changes)
    return execute(setup, directory, resume_from=found, say=say, **more)


def with_first_weights(setup: Setup, path: pathlib.Path) -> Setup:
    """A run that begins again, with the weights that it began with where these do not come from its
    seed."""
    config = setup.config
    if not config.initial_weights:
        return setup
    like = jax.eval_shape(setup.simulation.env.model.init, jax.random.key(0))
    net = weights.load_net(config.init, like) if config.init else None
    if net is None or weights.checksum(net) != config.initial_weights:
        what = (
            f"other weights than '{config.init}' holds now"
            if net is not None
            else "weights given from Python"
        )
        raise UserError(
            f"'{path}' has no checkpoint yet and was begun with {what}; begin it again with these"
        )
    return dataclasses.replace(setup, net=net, given_net=True)


def resume_begun(
    setup: Setup, path: pathlib.Path, *, sinks: Sequence[Sink] = (), **more: Any
) -> Result | None:
    """A run that was begun in `path` to its end, from its newest checkpoint; None where nothing is
    left to go on from."""
    if not exists(path) or run_directory.empty(path):
        return None
    RunDirectory(path).check_same(setup.config)
    if run_directory.unfinished(path):  # killed before its first checkpoint: begun again
        return None
    if not saved_rounds(path / run_directory.CHECKPOINTS):
        raise UserError(
            f"'{path}' has ended, or is damaged, and has no checkpoint to go on from; it is left as"
            " it is: move it away, or choose another --out"
        )
    return resume(path, setup.config.rounds, data_dir=setup.config.data_dir, log=sinks, **more)


def devices_now(config: Config, resolved: dict[str, Any], say: Callable[[str], None]) -> Any:
    """As many devices as the run had, or those there are."""
    had, have = resolved.get("devices", config.devices), layouts.available_devices()
    if str(had) == "auto" or int(had) <= have:
        return had
    say(
        f"the run was on {had} devices and there are {have}: it goes on with the same values up to"
        " rounding"
    )
    return have


def extension(setup: Setup, planned: int) -> str:
    """What another number of rounds changes for a run that was planned with `planned`; nothing for
    most runs."""
    config, rounds = setup.config, setup.config.rounds
    changes = []
    if config.schedule.startswith("cosine"):
        changes.append(f"the learning rate stays laid over {config.schedule_rounds} rounds")
    agent = setup.simulation.agent()
    if agent is not None and learns(agent.name):
        changes.append(
            "what the agent takes from the number of rounds (the decay of its exploration, the end"
            f" of its episode) refers to {rounds} from here on, so a run planned with {rounds}"
            " differs"
        )
    return (
        f"{planned} rounds were planned and it goes on to {rounds}: {'; '.join(changes)}"
        if changes
        else ""
    )


def execute(setup: Setup, directory: RunDirectory | None, **more: Any) -> Result:
    """Drive one prepared run to its end. more: see `driver.drive`."""
    (result,) = drive([setup], [directory], **more)
    return result


__all__ = ["Result", "execute", "resume", "run", "set_up"]
