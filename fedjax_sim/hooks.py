"""What a method is: a frozen record of its options, with hooks that say what exists, what a client
and the server do.

Hooks marked ONE client are mapped over the cohort by the engine and may read no other client; the
others are the server's. Order of a round:

    select → peers → prepare → (observe → available → imposed → act) → plan
    → [receive → local]ᵢ → aggregate → (reward → learn)

A method inherits from `Method` (or from a method it varies) and overrides what it decides. What not
every method has is a class of its own, inherited beside it: `Personal`, `Peers`, `Controlled`,
`Selects`, `SetsUp`, `Finishes`. The engine asks for them with `method.ask(Personal)`. By convention
a server state is a NamedTuple with the common model in `net`; the defaults below rely on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from fedjax_sim.errors import unknown
from fedjax_sim.fields import Node
from fedjax_sim.local.score import predict_net
from fedjax_sim.local.sgd import Trained, local_sgd, upload
from fedjax_sim.plans import Wire, blend, floats_on_wire, full_plan, merge
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload

if TYPE_CHECKING:
    from fedjax_sim.models import Model

Kind = TypeVar("Kind")
NEEDS = {
    "resident": "every client's net after its last training is stored",
    "confusion": "every client's running soft confusion is tracked",
    "stack": "aggregate sees all uploads of the cohort at once",
}
NOTHING: frozenset[str] = frozenset()


class Server(NamedTuple):
    """The smallest state of a server; methods with more state have a record of their own with a
    field `net`."""

    net: Tree  # Θ


class Around(NamedTuple):
    """The server's state of a transform; see `transforms.base`."""

    inner: Any  # of the method inside
    mine: Tree


