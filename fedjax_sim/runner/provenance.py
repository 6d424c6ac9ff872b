"""What config.json and the hash say of a run's data, method and model; resuming with others is
refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.protocols import PARTITION
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment, Found
from fedjax_sim.experiment.settings import AUTO, GIVEN
from fedjax_sim.experiment.tree import Stored
from fedjax_sim.hooks import Method
from fedjax_sim.methods import make_method, options_in
from fedjax_sim.options import shown
from fedjax_sim.transforms import innermost, texts_of, transformed


def found_data(fed: Federation, custom: bool) -> Found:
    """Description and fingerprint of the data. custom: they were given from Python."""
    return Found(data=fed.description, data_fingerprint=fed.fingerprint(), custom_data=custom)


def with_data(experiment: Experiment, found: Found, fed: Federation) -> Experiment:
    """`experiment` with the settings of its data; where they were given from Python, settings for
    loading are reset."""
    changed: dict[str, Any] = dict(clients=fed.num_clients)
    if found.custom_data:
        changed |= dict.fromkeys(("partition", "protocol", "norm"), GIVEN)
        changed |= dict.fromkeys(("server_val", "val_fraction", "data_dir"))
        changed |= dict(download=False, dataset=fed.name, task=AUTO)
    elif experiment.data.partition == PARTITION:  # data without classes have another default
        changed["partition"] = next(
            (p for p in ("column:client", "iid") if f", {p}, " in fed.description), PARTITION
        )
    return experiment.replace(**changed)


def with_method(experiment: Experiment, found: Found, method: Method) -> tuple[Experiment, Found]:
    """Describe a method given as an object: by name and options if these rebuild it, else by its
    repr."""
    base, texts = innermost(method), texts_of(method)
    options = options_in(base)
    if (
        options is not None
        and texts is not None
        and transformed(make_method(base.name, **options), texts) == method
    ):
        chosen, custom = dict(options=options, transforms=tuple(texts)), ""
    else:
        chosen, custom = dict(options={}, transforms=()), repr(method)
    experiment = experiment.replace(method=base.name, **chosen)
    return experiment, dataclasses.replace(found, custom_method=custom)


def shapes_of(model: models.Model) -> str:
    """Checksum of a model's groups and of the names, shapes and types of its weights; nothing is
    computed."""
    leaves = jax.tree_util.tree_flatten_with_path(jax.eval_shape(model.init, jax.random.key(0)))[0]
    facts = [
        model.groups,
        model.head_group,
        [(jax.tree_util.keystr(p), a.shape, str(a.dtype)) for p, a in leaves],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def check_model(model: models.Model, fed: Federation, dtype: Any) -> None:
    """Refuse a user's model for other images, fewer classes or another dtype."""
    if tuple(model.shape) != fed.shape or model.classes < fed.classes:
        raise UserError(
            f"model '{model.name}' is for images {tuple(model.shape)} of {model.classes} classes; "
            f"the data are {fed.shape} of {fed.classes} classes"
        )
    kinds = {a.dtype for a in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))}
    for kind in sorted(map(str, kinds)):
        if jnp.issubdtype(kind, jnp.floating) and kind != jnp.dtype(dtype).name:
            raise UserError(
                f"model '{model.name}' has {kind} weights but the run is {jnp.dtype(dtype).name};"
                f" build it with dtype={jnp.dtype(dtype).name}, or run with dtype={kind}"
            )


def check_cohorts(
    cohorts: tuple[tuple[int, ...], ...], clients: int, unseen: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Fixed cohorts as tuples of client ids, checked."""
    try:
        table = tuple(tuple(_whole(i) for i in ids) for ids in cohorts)
        if not table:
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            "cohorts must list the ids of the participants of every round, not"
            f" {shown(repr(cohorts))}"
        ) from None
    kept_out = set(unseen)
    for at, ids in enumerate(table):
        if not ids or len(ids) != len(table[0]):
            raise UserError(
                f"cohort {at} has {len(ids)} clients and cohort 0 has {len(table[0])}; all need the"
                " same number"
            )
        for i in ids:
            if not 0 <= i < clients:
                raise UserError(f"cohort {at} names client {i}; allowed: 0 to {clients - 1}")
            if i in kept_out:
                raise UserError(
                    f"cohort {at} names client {i}, which is kept out of training (unseen)"
                )
            if ids.count(i) > 1:
                raise UserError(f"cohort {at} names client {i} twice; name each client once")
    return table


def _whole(value: Any) -> int:
    if isinstance(value, (bool, str)) or int(value) != value:
        raise ValueError
    return int(value)


# ---- resuming ------------------------------------------------------------------------------------
def check_same(
    before: tuple[Experiment, Found], now: tuple[Experiment, Found], fed: Federation
) -> None:
    """Refuse to resume with other data, another method or another model than the run began with."""
    (old, stored), (new, found) = before, now
    if stored.data_fingerprint != fed.fingerprint():
        raise UserError(
            f"the data are not those of the run: it used '{stored.data}' (content"
            f" {stored.data_fingerprint[:12]}), and this is '{fed.description}' (content"
            f" {fed.fingerprint()[:12]})"
        )
    named = lambda name, more: f"'{name}'" + (f" ({more})" if more else "")
    for what, was, now_is in (
        ("method", (old.method.name, stored.custom_method), (new.method.name, found.custom_method)),
        (
            "optimiser",
            (old.training.optimizer, stored.custom_optimizer),
            (new.training.optimizer, found.custom_optimizer),
        ),
        (
            "model",
            (old.model.name, f"shapes {stored.model_shapes}"),
            (new.model.name, f"shapes {found.model_shapes}"),
        ),
    ):
        if was != now_is:
            raise UserError(
                f"the {what} is not that of the run: it was {named(*was)}, and this is"
                f" {named(*now_is)}"
            )


def check_given(path: str | pathlib.Path, stored: Stored, **given: Any) -> None:
    """Objects that were given from Python must be given again: fed, method, model, optimizer,
    loss."""
    experiment, found = stored.experiment, stored.found
    needed = {
        "fed": (found.custom_data, f"data given from Python ({found.data})"),
        "method": (found.custom_method, f"a method given as an object ({experiment.method.name})"),
        "optimizer": (found.custom_optimizer, "an optimiser given as an object"),
        "loss": (found.custom_loss, f"a loss given as an object ({found.custom_loss})"),
        "model": (found.custom_model, f"a model given as an object ({experiment.model.name})"),
    }
    missing = {
        name: what for name, (custom, what) in needed.items() if custom and given.get(name) is None
    }
    if missing:
        wanted = ", ".join(f"{name}=…" for name in missing)
        raise UserError(
            f"'{path}' was run with {' and '.join(missing.values())}; resume it from Python with"
            f" fedjax_sim.resume({str(path)!r}, {wanted})"
        )
