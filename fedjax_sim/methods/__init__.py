"""The methods, by name. A method file holds one idea; `make_method` builds it from command-line
options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fedjax_sim.errors import unknown
from fedjax_sim.named import Named
from fedjax_sim.options import shown

if TYPE_CHECKING:  # the names are listed by the command line, which must not wait for JAX
    from fedjax_sim.hooks import Method

M = TypeVar("M", bound=type)

# name -> (Class, one line), or module.Class where the module has another name
_TABLE = {
    "fedavg": ("FedAvg", "clients train from the common model, the server averages"),
    "fedavg_ft": ("fedavg.FedAvgFT", "FedAvg, fine-tuned on local data when it is evaluated"),
    "fedprox": ("FedProx", "FedAvg with a proximal term to the received model"),
    "scaffold": ("Scaffold", "control variates cancel each client's gradient bias"),
    "local": ("local_only.LocalOnly", "no exchange at all: the lower bound"),
    "ditto": ("Ditto", "FedAvg and a private model pulled towards it"),
    "fedntd": (
        "FedNTD",
        "distils the received model on the logits of the classes that are not true",
    ),
    "ccvr": ("CCVR", "FedAvg, its classifier refitted on features drawn from class Gaussians"),
    "fedsam": ("FedSAM", "sharpness-aware local steps look for flat minima"),
    "fedfa": ("FedFA", "channel statistics of feature maps are varied as they vary over clients"),
    "fedfa_freq": ("FedFAFreq", "images of a batch swap parts of their amplitude spectra"),
    "fedca": ("FedCA", "averages that favour clients good at the worst classes"),
    "fedpolicy": ("FedPolicy", "an agent decides which block of the model each client gets back"),
    "qbandit": (
        "QBandit",
        "a bandit decides how many layers each client shares and how long it trains",
    ),
    "pfedrlla": ("PFedRLLA", "an agent mixes each client's head from previous participants' heads"),
    "fedpam": ("FedPAM", "a private matrix turns the shared head into each client's own"),
    "fedamp": ("FedAMP", "personal cloud models: attention over clients with similar weights"),
    "fedfomo": ("FedFomo", "others' models, weighted by what each gains on own validation rows"),
    "fedpac": (
        "FedPAC",
        "features aligned to class centroids, heads combined by a quadratic program",
    ),
    "fedala": (
        "FedALA",
        "every weight of the start is a learned mixture of old local and received model",
    ),
    "fedas": (
        "FedAS",
        "the received backbone is aligned to local features; Fisher-weighted averages",
    ),
    "pfedfda": (
        "PFedFDA",
        "class Gaussians as the classifier, interpolated between global and local",
    ),
    "fedcp": ("FedCP", "a policy splits each feature vector between a global and a private head"),
    "fedper": ("FedPer", "a common backbone, private heads, trained together"),
    "fedrep": ("FedRep", "as FedPer, but the head first and then the backbone"),
    "fedbabu": (
        "FedBABU",
        "only the body is trained, against a fixed head; fine-tuned at evaluation",
    ),
    "apfl": ("APFL", "the personal model is a learned mixture of a local and the global one"),
    "perfedavg": ("PerFedAvg", "a common start that is good after one local gradient step"),
    "pfedme": (
        "PFedMe",
        "the personal model is a proximal point of the client's copy of the common one",
    ),
    "fedrod": ("FedRoD", "a class-balanced common head and a private residual head"),
    "fedphp": ("FedPHP", "past personal models teach their features to the new one"),
    "full": ("redistribute.Full", "every client gets the full aggregate back"),
    "backbone": ("redistribute.Backbone", "clients keep their heads"),
    "head": ("redistribute.Head", "clients keep their backbones"),
    "random": ("redistribute.Random", "full, backbone or head at random"),
}
_NAMED = Named("method", __name__, _TABLE)
METHODS = _NAMED.lines  # name -> one line
CLASSES = _NAMED.modules  # class -> its module
_KINDS = _NAMED.given


def register(name: str, description: str = "") -> Callable[[M], M]:
    """A decorator: this class is the method called `name`, in `run` and on the command line.

    A method of your own: see docs/add-a-method.md.
    """
    return _NAMED.register(name, description)


def method_class(name: str) -> type[Method]:
    """The class of the method called `name`."""
    return _NAMED.kind(name)


def options_of(name: str) -> dict[str, Any]:
    """The options of a method with their defaults."""
    kind: Any = method_class(name)
    return {one.name: one.default for one in dataclasses.fields(kind)}


def controlled(name: str) -> bool:
    """Whether the method is steered by an agent with options of its own, written agent.OPTION."""
    return "agent" in options_of(name)


def make_method(name: str, /, **options: Any) -> Method:
    """Build a method by name; options may be strings, as the command line gives them.

    >>> make_method("fedprox", mu="0.1")
    FedProx(weights='size', mu=0.1)
    >>> make_method("fedpolicy", **{"agent": "ppo", "agent.lr": "0.01"}).agent.lr
    0.01
    """
    kind: Any = method_class(name)
    known = options_of(name)
    inner = [k for k in options if k.startswith("agent.") and controlled(name)]
    of_agent = {k.removeprefix("agent."): options.pop(k) for k in inner}
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", shown(option), known or ["(none)"])
    return kind.steered_by(of_agent, **options) if of_agent else kind(**options)


def options_in(method: Method) -> dict[str, Any] | None:
    """The options under which `make_method` builds this very method; None for a method of your own
    without a name.

    >>> options_in(make_method("fedprox", mu=0.1)), options_in(make_method("fedavg"))
    ({'mu': 0.1}, {})
    """
    if method.name not in METHODS or method_class(method.name) is not type(method):
        return None
    fields: Any = dataclasses.fields(method)  # type: ignore[arg-type]
    changed = {
        f.name: value
        for f in fields
        if (value := getattr(method, f.name)) != f.default and f.name != "agent"
    }
    if controlled(method.name):
        changed |= method.agent_in()  # type: ignore[attr-defined]
    return changed
