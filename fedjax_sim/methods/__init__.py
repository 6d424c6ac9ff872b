"""The methods, by name. A method file holds one idea; `make_method` builds it from command-line options."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.options import like, real, shown

if TYPE_CHECKING:  # the names are listed by the command line, which must not wait for JAX
    from fedjax_sim.hooks import Made, Method

# name -> (module, builder, bound options, one line)
_TABLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "fedavg": ("fedavg", "fedavg", {}, "clients train from the common model, the server averages"),
    "fedavg_ft": ("fedavg", "fedavg_ft", {}, "FedAvg, fine-tuned on local data when it is evaluated"),
    "fedprox": ("fedprox", "fedprox", {}, "FedAvg with a proximal term to the received model"),
    "scaffold": ("scaffold", "scaffold", {}, "control variates cancel each client's gradient bias"),
    "local": ("local_only", "local_only", {}, "no exchange at all: the lower bound"),
    "ditto": ("ditto", "ditto", {}, "FedAvg and a private model pulled towards it"),
    "fedntd": ("fedntd", "fedntd", {}, "distils the received model on the logits of the classes that are not true"),
    "ccvr": ("ccvr", "ccvr", {}, "FedAvg, its classifier refitted on features drawn from class Gaussians"),
    "fedsam": ("fedsam", "fedsam", {}, "sharpness-aware local steps look for flat minima"),
    "fedfa": ("fedfa", "fedfa", {}, "channel statistics of feature maps are varied as they vary over clients"),
    "fedfa_freq": ("fedfa_freq", "fedfa_freq", {}, "images of a batch swap parts of their amplitude spectra"),
    "fedca": ("fedca", "fedca", {}, "averages that favour clients good at the worst classes"),
    "fedpolicy": ("fedpolicy", "fedpolicy", {}, "an agent decides which block of the model each client gets back"),
    "qbandit": ("qbandit", "qbandit", {}, "a bandit decides how many layers each client shares and how long it trains"),
    "pfedrlla": ("pfedrlla", "pfedrlla", {}, "an agent mixes each client's head from previous participants' heads"),
    "fedpam": ("fedpam", "fedpam", {}, "a private matrix turns the shared head into each client's own"),
    "fedamp": ("fedamp", "fedamp", {}, "personal cloud models: attention over clients with similar weights"),
    "fedfomo": ("fedfomo", "fedfomo", {}, "others' models, weighted by what each gains on own validation rows"),
    "fedpac": ("fedpac", "fedpac", {}, "features aligned to class centroids, heads combined by a quadratic program"),
    "fedala": ("fedala", "fedala", {}, "every weight of the start is a learned mixture of old local and received model"),
    "fedas": ("fedas", "fedas", {}, "the received backbone is aligned to local features; Fisher-weighted averages"),
    "pfedfda": ("pfedfda", "pfedfda", {}, "class Gaussians as the classifier, interpolated between global and local"),
    "fedcp": ("fedcp", "fedcp", {}, "a policy splits each feature vector between a global and a private head"),
    "fedper": ("fedper", "fedper", {}, "a common backbone, private heads, trained together"),
    "fedrep": ("fedrep", "fedrep", {}, "as FedPer, but the head first and then the backbone"),
    "fedbabu": ("fedbabu", "fedbabu", {}, "only the body is trained, against a fixed head; fine-tuned at evaluation"),
    "apfl": ("apfl", "apfl", {}, "the personal model is a learned mixture of a local and the global one"),
    "perfedavg": ("perfedavg", "perfedavg", {}, "a common start that is good after one local gradient step"),
    "pfedme": ("pfedme", "pfedme", {}, "the personal model is a proximal point of the client's copy of the common one"),
    "fedrod": ("fedrod", "fedrod", {}, "a class-balanced common head and a private residual head"),
    "fedphp": ("fedphp", "fedphp", {}, "past personal models teach their features to the new one"),
    "full": ("redistribute", "redistribute", {"policy": "full"}, "every client gets the full aggregate back"),
    "backbone": ("redistribute", "redistribute", {"policy": "backbone"}, "clients keep their heads"),
    "head": ("redistribute", "redistribute", {"policy": "head"}, "clients keep their backbones"),
    "random": ("redistribute", "redistribute", {"policy": "random"}, "full, backbone or head at random"),
}
METHODS: dict[str, str] = {name: entry[3] for name, entry in _TABLE.items()}


def register(name: str, builder: Callable[..., Method], description: str = "") -> None:
    """Make a method of your own known to `run` and the command line (call it before they are used)."""
    _OWN[name] = builder
    METHODS[name] = description or (builder.__doc__ or "").strip().split("\n")[0]


_OWN: dict[str, Callable[..., Method]] = {}


def builder(name: str) -> Callable[..., Method]:
    if name in _OWN:
        return _OWN[name]
    module, function, bound, _ = lookup("method", name, _TABLE | {n: ("", "", {}, "") for n in _OWN})
    made = getattr(importlib.import_module(f"fedjax_sim.methods.{module}"), function)
    return functools.partial(made, **bound) if bound else made


def options_of(name: str) -> dict[str, Any]:
    """The options of a method with their defaults."""
    bound = _TABLE[name][2] if name in _TABLE else {}
    return {
        p.name: p.default
        for p in inspect.signature(builder(name)).parameters.values()
        if p.name not in (*bound, "agent_options")
    }


def controlled(name: str) -> bool:
    """Whether the method is steered by an agent with options of its own, written agent.OPTION."""
    return "agent_options" in inspect.signature(builder(name)).parameters


MOST_EPOCHS = 1e6


def parse_value(owner: str, option: str, value: Any, default: Any) -> Any:
    """An option, text or not, as the type of its default: numbers are finite, epochs between 0 and a million.

    >>> parse_value("fedavg_ft", "ft_epochs", "nan", 5.0)
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: fedavg_ft.ft_epochs 'nan' is not a finite number; default: 5.0
    """
    value = like(f"{owner}.{option}", value, default)
    if option.endswith("epochs") and isinstance(default, (int, float)) and not 0 <= value <= MOST_EPOCHS:
        raise UserError(f"{owner}.{option} {value:g} is not allowed; use a number from 0 to {MOST_EPOCHS:g}")
    return value


def make_method(name: str, /, **options: Any) -> Method:
    """Build a method by name; options may be strings, as the command line gives them.

    >>> make_method("fedprox", mu="0.1").name
    'fedprox'
    >>> make_method("fedpolicy", **{"agent": "ppo", "agent.lr": "0.01"}).name
    'fedpolicy'
    """
    known = options_of(name)
    inner = [k for k in options if k.startswith("agent.") and controlled(name)]
    of_agent = {k.removeprefix("agent."): options.pop(k) for k in inner}
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", shown(option), known or ["(none)"])
    values = {k: parse_value(name, k, v, known[k]) for k, v in options.items()}
    if values.get("weights", "size") not in ("size", "uniform"):
        raise UserError(f"{name}.weights={shown(str(values['weights']))} is unknown; allowed: size, uniform")
    if of_agent:
        values["agent_options"] = of_agent
    build = builder(name)
    values |= {k: number_or_word(values[k]) for k in real_options(name) if isinstance(values.get(k), str)}
    method = build(**values)._replace(name=name)
    return method._replace(made=made(name, method, functools.partial(build, **values), {**known, **values}))


def number_or_word(text: str) -> float | str:
    """A finite number of an option that also takes words; the method itself says what it thinks of the others.

    >>> number_or_word("0.5"), number_or_word("lr"), number_or_word("nan")
    (0.5, 'lr', 'nan')
    """
    try:
        return real(text)
    except ValueError:
        return text


def real_options(name: str) -> list[str]:
    """The options annotated `Real`: numbers that a compiled round takes as arguments."""
    annotations = {p.name: str(p.annotation) for p in inspect.signature(builder(name)).parameters.values()}
    return [option for option, text in annotations.items() if re.search(r"\bReal\b", text)]


def made(name: str, method: Method, build: Callable[..., Method], values: Mapping[str, Any]) -> Made:
    """How the method is built again with other numbers; which of its options are numbers is told in `engine.numbers`."""
    from fedjax_sim.hooks import Made

    early = [method.extend, method.control.agent if method.control else None]
    shaping = {read for hook in early for read in getattr(getattr(hook, "__code__", None), "co_freevars", ())}
    numbers = {k: float(values[k]) for k in real_options(name) if not isinstance(values[k], str) and k not in shaping}
    return Made(method, build, {k: v for k, v in numbers.items() if v != 0})
