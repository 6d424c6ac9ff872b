"""Many runs of one set-up: seeds, or values of one real setting; each has its own run directory,
like a separate run.

loop (the default): one after another through the same compiled program. vmap: side by side in one
program (`vmapped`); each loop then takes as long as in the longest run and server-level branches
compute both sides, so it is slower on a CPU; on an accelerator with a small model it may be faster.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedjax_sim import options
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.records import Numbers, numbers_of
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.settings import AUTO, GIVEN
from fedjax_sim.local import optim, optimizers
from fedjax_sim.methods import make_method
from fedjax_sim.options import like, shown
from fedjax_sim.runner import prepare as preparing
from fedjax_sim.runner.compilation import start_jax
from fedjax_sim.runner.driver import Result, drive
from fedjax_sim.runner.execute import resumed
from fedjax_sim.runner.facts import check_reach
from fedjax_sim.runner.prepare import Objects, Setup, prepare
from fedjax_sim.runner.run_directory import RunDirectory
from fedjax_sim.runner.training import make_loss, make_optimizer
from fedjax_sim.runner.weights import initial_net
from fedjax_sim.transforms import innermost, names_of, transformed, with_option

MODES = ("loop", "vmap")
MOST_SEEDS = 10_000
OF_THE_RUN = ("lr", "momentum", "weight_decay", "clip_norm")
LOSS = "loss."  # before an option of the local loss
RULE = "optimizer."  # before a number of a rule of optax


# ---- set-ups -------------------------------------------------------------------------------------
class Federations:
    """Every federation is loaded once, however many runs use it."""

    def __init__(self) -> None:
        self.loaded: dict[Any, Federation] = {}

    def of(self, experiment: Experiment) -> Federation:
        key = self.key(experiment)
        if key not in self.loaded:
            start_jax(experiment)
            self.loaded[key] = preparing.load_federation(experiment)
        return self.loaded[key]

    @staticmethod
    def key(experiment: Experiment) -> Any:
        """The settings that decide which data are loaded."""
        return dataclasses.replace(experiment.data, unseen=0.0), experiment.training.batch_size


def ready(
    experiment: Experiment,
    given: Objects | None = None,
    feds: Federations | None = None,
    say: Callable[[str], None] | None = None,
    measure: bool = True,
) -> Setup:
    """A prepared run that fits this machine. feds: federations that are already loaded."""
    objects = {} if given is None else dict(vars(given))
    loaded = objects.get("fed") is None and feds is not None
    if loaded and feds is not None:
        objects["fed"] = feds.of(experiment)
    setup = prepare(experiment, **objects, loaded=loaded, say=say, measure=measure)
    check_reach(setup)
    return setup


def for_seeds(experiment: Experiment, seeds: int, mode: str, follow: bool) -> list[Experiment]:
    """One experiment for all seeds, or one per seed where the data follow it; with mode vmap on one
    device."""
    options.choice("seeds-mode", mode, MODES)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or not 1 <= seeds <= MOST_SEEDS:
        raise UserError(
            f"seeds {seeds!r} is not allowed; use a whole number from 1 to {MOST_SEEDS}"
        )
    seed = experiment.training.seed
    if seed + seeds > 2**63:
        raise UserError(
            f"seed {seed} and {seeds} seeds are too large together; the last is at most 2^63 - 1"
        )
    if seeds > 1 and mode == "vmap":
        experiment = on_one_device(experiment, "--seeds-mode vmap", "use --seeds-mode loop")
        if follow:
            raise UserError(
                "--data-seed follow gives every seed its own data; use --seeds-mode loop"
            )
    if not follow:
        return [experiment]
    return [experiment.replace(seed=s, data_seed=s) for s in range(seed, seed + seeds)]


def on_one_device(experiment: Experiment, what: str, instead: str) -> Experiment:
    """`experiment` on one device, as runs side by side need it; an error if it asks for more."""
    if experiment.compute.devices not in (AUTO, 1):
        raise UserError(f"{what} runs on one device, not {experiment.compute.devices}; {instead}")
    return experiment.replace(devices=1)


def with_seed(setup: Setup, seed: int) -> Setup:
    """The same compiled simulation with another seed: other cohorts, shuffles and, unless given,
    initial weights."""
    net = setup.net if setup.given_net else initial_net(setup.simulation.env.model, seed)
    return dataclasses.replace(setup, experiment=setup.experiment.replace(seed=seed), net=net)


# ---- values of one real setting ------------------------------------------------------------------
def allowed(setup: Setup) -> dict[str, str]:
    """Settings whose values can run side by side: name -> option of the run or of the method."""
    numbers, method = setup.simulation.data.numbers, setup.experiment.method
    custom = setup.found.custom_method
    inside = {} if custom else dict.fromkeys(innermost(numbers.method).numbers)
    run = [name for name in OF_THE_RUN if name == "lr" or name in numbers.optimizer.numbers]
    run += [LOSS + name for name in numbers.loss.numbers]
    if isinstance(numbers.optimizer, optimizers.Rule):
        run += [RULE + name for name in numbers.optimizer.values.numbers]
    for name in names_of(method.transforms):
        run += [f"{name}.{option}" for option in numbers_around(numbers.method, name)]
    own = {f"{method.name}.{name}": name for name in inside}
    return {name: name for name in inside} | own | {name: name for name in run}


def numbers_around(method: Any, name: str) -> list[str]:
    """Real options of the transform `name` around a method."""
    while getattr(method, "inner", None) is not None and method.name != name:
        method = method.inner
    return [option for option in method.numbers if not option.startswith("inner.")]


def with_value(setup: Setup, name: str, value: Any) -> Setup:
    """The same compiled simulation with another value of one of its numbers."""
    known, flag = allowed(setup), name.replace("-", "_")
    name = flag if flag in OF_THE_RUN else name
    if name not in known:
        raise unknown("setting for values side by side", shown(name), known)
    experiment = replaced(setup.experiment, name, known[name], value)
    numbers = numbers_for(setup, experiment)
    same: Any = jax.tree.structure(setup.simulation.data.numbers)
    if jax.tree.structure(numbers) != same:
        raise UserError(
            f"{name} {value} needs another program than the other values (0 leaves a term out); run"
            " it separately"
        )
    return dataclasses.replace(
        setup, experiment=experiment, simulation=setup.simulation.with_numbers(numbers)
    )


def replaced(experiment: Experiment, name: str, option: str, value: Any) -> Experiment:
    """`experiment` with another value of a number; option: its name in the run or the method."""
    method, train = experiment.method, experiment.training
    owner, _, inner = name.partition(".")
    if name in OF_THE_RUN:
        return experiment.replace(**{option: like(name, value, 0.0)})
    if name.startswith(LOSS):
        options = {**train.loss_options, inner: like(name, value, 0.0)}
        return experiment.replace(loss_options=options)
    if name.startswith(RULE):
        rule, values = optimizers.parse(train.optimizer)
        values |= {inner: str(value)}
        text = ",".join(f"{k}={v}" for k, v in values.items())
        return experiment.replace(optimizer=f"{rule}:{text}")
    if owner in names_of(method.transforms):
        return experiment.replace(transforms=with_option(method.transforms, owner, inner, value))
    return experiment.replace(options={**method.options, option: value})


def numbers_for(setup: Setup, experiment: Experiment) -> Numbers:
    """The numbers of `experiment`, which differs from that of `setup` in one number only."""
    r, method = setup.simulation.stages, setup.simulation.method
    chosen, train = experiment.method, experiment.training
    if not setup.found.custom_method:
        method = transformed(make_method(chosen.name, **chosen.options), chosen.transforms)
    rule = r.env.optimizer._replace(clip_norm=train.clip_norm)
    if not isinstance(rule, optimizers.UserOptimizer):
        rule = make_optimizer(experiment, r.env.model.groups)
    assert train.lr is not None  # resolved
    rates = optim.schedule(train.schedule, train.lr, train.schedule_rounds)
    loss = r.env.loss if train.loss == GIVEN else make_loss(experiment, setup.fed)
    env = dataclasses.replace(r.env, optimizer=rule, loss=loss)
    return numbers_of(dataclasses.replace(r, method=method, env=env, lr=rates))


def with_values(setup: Setup, name: str, values: Sequence[Any]) -> list[Setup]:
    """A set-up per value, checked."""
    setups = [with_value(setup, name, value) for value in values]
    if len({one.hash for one in setups}) < max(len(setups), 2):
        raise UserError(
            f"{name}={shown(','.join(map(str, values)))} does not name two or more different values"
        )
    return setups


# ---- runs ----------------------------------------------------------------------------------------
def run_values(
    setup: Setup,
    name: str,
    values: Sequence[Any],
    out: str | pathlib.Path | None = None,
    **more: Any,
) -> list[Result]:
    """Runs that differ in one real setting, side by side in one program; directories
    out/NAME=VALUE.

    name: lr, momentum, weight_decay, clip_norm, optimizer.OPTION, loss.OPTION, or a field of the
    method, of its agent, or TRANSFORM.OPTION of a transform around it, that is annotated Real.
    more: progress and others, see `driver.drive`.

    >>> from fedjax_sim import Experiment, prepare
    >>> small = dict(model="mlp", clients=4, rounds=1, epochs=1, devices=1)
    >>> setup = prepare(Experiment.of("fedprox", **small))
    >>> [run.setup.experiment.method.options for run in run_values(setup, "mu", [0.1, 1])]
    [{'mu': 0.1}, {'mu': 1}]
    """
    setups = with_values(setup, name, values)
    if out is None:
        return drive(setups, [None] * len(setups), **more)
    places = [pathlib.Path(out) / f"{name}={value}" for value in values]
    return drive(setups, list(map(RunDirectory, places)), **more)


def run_seeds(
    setup: Setup, number: int, out: str | pathlib.Path | None, mode: str = "loop", **more: Any
) -> list[Result]:
    """Runs with seeds s, s+1, …; directories out/seed-s. more: progress and others, see
    `driver.drive`."""
    for_seeds(setup.experiment, number, mode, False)
    place = None if out is None else pathlib.Path(out)
    return run_all([setup], number, place, mode, apart=True, **more)


def run_all(
    setups: Sequence[Setup],
    seeds: int,
    out: pathlib.Path | None,
    mode: str = "loop",
    *,
    apart: bool = False,
    **more: Any,
) -> list[Result]:
    """The results of all seeds, of one set-up or one for each; unfinished ones are resumed.
    Directories: out/seed-s, or `out` itself for a single seed unless `apart`."""
    every = all_seeds(setups, seeds)
    seed = lambda one: f"seed-{one.experiment.training.seed}"
    place = lambda one: out / seed(one) if out is not None and (apart or seeds > 1) else out
    directory = lambda path: None if path is None else RunDirectory(path)
    if mode == "vmap" and seeds > 1 and (out is None or not out.exists()):
        return drive(every, [directory(place(one)) for one in every], **more)
    results: list[Result] = []
    program = None
    for one in every:
        path = place(one)
        done = None if path is None else resumed(one, path, **more)
        if done is None:
            (done,) = drive([one], [directory(path)], program=program, **more)
            program = done.program if len(setups) == 1 else None
        results.append(done)
    return results


def run_all_values(
    setups: Sequence[Setup],
    seeds: int,
    name: str,
    values: Sequence[Any],
    out: pathlib.Path,
    **more: Any,
) -> list[Result]:
    """The values of one real setting side by side, seed after seed."""
    results: list[Result] = []
    for one in all_seeds(setups, seeds):
        path = out / f"seed-{one.experiment.training.seed}" if seeds > 1 else out
        results += run_values(one, name, values, path, **more)
    return results


def all_seeds(setups: Sequence[Setup], seeds: int) -> list[Setup]:
    """A set-up per seed, from one for all or one each."""
    first, *others = setups
    seed = first.experiment.training.seed
    return [*setups] if others else [first, *(with_seed(first, seed + i) for i in range(1, seeds))]
