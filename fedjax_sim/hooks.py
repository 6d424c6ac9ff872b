"""What a method may decide: its hooks, one protocol each, and what happens where it decides nothing.

A method is a record of pure functions. Hooks written for ONE client are mapped over the cohort by the engine and may
look at nobody else; the others are the server's. Order of a round:

    sample → peers → prepare → (observe → available → act) → plan → [receive → local]ᵢ → aggregate → (reward → learn)

By convention a server state is a NamedTuple with the common model in `net`; the defaults below rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedjax_sim.errors import unknown
from fedjax_sim.plans import blend, merge
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload

if TYPE_CHECKING:
    from fedjax_sim.models import Model

NEEDS = {
    "resident": "every client's last held net is stored",
    "confusion": "every client's running soft confusion is tracked",
    "stack": "aggregate sees all uploads of the cohort at once",
}


class Server(NamedTuple):
    """The least a server keeps; methods with more state have a record of their own with a field `net`."""

    net: Tree  # Θ


# ---- the server's hooks -------------------------------------------------------------------------------------------
class Init(Protocol):
    def __call__(self, env: Env, net: Tree, /) -> tuple[Tree, Tree]:
        """The start: (server state, ONE client's own state, which is repeated for all)."""


class Peers(Protocol):
    def __call__(self, env: Env, server: Any, ids: Array, /) -> Array:
        """ids [M] of the cohort -> [K] client numbers whose stored rows the round reads; K never changes."""


class Prepare(Protocol):
    def __call__(self, env: Env, server: Any, ids: Array, rows: Client, /) -> Any:
        """Work on the peers' rows [K, …] before training (embeddings, attention, …): the server state of this round."""


class Aggregate(Protocol):
    def __call__(self, env: Env, server: Any, cohort: Cohort, /) -> Any:
        """The server state after the round; the engine keeps the old one if nobody reported."""


class GlobalModel(Protocol):
    def __call__(self, env: Env, server: Any, /) -> Tree:
        """The common net, as it is evaluated."""


class Finish(Protocol):
    def __call__(self, env: Env, server: Any, key: Array, /) -> Tree:
        """The net that is handed over after the last planned round, instead of `global_model`."""


class ExtraFloats(Protocol):
    def __call__(self, env: Env, net: Tree, /) -> tuple[int, int]:
        """Floats on the wire beside the model, per participant: (down, up)."""


class Extend(Protocol):
    def __call__(self, model: Model, /) -> Model:
        """The run's model with further parameters or groups; see `models.with_group`."""


class Log(Protocol):
    def __call__(self, env: Env, old: Any, server: Any, cohort: Cohort, /) -> dict[str, Array]:
        """Numbers for rounds.csv."""


# ---- ONE client's hooks -------------------------------------------------------------------------------------------
class MakePlan(Protocol):
    def __call__(self, env: Env, server: Any, ctx: Ctx, /) -> Plan:
        """ONE client: what it gets, gives and does in this round."""


class Receive(Protocol):
    def __call__(self, env: Env, server: Any, client: Client, plan: Plan, ctx: Ctx, /) -> tuple[Client, Tree]:
        """ONE client: (itself, the net it starts from)."""


class Local(Protocol):
    def __call__(self, env: Env, net: Tree, server: Any, client: Client, ctx: Ctx, /) -> tuple[Client, Upload]:
        """ONE client: its work of a round, from `net`; (itself afterwards, what it hands over)."""


class Personal(Protocol):
    def __call__(self, env: Env, server: Any, client: Client, ctx: Ctx, /) -> Tree:
        """ONE client: its own predictor: a net, or whatever `predict` reads."""


class Predict(Protocol):
    def __call__(self, env: Env, predictor: Tree, x: Array, /) -> Array:
        """ONE client: logits [B, C] of its predictor for images x [B, H, W, C]."""


class SetUp(Protocol):
    def __call__(self, env: Env, server: Any, client: Client, ctx: Ctx, /) -> Client:
        """ONE client: once before round 1."""


# ---- the controller's hooks ---------------------------------------------------------------------------------------
class MakeAgent(Protocol):
    def __call__(self, env: Env, /) -> Any:
        """An agent of `agents/`; env.fed is concrete here, for sizes and checks."""


class Observe(Protocol):
    def __call__(self, env: Env, server: Any, client: Client, ctx: Ctx, /) -> Array:
        """ONE client: what the agent sees of it, [S]."""


class Available(Protocol):
    def __call__(self, env: Env, server: Any, client: Client, ctx: Ctx, /) -> Array:
        """ONE client: which of the agent's actions may be chosen for it now, [A] bool."""


class PlanOf(Protocol):
    def __call__(self, env: Env, action: Array, server: Any, ctx: Ctx, /) -> Plan:
        """ONE client: the plan that an action stands for."""


class Reward(Protocol):
    def __call__(self, env: Env, old: Any, server: Any, report: Any, action: Array, ctx: Ctx, /) -> Array:
        """ONE client: what its action was worth, []."""


class Combine(Protocol):
    def __call__(self, env: Env, old: Any, server: Any, rewards: Array, cohort: Cohort, /) -> Array:
        """All rewards [M] at once -> [M]: shared sums, divergence terms, leave-one-out shares."""


class ControlLog(Protocol):
    def __call__(self, env: Env, actions: Array, active: Array, ctx: Ctx, /) -> dict[str, Array]:
        """Numbers for rounds.csv from actions [M, …], who was active [M], and the contexts [M]."""


class Control(NamedTuple):
    """The glue between one method and any agent of `agents/` with a matching action shape."""

    agent: MakeAgent
    observe: Observe
    plan: PlanOf
    reward: Reward
    available: Available | None = None  # None: every action, always
    combine: Combine | None = None
    log: ControlLog | None = None


# ---- what happens by default --------------------------------------------------------------------------------------
def only_a_model(env: Env, net: Tree) -> tuple[Server, tuple[()]]:
    return Server(net), ()


def whole_net(env: Env, server: Any, client: Client, plan: Plan, ctx: Ctx) -> tuple[Client, Tree]:
    return client, server.net


def into_resident(env: Env, server: Any, client: Client, plan: Plan, ctx: Ctx) -> tuple[Client, Tree]:
    """A `receive`: the groups that the plan takes come from the server, the others are as the client left them."""
    return client, blend(env, plan.take, server.net, client.resident)


def averaged(env: Env, server: Any, cohort: Cohort) -> Any:
    return server._replace(net=merge(env, cohort, server.net))


def server_net(env: Env, server: Any) -> Tree:
    return server.net


def resident_net(env: Env, server: Any, client: Client, ctx: Ctx) -> Tree:
    """A `personal` for methods whose clients are judged by what they last held."""
    return client.resident


def nothing_extra(env: Env, net: Tree) -> tuple[int, int]:
    return 0, 0


class Made(NamedTuple):
    """How `make_method` built a method, so that the engine can build it again with other real options."""

    method: Any  # as it was built; a hook that was exchanged since is left alone
    build: Callable[..., Any]  # (**numbers) -> Method
    numbers: Mapping[str, float]  # its options annotated Real, but for those that are 0 or that shape the program


class Method(NamedTuple):
    """A federated method: what exists, what a client starts from, does, and uploads, and what the server makes of it."""

    name: str
    local: Local
    init: Init = only_a_model
    peers: Peers | None = None  # None: nobody else's rows are read
    prepare: Prepare | None = None
    plan: MakePlan | None = None  # None: everything both ways
    receive: Receive = whole_net
    aggregate: Aggregate = averaged
    personal: Personal | None = None  # None: the global model
    predict: Predict | None = None  # None: a predictor is a net
    global_model: GlobalModel | None = server_net  # None: the method has no global model
    finish: Finish | None = None
    setup: SetUp | None = None
    setup_trains: bool = False  # it is long: worth a full compilation
    control: Control | None = None
    extra_floats: ExtraFloats = nothing_extra
    extend: Extend | None = None
    log: Log | None = None
    needs: frozenset[str] = frozenset()  # of NEEDS
    adapts: bool = False  # `personal` trains (fine-tuning): run at --personal-every
    loss: str = "ce"  # the local loss unless the run names one
    prefers: tuple[tuple[str, float], ...] = ()  # lr, momentum: its own values, unless the run names one
    replaces: tuple[tuple[str, str], ...] = ()  # options of the run that it sets itself: (name, value and why)
    max_epochs: float = 0.0  # the largest epochs its Plans ask for, if above the run's
    made: Made | None = None  # None: its options are constants of the compiled program


def check_method(method: Method) -> Method:
    """The method itself; a word in `needs` that nobody answers is an error."""
    for word in method.needs:
        if word not in NEEDS:
            raise unknown(f"word in needs of method '{method.name}':", word, NEEDS)
    return method
