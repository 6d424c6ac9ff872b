"""From flat names and values, as a user gives them, to an Experiment.

A name is a setting (`lr`, `batch_size`, `evaluate`), an option of the method (`mu`, `agent`,
`agent.lr`; for one method among several `fedprox.mu`), of the model (`model.hidden`), of the loss
(`loss.gamma`), or of a transform (`clip.norm`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.experiment.tree import SETTINGS, Experiment
from fedjax_sim.methods import METHODS, controlled, make_method, options_of
from fedjax_sim.models import check_options
from fedjax_sim.options import convert, plain, shown, widths
from fedjax_sim.transforms import TRANSFORMS, transformed, with_option

KEYWORDS = frozenset(SETTINGS) - {"method"}
FLAGS = {one.flag: key for key, (_, _, one, _) in SETTINGS.items() if one.flag}
# options of the whole command, which are not allowed for one run among several
OF_THE_COMMAND = frozenset(
    {"out", "dry_run", "device", "quiet", "json", "seeds", "seeds_mode", "set", "preset"}
    | {"import", "log", "coordinator", "num_processes", "process_id"}
)


def key_of(name: str) -> str:
    """The keyword of a setting, from a keyword or an option.

    >>> key_of("batch-size"), key_of("evaluate"), key_of("fedprox.mu")
    ('batch_size', 'evaluations', 'fedprox.mu')
    """
    key = name.replace("-", "_")
    return FLAGS.get(key, key) if key in FLAGS or key in KEYWORDS | OF_THE_COMMAND else name


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from several sources by their keywords; later ones override.

    >>> layered({"batch-size": 1, "lr": 1}, {"batch_size": 2})
    {'lr': 1, 'batch_size': 2}
    """
    out: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            out.pop(key_of(name), None)  # moved to the end
            out[key_of(name)] = value
    return out


def read_entry(text: str) -> tuple[str, dict[str, str]]:
    """'METHOD:OPTION=VALUE,…' -> (method, settings).

    >>> read_entry("fedprox:mu=0.1,partition=dirichlet:0.1")
    ('fedprox', {'mu': '0.1', 'partition': 'dirichlet:0.1'})
    >>> read_entry("fedavg:evaluate=global,personal")[1]
    {'evaluate': 'global,personal'}
    """
    method, colon, rest = text.partition(":")
    lookup("method", method, METHODS)
    settings = {}
    for part in re.split(r",(?=[\w.-]+=)", rest) if colon else []:
        name, equals, value = part.partition("=")
        if not (equals and name and value):
            raise UserError(
                f"'{shown(text)}' cannot be read; use METHOD:OPTION=VALUE,OPTION=VALUE, e.g."
                " fedprox:mu=0.1,lr=0.05"
            )
        settings[name] = value
    return method, settings


def belongs(name: str, method: str) -> bool:
    """Whether `name` is an option of `method`, with or without the prefix METHOD."""
    name = name.removeprefix(f"{method}.")
    return name in options_of(method) or (name.startswith("agent.") and controlled(method))


def concerns(name: str, method: str) -> bool:
    """Whether `name` is a setting or option of a run of `method`."""
    owner = name.partition(".")[0]
    return key_of(name) in KEYWORDS or owner in ("model", "loss") or belongs(name, method)


def scoped(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a run of `method`: METHOD.OPTION, with a setting of the run as OPTION, is
    for that method only. '' removes a setting.

    >>> scoped(
    ...     "fedprox",
    ...     {"lr": 1, "fedprox.lr": 0.1, "fedavg.lr": 1, "fedprox.mu": 2, "fedprox.start_from": ""},
    ... )
    {'lr': 0.1, 'fedprox.mu': 2}
    """
    out: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in settings.items():
        owner, dot, option = name.partition(".")
        if dot and owner in METHODS and key_of(option) in KEYWORDS:
            own |= {key_of(option): value} if owner == method else {}
        else:
            out[key_of(name)] = value
    return {name: value for name, value in (out | own).items() if value != ""}


def experiment_of(
    method: str | Any,
    settings: Mapping[str, Any],
    others: Collection[str] = (),
    refused: Collection[str] = (),
) -> Experiment:
    """The experiment of a method, by name or as an object. others: methods whose options are
    allowed too and ignored; refused: names that are not allowed for one run."""
    named = isinstance(method, str)
    if named:
        lookup("method", method, METHODS)
    flat: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {"model": {}, "loss": {}, "method": {}}
    around: list[tuple[str, str, Any]] = []
    for name, value in settings.items():
        key, (owner, dot, option) = key_of(name), name.partition(".")
        if key in refused:
            flag = key.replace("_", "-")
            raise UserError(
                f"'{name}' is an option of the whole command, not of one run; give it as --{flag}"
            )
        if key in KEYWORDS:
            flat[key] = value
        elif dot and owner in ("model", "loss"):
            inside[owner][option] = value
        elif dot and owner in TRANSFORMS and owner not in METHODS:
            around.append((owner, option, value))
        elif named and (belongs(name, method) or (dot and owner == method)):
            inside["method"][name.removeprefix(f"{method}.")] = value
        else:
            refuse(method, name, others)
    for owner, key in (("model", "model_options"), ("loss", "loss_options"), ("method", "options")):
        if inside[owner]:
            flat[key] = {**flat.get(key, {}), **inside[owner]}
    return checked(method, flat, around)


def refuse(method: str | Any, name: str, others: Collection[str]) -> None:
    """Raise a UserError for a name that is no option of a run of `method` or of the others."""
    owner, dot, _ = name.partition(".")
    if any(belongs(name, other) for other in others):
        return
    if not isinstance(method, str):
        raise UserError(
            f"'{name}' is not an option of a run, and the method is an object with its own options"
            " already; see fedjax_sim.Experiment for the options of a run"
        )
    if dot and owner not in METHODS:
        owners = ["model", "loss", method, *others]
        raise unknown(f"owner in '{shown(name)}'", shown(owner), set(owners))
    known = {key.replace("_", "-") if "-" in name else key for key in KEYWORDS}
    options = [option for one in {method, *others} for option in options_of(one)]
    raise unknown(f"option of a run or of method '{method}'", shown(name), {*known, *options})


def checked(
    method: str | Any, flat: Mapping[str, Any], around: Sequence[tuple[str, str, Any]]
) -> Experiment:
    """The experiment of flat settings; converts options of method, model, loss and transforms."""
    name = method if isinstance(method, str) else method.name
    experiment = Experiment().replace(method=name, **flat)
    model, loss = dict(experiment.model.options), experiment.training.loss_options
    if isinstance(hidden := model.get("hidden"), str):
        model["hidden"] = convert("model.hidden", hidden, widths)
    if model:
        check_options(experiment.model.name, model)
    loss = {k: convert(f"loss.{k}", v, plain) if isinstance(v, str) else v for k, v in loss.items()}
    texts, options = experiment.method.transforms, experiment.method.options
    for owner, option, value in around:
        texts = with_option(texts, owner, option, value)
    if isinstance(method, str):
        instance = make_method(method, **options)
        transformed(instance, texts)
        options = {name: value_in(instance, name, value) for name, value in options.items()}
    return experiment.replace(
        model_options=model, loss_options=loss, options=options, transforms=texts
    )


def value_in(instance: Any, name: str, given: Any) -> Any:
    """The value of an option in a method if it is a plain value, else as given."""
    owner, _, option = name.rpartition(".")
    value = getattr(getattr(instance, owner, None) if owner else instance, option, None)
    return value if isinstance(value, (bool, int, float, str, tuple)) else given