class Method(Node):
    """A federated method. Its hooks by default are FedAvg, weighted by the clients' numbers of
    examples."""

    name: ClassVar[str] = "method"
    weights = "size"  # of the average: 'size' (n_k) or 'uniform'
    adapts = False  # whether `personal` trains (fine-tuning): it is run at --personal-every

    # ---- declarations; a class attribute, or a property where it depends on the options ----------
    @property
    def needs(self) -> frozenset[str]:
        """What the engine stores for it: words of NEEDS."""
        return NOTHING

    @property
    def has_global_model(self) -> bool:
        """Whether there is a common model to evaluate."""
        return True

    @property
    def loss(self) -> str:
        """The local loss unless the run names one."""
        return "ce"

    @property
    def prefers(self) -> tuple[tuple[str, float], ...]:
        """lr, momentum: its own values, unless the run names one."""
        return ()

    @property
    def replaces(self) -> tuple[tuple[str, str], ...]:
        """Options of the run that it sets itself: (name, value and why)."""
        return ()

    @property
    def needs_classes(self) -> str:
        """Why it needs one class and one vector of logits per example; empty: it works with any
        task."""
        return ""

    @property
    def needs_sgd(self) -> str:
        """Why it is defined for plain SGD only; empty: it works with any optimiser."""
        return ""

    @property
    def payload(self) -> frozenset[str]:
        """Which of an Upload's `sums` and `report` the server works with; the others are for the
        log and the reward."""
        return NOTHING

    def refusal(self, transform: str) -> str:
        """Why a transform would break what it does; empty: it would not."""
        reads = self.ask(Peers) is not None
        return (
            "its clients read each other's stored models, which no transform passes"
            if reads
            else ""
        )

    @property
    def max_epochs(self) -> float:
        """The largest epochs its Plans ask for, if above the run's."""
        return 0.0

    @property
    def evolves(self) -> str:
        """Where in a State the parameters of its policy are, which `train --over` searches for;
        empty: it has no such policy."""
        return ""

    def ask(self, kind: type[Kind]) -> Kind | None:
        """Itself, if it has the capability `kind`, such as Personal; else None."""
        return self if isinstance(self, kind) else None

    # ---- the server ------------------------------------------------------------------------------
    def init(self, env: Env, net: Tree) -> tuple[Any, Tree]:
        """The start: (server state, ONE client's own state, which is repeated for all)."""
        return Server(net), ()

    def aggregate(self, env: Env, server: Any, cohort: Cohort) -> Any:
        """The server state after the round; the engine keeps the old one if nobody reported."""
        return server._replace(net=merge(env, cohort, server.net))

    def global_model(self, env: Env, server: Any) -> Tree:
        """The common net, as it is evaluated."""
        return server.net

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        """Floats on the wire in addition to the model, per participant: (down, up)."""
        return 0, 0

    def wire(self, env: Env, net: Tree) -> Wire:
        """Bits on the wire per participant."""
        return floats_on_wire(env.group_floats(net), self.extra_floats(env, net))

    def extend(self, model: Model) -> Model:
        """The run's model, perhaps with further parameters or groups; see `models.with_group`."""
        return model

    def log(self, env: Env, old: Any, server: Any, cohort: Cohort) -> dict[str, Array]:
        """Numbers for rounds.csv."""
        return {}

    @property
    def panels(self) -> dict[str, tuple[str, str, bool]]:
        """What the report draws of its log: column -> (title, name of the axis, whether it is added
        up over rounds)."""
        return {}

    def warnings(self, rounds: Sequence[dict[str, Any]]) -> list[str]:
        """Warnings about the rounds so far (rows of rounds.csv), a sentence each; each is printed
        once."""
        return []

    # ---- ONE client ------------------------------------------------------------------------------
    def plan(self, env: Env, server: Any, ctx: Ctx) -> Plan:
        """ONE client: what it receives, what it sends and how long it trains in this round."""
        return full_plan(env, ctx.epochs)

    def receive(
        self, env: Env, server: Any, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        """ONE client: (itself, the net it starts from)."""
        return client, server.net

    def local(
        self, env: Env, net: Tree, server: Any, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        """ONE client: its work of a round, from `net`; (itself afterwards, its upload)."""
        client, done = local_sgd(env, net, client, ctx)
        return client, self.upload(env, ctx, done)

    def upload(self, env: Env, ctx: Ctx, done: Trained, **more: Any) -> Upload:
        """ONE client: its trained net, weighted as the method weighs."""
        return upload(env, ctx, done, self.weights, **more)


# ---- capabilities --------------------------------------------------------------------------------
class Personal:
    """Clients have models of their own, as they are evaluated."""

    adapts = False  # whether `personal` trains (fine-tuning): it is run at --personal-every

    def personal(self, env: Env, server: Any, client: Client, ctx: Ctx) -> Tree:
        """ONE client: its own predictor: a net, or whatever `predict` reads. By default its
        resident net."""
        return client.resident

    def resident(self, env: Env, server: Any, client: Client, ctx: Ctx) -> Tree:
        """ONE client: its predictor where nothing is sent to it for the occasion (evaluation
        `resident`).

        By default `personal`, with its resident net in the place of the server's.
        """
        return self.personal(
            env,
            server._replace(net=client.resident) if hasattr(server, "net") else server,
            client,
            ctx,
        )

    def predict(self, env: Env, predictor: Tree, x: Array) -> Array:
        """ONE client: logits [B, C] of its predictor for images x [B, H, W, C]."""
        return predict_net(env, predictor, x)


class Peers:
    """A round reads the states of other clients; they are in `env.peers` [K, …]."""

    def peer_ids(self, env: Env, server: Any, ids: Array) -> Array:
        """ids [M] of the cohort -> [K] client numbers whose states the round reads; K never
        changes."""
        raise NotImplementedError

    def prepare(self, env: Env, server: Any, ids: Array, peers: Client) -> Any:
        """Work on the states of the peers [K, …] before training (embeddings, attention, …): the
        server's state of this round."""
        return server


class Stats(NamedTuple):
    """What is known of all clients when participants are chosen."""

    size: Array  # [N] training examples
    eligible: Array  # [N] bool: may take part


class Selects:
    """It decides who takes part; otherwise the participants are drawn uniformly."""

    def select(self, env: Env, server: Any, t: Array, key: Array, stats: Stats) -> Array:
        """[M] different client numbers, all eligible; where a round has fewer participants, the
        first ones of them."""
        raise NotImplementedError


class SetsUp:
    """Something happens on every client before round 1."""

    setup_trains = False  # it is long: worth a full compilation

    def setup(self, env: Env, server: Any, client: Client, ctx: Ctx) -> Client:
        """ONE client: once before round 1."""
        raise NotImplementedError


class Finishes:
    """The final model after the last planned round is not `global_model`."""

    def finish(self, env: Env, server: Any, key: Array) -> Tree:
        """The final model."""
        raise NotImplementedError


class Controlled:
    """An agent of `agents/` decides on the clients' plans, and learns from the results.

    `fedjax-sim train` trains it for later runs: with `training` as options of the method; they take
    over `hands_over`.
    """

    training: ClassVar[tuple[tuple[str, str], ...]] = ()

    @property
    def hands_over(self) -> tuple[str, ...]:
        """Parts of a State."""
        return ("agent",)

    def make_agent(self, env: Env) -> Any:
        """The agent, sized for this run; only sizes and names of `env.fed` are looked at."""
        raise NotImplementedError

    def observe(self, env: Env, server: Any, client: Client, ctx: Ctx) -> Array:
        """ONE client: what the agent sees of it, [S]."""
        raise NotImplementedError

    def available(self, env: Env, server: Any, client: Client, ctx: Ctx) -> Array | None:
        """ONE client: which of the agent's actions may be chosen for it now, [A] bool; None: every
        action, always."""
        return None

    def imposed(
        self, env: Env, server: Any, client: Client, ctx: Ctx
    ) -> tuple[Array, Array] | None:
        """ONE client: (whether, which action): taken in place of the agent's, which learns nothing
        from it; None: never.

        For continuous actions, which `available` cannot narrow down to one. `whether` is one for
        all of the action's numbers [], or one for each of them [A].
        """
        return None

    def plan_of(self, env: Env, action: Array, server: Any, ctx: Ctx) -> Plan:
        """ONE client: the plan that an action stands for."""
        raise NotImplementedError

    def reward_of(
        self, env: Env, old: Any, server: Any, report: Any, action: Array, ctx: Ctx
    ) -> Array:
        """ONE client: what its action was worth, []."""
        raise NotImplementedError

    def combine(self, env: Env, old: Any, server: Any, rewards: Array, cohort: Cohort) -> Array:
        """All rewards [M] at once -> [M]: shared sums, divergence terms, leave-one-out shares."""
        return rewards

    def log_actions(self, env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        """Numbers for rounds.csv from actions [M, …], who was active [M], and the contexts [M]."""
        return {}


def into_resident(env: Env, server: Any, client: Client, plan: Plan) -> Tree:
    """The groups that the plan takes come from the server, the others are as the client left
    them."""
    return blend(env, plan.take, server.net, client.resident)


def check_method(method: Method) -> Method:
    """The method itself; an unknown word in `needs` is an error."""
    for word in method.needs:
        if word not in NEEDS:
            raise unknown(f"word in needs of method '{method.name}':", word, NEEDS)
    return method
