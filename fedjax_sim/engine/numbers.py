"""Real settings as arguments of the compiled program: another learning rate or another μ is not another program.

`Data.numbers` holds them by name ("lr", "momentum", "schedule.gamma", "fedprox.mu"); `open_env` brings them into the
environment, which travels into everything that is compiled. What is a number by this rule:

* lr and the numbers of its schedule; momentum and weight_decay, unless they are 0, which leaves their term out;
* a method's options annotated `Real`, unless they are 0 ("off" in many methods) or read where the program takes its shape
  (`extend`, the making of an agent). `late` then builds the method anew wherever one of its hooks is called, from the
  numbers of the environment at hand.

All else is a constant of the program: whole numbers, switches, epochs (they size the tables of shuffles), options
annotated `float`. A method that decides by the value of a `Real` option while it is compiled is refused in a sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Control, Method
from fedjax_sim.types import Env, Numbers


def numbers_of(method: Method, env: Env, lr: Any) -> dict[str, np.ndarray]:
    """The numbers of a run, as arrays of its precision."""
    own = {key(method, name): value for name, value in method.made.numbers.items()} if method.made else {}
    found = getattr(lr, "numbers", {}) | env.optimizer.numbers | own
    return {name: np.asarray(value, env.dtype) for name, value in found.items()}


def key(method: Method, option: str) -> str:
    return f"{method.name}.{option}"


def with_numbers(env: Env, numbers: Numbers) -> Env:
    """The environment with these numbers; an optimiser's term that is off stays off."""
    terms = {name: numbers[name] for name in env.optimizer.numbers if name in numbers}
    return dataclasses.replace(env, numbers=numbers, optimizer=env.optimizer._replace(**terms))


def late(method: Method) -> Method:
    """The method with hooks that are built when they are called, from the numbers in the environment they are given."""
    made = method.made
    if made is None or not made.numbers:
        return method

    def rebuilt(env: Env) -> Method:
        return made.build(**{name: env.numbers.get(key(method, name), value) for name, value in made.numbers.items()})

    def hook(now: Any, built: Any, find: Callable[[Method], Any]) -> Any:
        if now is not built or not is_inner(now):  # exchanged since, or a function that no option reaches
            return now

        def call(env: Env, *rest: Any) -> Any:
            try:
                return find(rebuilt(env))(env, *rest)
            except jax.errors.ConcretizationTypeError as problem:
                raise UserError(
                    f"method '{method.name}' asks for a value that is not known while its round is compiled; annotate the "
                    f"option by which it decides as float, not Real ({', '.join(made.numbers)}): "
                    f"{str(problem).splitlines()[0]}"
                ) from problem

        return call

    def hooks(now: Any, built: Any, find: Callable[[Method], Any]) -> dict[str, Any]:
        names = [name for name in now._fields if callable(getattr(now, name)) and name != "extend"]
        late_one = lambda name: hook(getattr(now, name), getattr(built, name), lambda m: getattr(find(m), name))
        return {name: late_one(name) for name in names}

    new = method._replace(**hooks(method, made.method, lambda m: m))
    control, built = method.control, made.method.control
    if control is not None and built is not None:
        inner: Control = control._replace(**hooks(control, built, lambda m: m.control))
        new = new._replace(control=inner)
    return new


def is_inner(hook: Any) -> bool:
    """Whether a hook was made inside another function, whose variables it may carry."""
    return "<locals>" in getattr(hook, "__qualname__", "<locals>")
