"""The nouns of the simulator. Shapes: N clients, M cohort slots, G parameter groups, C classes.

A *net* is `{"params": {group: …}, "batch_stats": {group: …}}`: everything a model needs to predict. Its top-level
keys are the ordered, named parameter groups over which all redistribution is defined. `batch_stats` is `{}` for
models without BatchNorm; running statistics travel and are averaged like parameters but are never counted as payload.

A *method* is a record of pure functions; those marked ONE are written for one client and the engine maps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

if TYPE_CHECKING:
    from fedjax_sim.data.federation import Federation
    from fedjax_sim.local.losses import Loss
    from fedjax_sim.models import Model

Tree = Any
Array = Any  # a jax.Array, a tracer, or a numpy array on its way in


class Ctx(NamedTuple):
    """What ONE client may look at in ONE round, beside its own rows of the pool."""

    id: Array  # []  client number; the row tables of the pool are indexed with it
    key: Array  # []  PRNG key: a function of (seed, round, client id), never of the slot in the cohort
    t: Array  # []  rounds completed before this one
    epochs: Array  # []  local epochs it manages: the Plan's, times a straggler's fraction
    lr: Array  # []  learning rate of this round


class Plan(NamedTuple):
    """ONE client's redistribution order; controllers only emit Plans, byte counting only reads them."""

    take: Array  # [G] 1: receives group g of what the server offers
    send: Array  # [G] 1: uploads group g
    epochs: Array  # []  local epochs, may be fractional
    peers: Tree = ()  # [k] client numbers whose models are mixed, if the method mixes a bank
    weights: Tree = ()  # [G, k] mixing weights over `peers`


class Upload(NamedTuple):
    """What ONE client hands to the server."""

    net: Tree  # averaged per group over those who send the group, with `weight`
    weight: Array  # []  n_k, 1, a Fisher trace, …; the engine sets it to 0 for a diverged client
    sums: Tree = ()  # added up over the cohort (control variates, feature statistics, …)
    report: Tree = ()  # small; stacked to [M, …] for `aggregate`, the reward and the log
    loss: Array | float = 0.0  # []  mean training loss, for the log
    accuracy: Array | float = 0.0  # []  training accuracy, for the log


class Cohort(NamedTuple):
    """What the server sees of one round, reduced while the clients were training."""

    mean: Tree  # net; per group the weighted mean over its senders (0 where nobody sent)
    weight: Array  # [G] total weight behind each group's mean
    sums: Tree  # sum over reporting clients of Upload.sums
    count: Array  # type: ignore[assignment]   # []  clients that reported
    ids: Array  # [M] client numbers, in the order they were sampled
    ok: Array  # [M] reported, and finite
    weights: Array  # [M] Upload.weight, 0 where not ok
    reports: Tree  # [M, …] Upload.report
    nets: Tree = ()  # [M, …] all uploads, only for methods with "stack" in `needs`
    key: Array = ()  # []  PRNG key of the server's own draws in this round


class Client(NamedTuple):
    """What persists for ONE client between rounds; stacked to [N, …] in `State`."""

    own: Tree = ()  # the method's private state
    confusion: Tree = ()  # losses.Confusion, when the loss or the method wants it
    resident: Tree = ()  # net last held by the client, when the method or an evaluation mode wants it
    batch_stats: Tree = ()  # BatchNorm running statistics that stay on the client (bn_stats="local")


class State(NamedTuple):
    """Everything that changes: one pytree = one checkpoint = exact resume."""

    t: Array  # []  rounds completed
    key: Array  # [2] uint32, raw PRNG key of the run
    server: Tree
    clients: Client  # leaves [N, …]
    agent: Tree  # () without a controller


