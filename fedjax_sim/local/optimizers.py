"""Local optimisers of optax: by name (`Rule`), or a `GradientTransformation` of the user's own
(`UserOptimizer`).

A rule's real options are arguments of the compiled program, as its learning rate is: the
transformation is made inside the program, from traced numbers. What is inside an object of the
user's is a constant of the program, unless it was made by `optax.inject_hyperparams`; the run's
learning rate, 1 unless it is given, multiplies its updates.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.fields import Node
from fedjax_sim.local.optim import Optimizer
from fedjax_sim.options import boolean, convert, plain, real, shown, whole
from fedjax_sim.types import Array, Scalar, Tree

OPTIMIZERS: dict[str, str] = {
    "sgd": "PyTorch's SGD, with momentum and coupled weight decay (momentum, weight_decay)",
    "nesterov": "SGD with Nesterov's momentum",
    "adam": "Adam",
    "adamw": "Adam with decoupled weight decay",
    "nadam": "Adam with Nesterov's momentum",
    "nadamw": "NAdam with decoupled weight decay",
    "amsgrad": "Adam with the largest second moment so far",
    "adamax": "Adam with the largest gradient instead of the second moment",
    "adamaxw": "Adamax with decoupled weight decay",
    "adabelief": "Adam with the variance of the gradient around its running mean",
    "adagrad": "a rate per parameter that only decreases",
    "adadelta": "Adagrad with running means, and steps in the parameters' units",
    "rmsprop": "gradients over their running root mean square",
    "radam": "rectified Adam",
    "yogi": "Adam whose second moment grows slowly",
    "lion": "the sign of the momentum",
    "lamb": "Adam, its step scaled by the norm of each layer's weights",
    "lars": "SGD, its step scaled by the norm of each layer's weights",
    "novograd": "Adam with one second moment per layer",
    "sm3": "Adagrad with little memory",
    "adafactor": "Adam with factored second moments",
    "fromage": "steps relative to the norm of each layer's weights",
    "signsgd": "the sign of the gradient",
    "adan": "Adam with the difference of gradients",
}
# unless said
RATES = {
    "lion": 1e-4,
    "nesterov": 0.02,
    "signsgd": 1e-3,
    "lars": 0.1,
    "adagrad": 0.01,
    "adadelta": 1.0,
}
RATE = 1e-3  # of all others


def _nesterov(learning_rate: Any, momentum: Scalar | float = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum, nesterov=True)


def _makers(name: str) -> Callable[..., optax.GradientTransformation]:
    return {"nesterov": _nesterov, "signsgd": optax.sign_sgd}.get(name) or getattr(optax, name)


@functools.cache
def known_options(name: str) -> Mapping[str, Any]:
    """The options of a rule beside its learning rate, with their defaults; functions and types are
    none.

    >>> dict(known_options("adamw"))["b1"], "mask" in known_options("adamw")
    (0.9, False)
    """
    if name == "sgd":
        return {"momentum": 0.9, "weight_decay": 5e-4}
    parameters = inspect.signature(_makers(name)).parameters.values()
    found = {
        p.name: p.default
        for p in parameters
        if p.name != "learning_rate" and p.default is not p.empty
    }
    hidden = ("mask", "weight_decay_mask", "mu_dtype", "accumulator_dtype", "dtype_momentum")
    return {
        k: v
        for k, v in found.items()
        if k not in hidden and isinstance(v, (bool, int, float, type(None)))
    }


class Values(Node):
    """Options by name; those that are floats are leaves."""

    items: tuple[tuple[str, Any], ...] = ()

    def _flatten(self, keyed: Any = lambda name, value: value) -> tuple[tuple, tuple]:
        real = [(k, v) for k, v in self.items if not isinstance(v, (bool, int, str, type(None)))]
        facts = tuple((k, v) for k, v in self.items if isinstance(v, (bool, int, str, type(None))))
        return tuple(keyed(k, v) for k, v in real), (tuple(k for k, _ in real), facts)

    @classmethod
    def _unflatten(cls, static: Any, leaves: Any) -> Values:
        node = object.__new__(cls)
        object.__setattr__(node, "items", (*zip(static[0], leaves, strict=True), *static[1]))
        return node

    def as_dict(self) -> dict[str, Any]:
        return dict(self.items)


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a rule, those given read as what their defaults are.

    >>> options_of("adam", {"b1": "0.8"})["b1"]
    0.8
    """
    known = known_options(name)
    for option in given:
        if option not in known:
            raise unknown(f"option of optimizer '{name}'", shown(option), ["lr", *known])
    read = lambda k, v: (
        v if not isinstance(v, str) else convert(f"optimizer {name}.{k}", v, _reader(known[k]))
    )
    return {**known, **{k: read(k, v) for k, v in given.items()}}


def _reader(default: Any) -> Callable[[str], Any]:
    if isinstance(default, bool):
        return boolean
    if isinstance(default, int):
        return whole
    return real if isinstance(default, float) else plain


