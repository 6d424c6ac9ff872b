"""What a run was made of, as it stands in config.json and in the hash; and the refusal to go on
with anything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.protocols import PARTITION
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.methods import make_method, options_in
from fedjax_sim.options import shown
from fedjax_sim.runner.config import OWN, Config
from fedjax_sim.transforms import innermost, texts_of, transformed

DATA_WORDS = (
    "dataset",
    "partition",
    "protocol",
    "norm",
    "task",
    "clients",
    "server_val",
    "val_fraction",
    "data_dir",
    "download",
)


def with_data(config: Config, fed: Federation, own: bool) -> Config:
    """`config` with what its data are. own: given from Python, so that the words for loading data
    mean nothing."""
    facts: dict[str, Any] = dict(
        data=fed.description,
        data_fingerprint=fed.fingerprint(),
        own_data=own,
        clients=fed.num_clients,
    )
    if own:
        words = dict(
            partition=OWN,
            protocol=OWN,
            norm=OWN,
            server_val=None,
            val_fraction=None,
            data_dir=None,
            download=False,
        )
        facts |= words | dict(dataset=fed.name, task=Config.task)
    elif (
        config.partition == PARTITION
    ):  # data without classes have others: as their description says it
        facts["partition"] = next(
            (p for p in ("column:client", "iid") if f", {p}, " in fed.description), config.partition
        )
    return dataclasses.replace(config, **facts)


def with_method(config: Config, method: Method) -> Config:
    """`config` of a method given as an object: by its name and options, where these are enough to
    build it again."""
    base, texts = innermost(method), texts_of(method)
    options = options_in(base)
    if (
        options is not None
        and texts is not None
        and transformed(make_method(base.name, **options), texts) == method
    ):
        known = dict(method=base.name, options=options, transforms=tuple(texts), own_method="")
    else:
        known = dict(method=base.name, options={}, transforms=(), own_method=repr(method))
    return dataclasses.replace(config, **known)  # type: ignore[arg-type]


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
    """A model of the caller's: for these images, these classes, this precision."""
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
    """Fixed cohorts as tuples of whole numbers, or a sentence."""
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


# ---- going on ------------------------------------------------------------------------------------
def check_same(stored: Config, now: Config, fed: Federation) -> None:
    """Refuse to go on with other data, another method or another model than the run began with."""
    if stored.data_fingerprint != fed.fingerprint():
        raise UserError(
            f"the data are not those of the run: it was made on '{stored.data}' (content"
            f" {stored.data_fingerprint[:12]}), and this is '{fed.description}' (content"
            f" {fed.fingerprint()[:12]})"
        )
    if stored.method != now.method or stored.own_method != now.own_method:
        tell = lambda name, values: f"'{name}'" + (f" with {values}" if values else "")
        raise UserError(
            f"the method is not that of the run: it was {tell(stored.method, stored.own_method)}, "
            f"and this is {tell(now.method, now.own_method)}"
        )
    if (stored.optimizer, stored.own_optimizer) != (now.optimizer, now.own_optimizer):
        rule = lambda config: (
            f"'{config.optimizer}'" + f" ({config.own_optimizer})" * bool(config.own_optimizer)
        )
        raise UserError(
            f"the optimiser is not that of the run: it was {rule(stored)}, and this is {rule(now)}"
        )
    if stored.model != now.model or stored.model_shapes != now.model_shapes:
        raise UserError(
            f"the model is not that of the run: it was '{stored.model}' (shapes"
            f" {stored.model_shapes}), and this is '{now.model}' (shapes {now.model_shapes})"
        )


def check_given(
    path: Any,
    config: Config,
    fed: Any,
    method: Any,
    model: Any,
    optimizer: Any = None,
    loss: Any = None,
) -> None:
    """What was given from Python must be given again."""
    given: list[tuple[bool, Any, str, Callable[[], str]]] = [
        (config.own_data, fed, "fed", lambda: f"data given from Python ({config.data})"),
        (
            bool(config.own_method),
            method,
            "method",
            lambda: f"a method given as an object ({config.method})",
        ),
        (
            bool(config.own_optimizer),
            optimizer,
            "optimizer",
            lambda: "an optimiser given as an object",
        ),
        (
            bool(config.own_loss),
            loss,
            "loss",
            lambda: f"a loss given as an object ({config.own_loss})",
        ),
        (config.own_model, model, "model", lambda: f"a model given as an object ({config.model})"),
    ]
    missing = [(name, what()) for own, value, name, what in given if own and value is None]
    if missing:
        wanted = ", ".join(f"{name}=…" for name, _ in missing)
        raise UserError(
            f"'{path}' was run with {' and '.join(what for _, what in missing)}; go on from Python"
            f" with fedjax_sim.resume({str(path)!r}, {wanted})"
        )