@dataclasses.dataclass(frozen=True)
class Env:
    """Static facts of a run, closed over by the compiled round; only `fed` and `counts` are traced."""

    model: Model
    loss: Loss
    optimizer: optax.GradientTransformation  # direction only; the learning rate is applied by `descend`
    num_clients: int  # N
    cohort: int  # M: the most clients that can take part in one round
    batch_size: int
    epochs: float
    max_epochs: float  # the largest value a Plan may ask for (sizes the shuffle tables)
    rounds: int = 0  # planned rounds: schedules over rounds, `done` of the last transition
    track_confusion: bool = False
    bn_local: bool = False  # BatchNorm running statistics stay on the client
    dtype: Any = jnp.float32
    lanes: int = 1  # clients trained side by side (vmap width); 1 = no vmap, no masking
    fed: Federation = None  # type: ignore[assignment]   # filled in inside the compiled program
    counts: Array = None  # type: ignore[assignment]   # [N, C] training labels per client
    bank: Tree = ()  # [N, …] resident nets at the start of the round ("bank" methods only)

    @property
    def num_groups(self) -> int:
        return len(self.model.groups)

    def group_of(self, net: Tree) -> Tree:
        """A net-shaped tree of group numbers: leaf -> int in [0, G)."""
        index = {name: i for i, name in enumerate(self.model.groups)}
        return {
            part: {name: jax.tree.map(lambda _, i=index[name]: i, sub) for name, sub in groups.items()}
            for part, groups in net.items()
        }

    def group_floats(self, net: Tree) -> tuple[int, ...]:
        """Parameters per group (the payload; running statistics are not counted)."""
        return tuple(sum(leaf.size for leaf in jax.tree.leaves(net["params"].get(name, {}))) for name in self.model.groups)


class Control(NamedTuple):
    """The glue between one method and any agent of `agents/` with a matching action shape."""

    agent: Callable  # (env) -> agents.Agent; env.fed is concrete here, for sizes and checks
    observe: Callable  # (env, server, client, ctx) -> [S]                               ONE
    plan: Callable  # (env, action, server, ctx) -> Plan                              ONE
    reward: Callable  # (env, old_server, server, report, action, ctx) -> []            ONE
    combine: Callable | None = None  # (env, rewards [M], cohort) -> [M]: shared sums, divergence terms
    log: Callable | None = None  # (env, actions [M], active [M]) -> dict of round diagnostics


def _no_extra(env: Env, net: Tree) -> tuple[int, int]:
    return 0, 0


class Method(NamedTuple):
    """A federated method: what exists, what a client starts from, does, and uploads, and what the server makes of it."""

    name: str
    init: Callable  # (env, net) -> (server, own)   own: the template of ONE client's state
    receive: Callable  # (env, server, client, plan, ctx) -> (client, net)               ONE
    local: Callable  # (env, net, server, client, ctx) -> (client, Upload)             ONE
    aggregate: Callable  # (env, server, cohort) -> server
    personal: Callable | None  # (env, server, client, ctx) -> predictor; None: the global model  ONE
    global_model: Callable | None  # (env, server) -> net; None: the method has no global model
    finish: Callable | None = None  # (env, server, key) -> net: replaces global_model after the last planned round
    predict: Callable | None = None  # (env, predictor, x [B,H,W,C]) -> logits; None: predictor is a net
    plan: Callable | None = None  # (env, ctx) -> Plan; None: everything both ways                  ONE
    setup: Callable | None = None  # (env, server, client, ctx) -> client, once before round 1       ONE
    control: Control | None = None
    extra_floats: Callable = _no_extra  # (env, net) -> (down, up) floats per participant beside the model
    extend: Callable | None = None  # (model) -> model with further parameters or groups
    log: Callable | None = None  # (env, old_server, server, cohort) -> dict of scalars, per round
    needs: frozenset[str] = frozenset()  # of {"resident", "confusion", "bank", "stack"}
    adapts: bool = False  # `personal` trains (fine-tuning): run at --personal-every
    loss: str = "ce"  # the local loss unless the run names one
    max_epochs: float = 0.0  # the largest epochs its Plans ask for, if above the run's
