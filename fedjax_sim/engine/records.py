"""The records of a round: what is static (`Round`), what the compiled program reads (`Data`), what
is decided before training (`RoundPlan`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.cohort import Slot
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Padded, Participation
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, check_method
from fedjax_sim.local.losses import Loss
from fedjax_sim.local.optim import Optimizer, Schedule
from fedjax_sim.platform import multiplying, target
from fedjax_sim.types import Array, Env, Scalar, Tree


class Numbers(NamedTuple):
    """Every real setting of a run, in the records that use them: their leaves are arguments of the
    compiled program."""

    method: Method
    loss: Loss
    optimizer: Optimizer
    lr: Schedule | tuple[()]  # () for a rate that is a function of the user's own


class Data(NamedTuple):
    """Everything the compiled program reads: an argument, never a constant."""

    fed: Federation  # its pool two-dimensional, a row per example
    counts: Float[Array, "clients classes"]  # training labels per client
    flat_rows: Int[Array, " examples"]  # evaluation rows of all clients, one after another
    flat_owner: Int[Array, " examples"]  # whose they are
    dropout: Scalar  # chance that a participant fails to report
    numbers: Numbers  # leaves []


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Known:
    """What is known about a round while it is traced: static, not an array."""

    same_epochs: bool  # every client that trains does Env.max_epochs


class RoundPlan(NamedTuple):
    """What is decided before training: who takes part, and what each client is to do."""

    slots: Slot  # [M]
    invited: Bool[Array, " participants"]  # takes part
    reported: Bool[Array, " participants"]  # will not fail to report
    observed: Tree  # [M, S] observations of the controller, () without one
    actions: Tree  # [M]
    imposed: Tree  # [M] whether the action was not the agent's choice, () where that never happens
    info: Tree  # [M] what the agent wants back with the transition
    server: Tree  # the server's state of this round: prepared, where the method prepares
    peers: Tree  # Client [K, …]: the states of the peers, () without peers
    known: Known


@dataclasses.dataclass(frozen=True)
class Round:
    """Everything static about a round. What changes is a `State`, what is read is `Data`."""

    method: Method
    env: Env  # without its traced parts; `open_env` fills them in
    participation: Participation | Padded
    layout: Layout
    lr: Callable[[Scalar], Scalar]  # learning rate as a function of the rounds completed
    evaluations: tuple[str, ...] = ("global", "personal")
    split: str = "test"  # rows on which clients are scored
    probe: bool = (
        False  # record participants' scores before and after local training, and how far they went
    )
    stacks: bool = False  # the outcome has every upload, whether the method needs them or not
    # of float32 products on accelerators: part of what is traced, no state of the process
    precision: str = "default"
    # "all": a State holds all clients; "cohort": only the cohort's, in its order
    stored: str = "all"

    def __post_init__(self) -> None:
        check_method(self.method)

    @property
    def keeps_resident(self) -> bool:
        return "resident" in self.method.needs or "resident" in self.evaluations

    @property
    def keeps_uploads(self) -> bool:
        return self.stacks or "stack" in self.method.needs

    @property
    def num_stored(self) -> int:
        return self.env.num_clients if self.stored == "all" else self.participation.high

    def row_of(self, ids: Int[Array, " participants"]) -> Int[Array, " participants"]:
        """Where the states of the cohort `ids` are in a State's clients."""
        return ids if self.stored == "all" else jnp.arange(ids.shape[0], dtype=jnp.int32)


def in_its_precision(stage: Callable) -> Callable:
    """A function of (Round, …) that multiplies in the precision of its Round."""

    @functools.wraps(stage)
    def precise(r: Round, *arguments: Any, **more: Any) -> Any:
        return multiplying(r.precision, stage)(r, *arguments, **more)

    return precise


def open_env(r: Round, data: Data) -> Env:
    """The environment with what the compiled program reads."""
    given: Any = jax.tree.structure(data.numbers.method)
    if given != jax.tree.structure(r.method):
        raise UserError(
            f"these data belong to a run of {data.numbers.method}, not of {r.method}; use those"
            " of the simulation"
        )
    numbers = data.numbers._asdict()  # method, loss, optimizer, lr
    return dataclasses.replace(r.env, fed=data.fed, counts=data.counts, **numbers)


def flat_pool(fed: Federation) -> Shaped[np.ndarray, "examples numbers"]:
    """The pool as `local.gather` reads it: [D, H·W·C], a row per example.

    A TPU stores rows that are no multiple of its 128 lanes column by column, and would turn the
    whole pool round in every call: there they are filled up.
    """
    x = np.asarray(fed.x).reshape(len(fed.x), -1)
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 128))) if target() == "tpu" else x


def make_data(r: Round, fed: Federation) -> Data:
    """What the compiled program reads, on the host."""
    rows, size = np.asarray(fed.rows[r.split]), np.asarray(fed.size[r.split])
    real = np.arange(rows.shape[1]) < size[:, None]
    host: Any = dict(
        counts=fed.label_counts().astype(r.env.dtype),
        flat_rows=rows[real].astype(np.int32),
        flat_owner=np.nonzero(real)[0].astype(np.int32),
        dropout=np.asarray(r.participation.dropout, r.env.dtype),
    )
    return Data(dataclasses.replace(fed, x=flat_pool(fed)), numbers=numbers_of(r), **host)


def numbers_of(r: Round) -> Numbers:
    """The real settings of a run, as arrays of its precision."""
    numbers = Numbers(
        r.method, r.env.loss, r.env.optimizer, r.lr if isinstance(r.lr, Schedule) else ()
    )
    return jax.tree.map(lambda value: np.asarray(value, r.env.dtype), numbers)
