"""The records of the simulator. Shapes: N clients, M cohort slots, K peers, G parameter groups, C
classes.

A *net* is `{"params": {group: …}, "batch_stats": {group: …}}`: everything a model needs to predict.
Its top-level keys are the ordered, named parameter groups over which all redistribution is defined.
`batch_stats` is `{}` for models without BatchNorm; running statistics travel and are averaged like
parameters but are never counted as payload.

What a method does with these is in `hooks`.

Shapes in signatures are jaxtyping's, with these names of axes:

    clients N        participants M   peers K      groups G     classes C
    batch B          features d       examples: rows of the pool, of one client or of a set
    height width channels of images   time T: places of a sequence    epochs, places of a shuffle

A name stands for one size within one call. Code for ONE client is mapped by vmap, and sees no axis
of clients. The tests check all of it with beartype (tests/conftest.py); users pay nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree

if TYPE_CHECKING:
    from fedjax_sim.data.federation import Federation
    from fedjax_sim.local.losses import Loss
    from fedjax_sim.local.optim import Optimizer
    from fedjax_sim.metrics.base import Metric
    from fedjax_sim.models import Model

if TYPE_CHECKING:
    Tree = Any
    Array = jax.Array
    Key = jax.Array
else:  # what a check accepts: outside of compiled programs arrays may also be NumPy's
    Tree = PyTree
    Array = jax.Array | np.ndarray | np.generic
    Key = Union[jaxtyping.Key[Array, ""], jaxtyping.UInt32[Array, " 2"]]  # noqa: UP007  typed or raw
Scalar = Float[Array, ""]
Count = Int[Array, ""]
Flag = Bool[Array, ""]


class Ctx(NamedTuple):
    """What ONE client may look at in ONE round, beside its own rows of the pool."""

    id: Count  # client number; the row tables of the pool are indexed with it
    key: Key  # a function of (seed, round, client id), never of the slot in the cohort
    t: Count  # rounds completed before this one
    epochs: Scalar  # local epochs it manages: the Plan's, times a straggler's fraction
    lr: Scalar  # learning rate of this round


class Plan(NamedTuple):
    """What ONE client receives, sends and how long it trains. Controllers only produce Plans, byte
    counting only reads them."""

    take: Float[Array, " groups"]  # 1: receives group g of what the server offers
    # [G] 1: uploads group g, 0: does not; other weights multiply the client's own in the average
    send: Array
    epochs: Scalar  # local epochs, may be fractional
    # [G, K+1] mixing weights over the round's peers and, last, the client's own model
    weights: Tree = ()


class Upload(NamedTuple):
    """What ONE client sends to the server."""

    net: Tree  # averaged per group over those who send the group, with `weight`
    weight: Scalar  # n_k, 1, a Fisher trace, …; the engine sets it to 0 for a diverged client
    sums: Tree = ()  # added up over the cohort (control variates, feature statistics, …)
    report: Tree = ()  # small; stacked to [M, …] for `aggregate`, the reward and the log
    loss: Scalar | float = 0.0  # mean training loss, for the log
    accuracy: Scalar | float = 0.0  # training accuracy, for the log
    # the net that the client keeps (its resident model), where that is not what it sends
    resident: Tree = None


class Cohort(NamedTuple):
    """What the server sees of one round, reduced while the clients were training."""

    mean: Tree  # net; per group the weighted mean over its senders (0 where nobody sent)
    weight: Float[Array, " groups"]  # total weight behind each group's mean
    sums: Tree  # sum over reporting clients of Upload.sums
    count: Count  # type: ignore[assignment]   # clients that reported
    ids: Int[Array, " participants"]  # client numbers, in the order they were sampled
    ok: Bool[Array, " participants"]  # reported, and finite
    weights: Float[Array, " participants"]  # Upload.weight, 0 where not ok
    reports: Tree  # [M, …] Upload.report
    plan: Plan  # [M, …] of each
    t: Count  # rounds completed before this one
    key: Key  # of the server's own draws in this round
    nets: Tree = ()  # [M, …] all uploads, only for methods with "stack" in `needs`
    # Upload.loss, 0 where not ok
    losses: Float[Array, " participants"] = ()  # type: ignore[assignment]


class Client(NamedTuple):
    """What persists for ONE client between rounds; stacked to [N, …] in `State`."""

    own: Tree = ()  # the method's private state
    confusion: Tree = ()  # losses.Confusion, when the loss or the method needs it
    # the net after its last training, when the method or an evaluation mode needs it
    resident: Tree = ()
    # BatchNorm running statistics that stay on the client (bn_stats="local")
    batch_stats: Tree = ()
    # [2] steps needed and executed in this round, counted by `local_sgd`; () in storage
    spent: Tree = ()
    optimizer: Tree = ()  # state of the local optimiser, where it stays with the client


class State(NamedTuple):
    """Everything that changes: one pytree = one checkpoint = exact resume."""

    t: Count  # rounds completed
    key: Key  # of the run, raw
    server: Tree
    clients: Client  # leaves [N, …]
    agent: Tree  # () without a controller


def _fact(**more: Any) -> Any:
    """A field that is part of the compiled program, not an argument of it."""
    return dataclasses.field(metadata={"static": True}, **more)


def _argument(**more: Any) -> Any:
    """A field that the compiled program reads."""
    return dataclasses.field(**more)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Env:
    """The facts of a run, as one argument: static ones, and what the compiled program reads
    (`optimizer`, `fed`, …)."""

    model: Model = _fact()
    loss: Loss = _argument()
    optimizer: Optimizer = _argument()
    num_clients: int = _fact()  # N
    cohort: int = _fact()  # M: the most clients that can take part in one round
    batch_size: int = _fact()
    epochs: float = _fact()
    max_epochs: float = _fact()  # the largest value a Plan may ask for (sizes the shuffle tables)
    kept_out: int = _fact(default=0)  # clients that never take part, only evaluated
    # planned rounds: schedules over rounds, `done` of the last transition
    rounds: int = _fact(default=0)
    # parts of the State that come from another run (--start-from)
    started: tuple[str, ...] = _fact(default=())
    track_confusion: bool = _fact(default=False)
    bn_local: bool = _fact(default=False)  # BatchNorm running statistics stay on the client
    # the optimiser's state stays with the client between rounds
    keeps_optimizer: bool = _fact(default=False)
    shuffle: bool = _fact(default=True)  # False: minibatches in the order of the client's rows
    dtype: Any = _fact(default=jnp.float32)
    vmap_width: int = _fact(default=1)  # clients trained side by side; 1: no vmap, no masking
    mapped: tuple[str, ...] = _fact(default=())  # vmap axes around the whole round, by name
    even: bool = _fact(default=False)  # all clients have equally many minibatches per epoch
    full: bool = _fact(default=False)  # and all of these are whole
    same_epochs: bool = _fact(default=False)  # every client that trains does max_epochs
    # what is measured, the primary one first; (): `metrics.DEFAULT`
    metrics: tuple[Metric, ...] = _fact(default=())
    fed: Federation = None  # type: ignore[assignment]   # filled in inside the compiled program
    # training labels per client
    counts: Float[Array, "clients classes"] = None  # type: ignore[assignment]
    peers: Tree = ()  # Client [K, …]: states of the round's peers, as they were at its start
    share: Any = None  # []  of the clients take part in a round; None: cohort / population
    lr: Any = ()  # Schedule of the learning rate
    method: Any = None  # the run's method, whose real fields are arguments too

    @property
    def population(self) -> int:
        """Clients that can take part."""
        return self.num_clients - self.kept_out

    @property
    def num_groups(self) -> int:
        return len(self.model.groups)

    def group_of(self, net: Tree) -> Tree:
        """A net-shaped tree of group numbers: leaf -> int in [0, G)."""
        index = {name: i for i, name in enumerate(self.model.groups)}
        return {
            part: {
                name: jax.tree.map(lambda _, i=index[name]: i, sub) for name, sub in groups.items()
            }
            for part, groups in net.items()
        }

    def group_floats(self, net: Tree) -> tuple[int, ...]:
        """Parameters per group (the payload; running statistics are not counted)."""
        return tuple(
            sum(leaf.size for leaf in jax.tree.leaves(net["params"].get(name, {})))
            for name in self.model.groups
        )
