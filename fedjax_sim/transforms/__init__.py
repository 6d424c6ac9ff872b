"""Transforms, by name: methods around methods. In order: the first one listed is nearest to the
method.

--transform clip:1.0 --transform topk:0.01        TopK(0.01, Clip(1.0, FedAvg()))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.named import Named
from fedjax_sim.options import shown

if TYPE_CHECKING:  # the names are listed by the command line, which must not wait for JAX
    from fedjax_sim.hooks import Method
    from fedjax_sim.transforms.base import Transform

T = TypeVar("T", bound=type)

# name -> (Class, one line), or module.Class where the module has another name
_TABLE = {
    "clip": ("Clip", "limits the norm of what a client sends to `norm`"),
    "topk": ("TopK", "only the largest `share` of an update is sent, the rest is remembered"),
    "server_optimizer": (
        "ServerOptimizer",
        "the server steps along the mean update by a rule of optax",
    ),
    "power_of_choice": (
        "PowerOfChoice",
        "of some clients drawn, those with the largest loss take part",
    ),
    "agent_selection": ("AgentSelection", "an agent decides who takes part"),
    "fedavgm": ("server_optimizer.FedAvgM", "server_optimizer with momentum"),
    "fedadam": ("server_optimizer.FedAdam", "server_optimizer with Adam"),
    "fedyogi": ("server_optimizer.FedYogi", "server_optimizer with Yogi"),
    "fedadagrad": ("server_optimizer.FedAdagrad", "server_optimizer with Adagrad"),
}
_NAMED = Named("transform", __name__, _TABLE)
TRANSFORMS = _NAMED.lines  # name -> one line
CLASSES = _NAMED.modules  # class -> its module
_KINDS = _NAMED.given


def register_transform(name: str, description: str = "") -> Callable[[T], T]:
    """A decorator: this class is the transform called `name`."""
    return _NAMED.register(name, description)


def transform_class(name: str) -> type[Transform]:
    """The class of the transform called `name`."""
    return _NAMED.kind(name)


def transformed(method: Method, texts: Sequence[str]) -> Method:
    """The method inside the transforms that the texts name: NAME, NAME:VALUE,… or
    NAME:OPTION=VALUE,….

    >>> from fedjax_sim.methods import make_method
    >>> transformed(make_method("fedprox"), ["clip:2", "topk:share=0.1"])
    TopK(share=0.1, inner=Clip(norm=2.0, inner=FedProx(weights='size', mu=0.01)))
    """
    for text in texts:
        kind, values = read(text)
        method = kind(**values, inner=method)
    return method


def read(text: str) -> tuple[Any, dict[str, str]]:
    """(the class, its options as they are written) of NAME, NAME:VALUE,… or NAME:OPTION=VALUE,…."""
    name, _, rest = text.partition(":")
    kind: Any = transform_class(name)
    known = [one.name for one in dataclasses.fields(kind) if one.name != "inner"]
    values = {}
    for place, part in enumerate(rest.split(",") if rest else []):
        option, equals, value = part.partition("=")
        if not equals:
            if place >= len(known):
                raise UserError(
                    f"transform '{shown(text)}' has more values than options; allowed:"
                    f" {', '.join(known)}"
                )
            option, value = known[place], part
        if option not in known:
            raise unknown(f"option of transform '{name}'", shown(option), known)
        values[option] = value
    return kind, values


def names_of(texts: Sequence[str]) -> list[str]:
    """What the transforms are called."""
    return [text.partition(":")[0] for text in texts]


def with_option(texts: Sequence[str], name: str, option: str, value: Any) -> tuple[str, ...]:
    """The texts with another value of an option of the transform `name`, which is among them once.

    >>> with_option(["clip:1.0", "topk"], "clip", "norm", 0.5)
    ('clip:norm=0.5', 'topk')
    """
    places = [i for i, known in enumerate(names_of(texts)) if known == name]
    if len(places) != 1:
        raise UserError(
            f"'{name}.{shown(option)}' names one transform, and '{name}' is there {len(places)}"
            " times; use 1"
        )
    _, values = read(texts[places[0]])
    options = ",".join(f"{o}={v}" for o, v in {**values, option: value}.items())
    changed = f"{name}:{options}"
    read(changed)  # what is wrong is said here
    return (*texts[: places[0]], changed, *texts[places[0] + 1 :])


def texts_of(method: Method) -> list[str] | None:
    """The texts under which `transformed` builds the transforms around a method; None where one has
    no name.

    >>> from fedjax_sim.methods import make_method
    >>> texts_of(transformed(make_method("fedavg"), ["clip:2", "topk"]))
    ['clip:norm=2.0', 'topk']
    """
    texts: list[str] = []
    while hasattr(method, "inner"):
        if method.name not in TRANSFORMS or transform_class(method.name) is not type(method):
            return None
        fields: Any = dataclasses.fields(method)  # type: ignore[arg-type]
        changed = [f for f in fields if f.name != "inner" and getattr(method, f.name) != f.default]
        options = ",".join(f"{f.name}={getattr(method, f.name)}" for f in changed)
        texts.insert(0, f"{method.name}:{options}" if options else method.name)
        method = method.inner
    return texts


def innermost(method: Method) -> Method:
    """The method inside all transforms."""
    while hasattr(method, "inner"):
        method = method.inner
    return method