class Rule(Optimizer):
    """A rule of optax: its name, and its options as `Values`."""

    kind: str = "adam"
    values: Values = Values()
    groups: tuple[str, ...] | None = None

    def transform(self, rate: Any) -> optax.GradientTransformationExtraArgs:
        """The transformation at this learning rate; its state's shape does not depend on it."""
        make, values = _makers(self.kind), {k: v for k, v in self.values.items if v is not None}
        names = self.groups
        if names is not None and "mask" in inspect.signature(make).parameters:
            values["mask"] = lambda params: {
                g: jax.tree.map(lambda _: g in names, params[g]) for g in params
            }
        return optax.with_extra_args_support(optax.chain(*self.clipping(), make(rate, **values)))

    def init(self, params: Tree) -> Tree:
        return self.transform(1.0).init(params)

    def step(
        self, grads: Tree, state: Tree, params: Tree, rate: Scalar, **more: Any
    ) -> tuple[Tree, Tree]:
        updates, after = self.transform(rate).update(grads, state, params, **more)
        return optax.apply_updates(params, updates), typed(after, state)


class UserOptimizer(Optimizer):
    """A `GradientTransformation` of the user's own; `values` are the numbers of one made by
    `optax.inject_hyperparams`."""

    given: Any = None  # an optax.GradientTransformation
    values: Values = Values()
    groups: tuple[str, ...] | None = None

    def transform(self) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(optax.chain(*self.clipping(), self.given))

    def init(self, params: Tree) -> Tree:
        return self.with_values(self.transform().init(params))

    def with_values(self, state: Tree) -> Tree:
        """The state with the numbers of the program's argument."""
        if not self.values.items:
            return state
        *before, own = state
        numbers = {
            k: jnp.asarray(v, jnp.asarray(own.hyperparams[k]).dtype) for k, v in self.values.items
        }
        return *before, own._replace(hyperparams={**own.hyperparams, **numbers})

    def step(
        self, grads: Tree, state: Tree, params: Tree, rate: Scalar, **more: Any
    ) -> tuple[Tree, Tree]:
        updates, after = self.transform().update(grads, self.with_values(state), params, **more)
        return jax.tree.map(lambda p, u: (p + rate * u).astype(p.dtype), params, updates), typed(
            after, state
        )


def typed(new: Tree, old: Tree) -> Tree:
    """A state with the types it had: a loop carries it, and traced numbers may have widened some of
    it."""
    return jax.tree.map(lambda a, b: jnp.asarray(a, jnp.asarray(b).dtype), new, old)


def user_optimizer(given: Any) -> UserOptimizer:
    """An object of the user's as a record; anything else is a sentence."""
    if not (
        isinstance(given, tuple)
        and callable(getattr(given, "init", None))
        and callable(getattr(given, "update", None))
    ):
        raise UserError(
            f"optimizer= is {shown(repr(given))}, which is neither a name ({', '.join(OPTIMIZERS)})"
            " nor an optax.GradientTransformation, such as optax.adamw(1e-3)"
        )
    transformation: Any = given
    state = transformation.init({"w": jnp.zeros(2)})
    numbers = getattr(state, "hyperparams", {})
    scheduled = getattr(state, "hyperparams_states", {})
    fixed = {k: float(v) for k, v in numbers.items() if k not in scheduled and jnp.ndim(v) == 0}
    return UserOptimizer(given=given, values=Values(tuple(fixed.items())))


def parse(text: str) -> tuple[str, dict[str, str]]:
    """NAME or NAME:OPTION=VALUE,… -> (name, options as text).

    >>> parse("adamw:lr=1e-3,weight_decay=0.01")
    ('adamw', {'lr': '1e-3', 'weight_decay': '0.01'})
    """
    name, _, rest = text.partition(":")
    lookup("optimizer", shown(name), OPTIMIZERS)
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        option, equals, value = item.partition("=")
        if not (equals and value) or option in options:
            raise UserError(
                f"optimizer '{shown(text)}' cannot be read; example:"
                " adamw:lr=1e-3,weight_decay=0.01"
            )
        options[option] = value
    return name, options


def fingerprint(given: Optimizer) -> str:
    """What an optimiser does, as text: the same text is the same rule, its constants with it."""
    params = {"w": jnp.zeros((2, 2))}

    def step(grads: Tree, state: Tree, params: Tree, rate: Array) -> tuple[Tree, Tree]:
        value_fn = lambda p: jnp.square(p["w"]).sum()
        return given.step(
            grads, state, params, rate, value=value_fn(params), grad=grads, value_fn=value_fn
        )

    try:
        text = str(
            jax.make_jaxpr(step)(params, jax.eval_shape(given.init, params), params, jnp.zeros(()))
        )
    except TypeError as problem:
        first = (str(problem).splitlines() or [""])[0]
        raise UserError(f"the optimizer given cannot make a step: {shown(first, 300)}") from problem
    return re.sub(r"0x[0-9a-f]+", "", text)
