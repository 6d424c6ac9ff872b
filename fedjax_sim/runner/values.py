"""Several values of one real setting, side by side in one program: one run directory each, as
separate runs leave them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from fedjax_sim.engine.round import Numbers, numbers_of
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.local import optim, optimizers
from fedjax_sim.methods import make_method
from fedjax_sim.options import like, shown
from fedjax_sim.runner.config import Config, check
from fedjax_sim.runner.driver import Result, drive
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.runner.run_directory import RunDirectory
from fedjax_sim.runner.training import make_loss, make_optimizer
from fedjax_sim.transforms import innermost, names_of, transformed, with_option

OF_THE_RUN = ("lr", "momentum", "weight_decay", "clip_norm")
LOSS = "loss."  # before an option of the local loss
RULE = "optimizer."  # before a number of a rule of optax


def allowed(setup: Setup) -> dict[str, str]:
    """Settings whose values can run side by side: as they are called -> the option of the run or of
    the method."""
    numbers, before = setup.simulation.data.numbers, f"{setup.config.method}."
    own = {} if setup.config.own_method else dict.fromkeys(innermost(numbers.method).numbers)
    run = [name for name in OF_THE_RUN if name == "lr" or name in numbers.optimizer.numbers]
    run += [LOSS + name for name in numbers.loss.numbers]
    if isinstance(numbers.optimizer, optimizers.Rule):
        run += [RULE + name for name in numbers.optimizer.values.numbers]
    around = [
        f"{name}.{option}"
        for name in names_of(setup.config.transforms)
        for option in numbers_around(numbers.method, name)
    ]
    return (
        {name: name for name in own}
        | {before + name: name for name in own}
        | {name: name for name in (*run, *around)}
    )


def numbers_around(method: Any, name: str) -> list[str]:
    """Real options of the transform `name` around a method."""
    while getattr(method, "inner", None) is not None and method.name != name:
        method = method.inner
    return [option for option in method.numbers if not option.startswith("inner.")]


def with_value(setup: Setup, name: str, value: Any) -> Setup:
    """The same compiled simulation, another value of one of its numbers."""
    known, flag = allowed(setup), name.replace("-", "_")
    name = flag if flag in OF_THE_RUN else name
    if name not in known:
        raise unknown("setting for values side by side", shown(name), known)
    option, config = known[name], setup.config
    if name in OF_THE_RUN:
        config = dataclasses.replace(config, **{option: like(name, value, 0.0)})
    elif name.startswith(LOSS):
        number = like(name, value, 0.0)
        config = dataclasses.replace(
            config, loss_options={**config.loss_options, name.removeprefix(LOSS): number}
        )
    elif name.startswith(RULE):
        rule, options = optimizers.parse(config.optimizer)
        options |= {name.removeprefix(RULE): str(value)}
        config = dataclasses.replace(
            config, optimizer=f"{rule}:{','.join(f'{k}={v}' for k, v in options.items())}"
        )
    elif (owner := name.partition(".")[0]) in names_of(config.transforms):
        texts = with_option(config.transforms, owner, name.partition(".")[2], value)
        config = dataclasses.replace(config, transforms=texts)
    else:
        config = dataclasses.replace(config, options={**config.options, option: value})
    check(config)
    numbers = numbers_for(setup, config)
    same: Any = jax.tree.structure(setup.simulation.data.numbers)
    if jax.tree.structure(numbers) != same:
        raise UserError(
            f"{name} {value} is another program than the other values (0 leaves a term out); run it"
            " by itself"
        )
    return dataclasses.replace(
        setup, config=config, simulation=setup.simulation.with_numbers(numbers)
    )


def numbers_for(setup: Setup, config: Config) -> Numbers:
    """The numbers of `config`, which differs from that of `setup` in a number alone."""
    r, method = setup.simulation.stages, setup.simulation.method
    if not config.own_method:
        method = transformed(make_method(config.method, **config.options), config.transforms)
    rule = r.env.optimizer._replace(clip_norm=config.clip_norm)
    if not isinstance(rule, optimizers.Own):
        rule = make_optimizer(config, r.env.model.groups)
    rates = optim.schedule(config.schedule, config.lr, config.schedule_rounds)
    loss = r.env.loss if config.loss == "own" else make_loss(config, setup.fed)
    env = dataclasses.replace(r.env, optimizer=rule, loss=loss)
    return numbers_of(dataclasses.replace(r, method=method, env=env, lr=rates))


def run_values(
    setup: Setup,
    name: str,
    values: Sequence[Any],
    out: str | pathlib.Path | None = None,
    *,
    progress: bool | None = None,
    **more: Any,
) -> list[Result]:
    """Runs that differ in one real setting, side by side in one program; directories
    out/NAME=VALUE.

    name: lr, momentum, weight_decay, clip_norm, optimizer.OPTION, loss.OPTION, or a field of the
    method, of its agent, or TRANSFORM.OPTION of a transform around it, that is annotated Real.
    progress, more: see `driver.drive`.

    >>> from fedjax_sim import Config, prepare
    >>> setup = prepare(Config("fedprox", model="mlp", clients=4, rounds=1, epochs=1, devices="1"))
    >>> [result.setup.config.options for result in run_values(setup, "mu", [0.1, 1])]
    [{'mu': 0.1}, {'mu': 1}]
    """
    lanes = lanes_for(setup, name, values)
    folders = [
        pathlib.Path(out) / f"{name}={value}" if out is not None else None for value in values
    ]
    return drive(
        lanes,
        [RunDirectory(f) if f is not None else None for f in folders],
        progress=progress,
        **more,
    )


def lanes_for(setup: Setup, name: str, values: Sequence[Any]) -> list[Setup]:
    """A set-up per value, checked."""
    lanes = [with_value(setup, name, value) for value in values]
    if len({lane.config.hash() for lane in lanes}) < max(len(lanes), 2):
        raise UserError(
            f"{name}={shown(','.join(map(str, values)))} does not name two or more different values"
        )
    return lanes


def read(text: str) -> tuple[str, list[str]]:
    """NAME=VALUE,VALUE,… -> (name, values).

    >>> read("lr=0.01,0.03")
    ('lr', ['0.01', '0.03'])
    """
    name, equals, rest = text.partition("=")
    values = [part.strip() for part in rest.split(",")]
    if not (name and equals and all(values)):
        raise UserError(
            f"--vmap '{shown(text)}' cannot be read; use NAME=VALUE,VALUE, e.g. lr=0.01,0.03,0.1"
        )
    return name.strip(), values
