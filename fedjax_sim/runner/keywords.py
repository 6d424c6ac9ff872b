"""Keywords of `fedjax_sim.run` as fields of a Config: names, values and sentences as the command
line has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.methods import METHODS, controlled, options_of
from fedjax_sim.options import convert, like, names, plain, real, shown, whole
from fedjax_sim.runner.config import FOUND, FULL, Config
from fedjax_sim.runner.provenance import DATA_WORDS
from fedjax_sim.transforms import TRANSFORMS, with_option

DEFAULTS = {name: value for name, value in vars(Config()).items() if name not in FOUND | {"method"}}
FIELDS = frozenset(DEFAULTS) | {"options"}
TEXT_OR_NONE = ("init", "data_dir", "start_from")
RANGES = ("participation", "stragglers")  # text such as "5:20", in Python also a pair
OF_COMMAND = {
    "evaluate": "evaluations",
    "transform": "transforms",
}  # names on the command line that differ


def sorted_out(method: Any, fed: Any, model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `run` as fields of Config: what is none of them is an option of the method, or of
    `model.` or `loss.`."""
    fields: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    around: list[tuple[str, str, Any]] = []  # options of transforms
    for key, value in given.items():
        name = OF_COMMAND.get(key, key.replace("-", "_"))
        owner, dot, inner = key.partition(".")
        if name in FIELDS:
            fields[name] = typed(name, value)
        elif dot and owner in ("model", "loss"):
            fields[f"{owner}_options"] = {**fields.get(f"{owner}_options", {}), inner: value}
        elif dot and owner in TRANSFORMS:
            around.append((owner, inner, value))
        else:
            rest[key] = value
    for owner, option, value in around:
        fields["transforms"] = with_option(fields.get("transforms", ()), owner, option, value)
    if "loss_options" in fields:
        fields["loss_options"] = {
            k: plain(v) if isinstance(v, str) else v for k, v in fields["loss_options"].items()
        }
    if fields.get("data_seed") == "follow":
        fields["data_seed"] = fields.get("seed", DEFAULTS["seed"])
    if fed is not None:
        beside = [name for name in DATA_WORDS if fields.get(name) is not None]
        if beside:
            raise UserError(
                f"{beside[0]}={fields[beside[0]]!r} says which data to load, but fed= gives them;"
                " leave one out"
            )
    if model is not None and fields.get("model_options"):
        raise UserError(
            "model_options belong to a model given by name, but model= is an object; leave one out"
        )
    if not isinstance(method, str):
        if rest or fields.get("options"):
            name = next(iter(rest or fields["options"]))
            raise UserError(
                f"'{name}' is not an option of a run, and the method is an object with its own"
                " options already; see fedjax_sim.Config for the options of a run"
            )
        return fields
    lookup("method", method, METHODS)
    known = options_of(method)
    for name in rest:
        if name not in known and not (name.startswith("agent.") and controlled(method)):
            raise unknown(f"option of a run or of method '{method}'", name, [*FIELDS, *known])
    if rest:
        fields["options"] = {**fields.get("options", {}), **rest}
    return fields


def typed(name: str, value: Any) -> Any:
    """A value as the field `name` of Config wants it, whether it was written as text or not; else a
    sentence.

    >>> typed("rounds", "5"), typed("participation", 0.5), typed("evaluations", "global,resident")
    (5, '0.5', ('global', 'resident'))
    >>> typed("participation", (5, 20)), typed("shuffle", False), typed("devices", 2)
    ('5:20', 'off', '2')
    >>> typed("rounds", 2.5)
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: rounds '2.5' is not a whole number; default: 30
    """
    value = value.item() if isinstance(value, np.generic) else value
    default, what = DEFAULTS[name], name.replace("_", "-")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    wrong = lambda wanted: UserError(f"{what} {shown(repr(value))} is not {wanted}")
    if name == "cohorts":
        return value if value is not None else ()  # checked with the data
    if name == "metrics":
        value = names(value) if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise wrong("a list of metrics, such as ('recall', 'calibration')")
        return tuple(value)
    if name == "evaluations":
        value = names(value) if isinstance(value, str) else value
        if (
            not isinstance(value, (list, tuple))
            or not all(isinstance(v, str) for v in value)
            or not value
        ):
            raise wrong("a list of evaluation modes, such as ('global', 'personal')")
        return tuple(value)
    if name == "transforms":
        value = (value,) if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise wrong("a list of transforms, such as ('clip:1.0', 'topk:0.01')")
        return tuple(value)
    if (name, value) in (("batch_size", FULL), ("data_seed", "follow")):
        return value
    if (
        name in RANGES and isinstance(value, (list, tuple)) and len(value) == 2
    ):  # (5, 20), or (0.3, 0.2)
        return ":".join(str(typed(name, bound)) for bound in value)
    if name == "shuffle" and isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(default, dict):
        if not isinstance(value, Mapping):
            raise wrong("a dict of options")
        return dict(value)
    if name in TEXT_OR_NONE:
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise wrong("a path")
        return None if value is None else os.fspath(value)
    if default is None:
        if value is None:
            return value
        if not (number or isinstance(value, str)):
            raise wrong("a number")
        return convert(
            what,
            repr(value) if isinstance(value, float) else str(value),
            real if "fraction" in name else whole,
        )
    if isinstance(default, str):
        if not (number or isinstance(value, str)):
            raise wrong("text")
        return str(value)
    if not (number or isinstance(value, (str, bool))) or (
        isinstance(value, bool) and not isinstance(default, bool)
    ):
        raise wrong("a number")
    return like(what, value, default)
