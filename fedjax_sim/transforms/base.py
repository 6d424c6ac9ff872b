"""What a transform is: a method around a method.

It may change what a client sends (`send`, with private state of its own), what goes down
(`hand_out`), what the server makes of all uploads (`step`, with state of its own), and says what
that costs on the wire (`wire`). Everything else is the inner method's. What the server works with
passes through `send`: the net, and `sums` and `report` where the method declares them as `payload`;
what is for the log does not. The client's resident model is what it trained, whatever it sends.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.fields import field
from fedjax_sim.hooks import (
    Around,
    Controlled,
    Finishes,
    Kind,
    Method,
    Peers,
    Personal,
    Selects,
    SetsUp,
    Stats,
)
from fedjax_sim.plans import Wire
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload


class Beside(NamedTuple):
    """ONE client's own state: the inner method's, the transform's, and the groups that it sends in
    this round."""

    inner: Tree
    mine: Tree
    send: Tree = ()  # [G] Plan.send, between `receive` and `local`


class Sent(NamedTuple):
    """What ONE client sends."""

    net: Tree
    sums: Tree = ()  # () where they are only for the log
    report: Tree = ()


def inside(client: Client) -> Client:
    """The client as the inner method knows it; also of peers [K, …]."""
    return client._replace(own=client.own.inner)


def env_inside(env: Env) -> Env:
    return (
        dataclasses.replace(env, peers=inside(env.peers)) if isinstance(env.peers, Client) else env
    )


class Transform(Personal, Peers, Controlled, Selects, SetsUp, Finishes, Method):
    """A method around `inner`; a subclass overrides the hooks of the first part, and wire."""

    alters = True  # what is sent, or what is made of it: a method may refuse that

    if TYPE_CHECKING:
        inner: Method = field(None)

    def __init_subclass__(cls, abstract: bool = False, **more: Any) -> None:
        """`inner` is a field after those of the transform itself: Clip(1.0, FedAvg()). abstract: a
        base of transforms."""
        if not abstract and not any(
            "inner" in getattr(base, "__dataclass_fields__", ()) for base in cls.__mro__[1:]
        ):
            cls.__annotations__ = {**vars(cls).get("__annotations__", {}), "inner": "Method"}
            cls.inner = field(None)
        super().__init_subclass__(**more)

    # ---- what a transform says -------------------------------------------------------------------
    def begin(self, env: Env, net: Tree) -> Tree:
        """ONE client's private state."""
        return ()

    def begin_server(self, env: Env, net: Tree) -> Tree:
        """The server's private state."""
        return ()

    def hand_out(self, env: Env, net: Tree, ctx: Ctx) -> Tree:
        """ONE client: the net it starts from, as it arrives."""
        return net

    def send(
        self, env: Env, mine: Tree, start: Tree, sent: Sent, mask: Array, ctx: Ctx
    ) -> tuple[Tree, Sent]:
        """ONE client: (private state, what it sends). start: the net it began with; mask [G] bool:
        groups that travel."""
        return mine, sent

    def step(self, env: Env, mine: Tree, old: Any, new: Any, cohort: Cohort) -> tuple[Tree, Any]:
        """The server: (private state, its state) from the inner method's states before and after
        aggregation."""
        return mine, new

    def check(self) -> None:
        if not isinstance(self.inner, Method):
            raise UserError(
                f"transform '{self.name}' goes around a method, not {self.inner!r}; e.g."
                " inner=FedAvg()"
            )
        why = self.inner.refusal(self.name) if self.alters else ""
        if why:
            raise UserError(f"method '{self.inner.name}' refuses transform '{self.name}': {why}")

    # ---- the inner method's facts ----------------------------------------------------------------
    needs = property(lambda self: self.inner.needs)  # type: ignore[assignment]
    has_global_model = property(lambda self: self.inner.has_global_model)  # type: ignore[assignment]
    loss = property(lambda self: self.inner.loss)  # type: ignore[assignment]
    prefers = property(lambda self: self.inner.prefers)  # type: ignore[assignment]
    replaces = property(lambda self: self.inner.replaces)  # type: ignore[assignment]
    needs_classes = property(lambda self: self.inner.needs_classes)  # type: ignore[assignment]
    needs_sgd = property(lambda self: self.inner.needs_sgd)  # type: ignore[assignment]
    payload = property(lambda self: self.inner.payload)  # type: ignore[assignment]
    panels = property(lambda self: self.inner.panels)  # type: ignore[assignment]
    max_epochs = property(lambda self: self.inner.max_epochs)  # type: ignore[assignment]
    adapts = property(lambda self: self.inner.adapts)  # type: ignore[assignment]
    evolves = property(lambda self: self.inner.evolves)  # type: ignore[assignment]
    setup_trains = property(lambda self: self.inner.setup_trains)  # type: ignore[assignment]

    def refusal(self, transform: str) -> str:
        return self.inner.refusal(transform)

    def ask(self, kind: type[Kind]) -> Kind | None:
        return super().ask(kind) if self.inner.ask(kind) is not None else None

    # ---- hooks that a transform takes part in ----------------------------------------------------
    def init(self, env: Env, net: Tree) -> tuple[Around, Beside]:
        server, own = self.inner.init(env, net)
        return Around(server, self.begin_server(env, net)), Beside(own, self.begin(env, net))

    def receive(
        self, env: Env, server: Around, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        own: Beside = client.own
        client, net = self.inner.receive(env_inside(env), server.inner, inside(client), plan, ctx)
        beside = Beside(client.own, own.mine, plan.send)
        return client._replace(own=beside), self.hand_out(env, net, ctx)

    def local(
        self, env: Env, net: Tree, server: Around, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        own: Beside = client.own
        after, up = self.inner.local(env_inside(env), net, server.inner, inside(client), ctx)
        resident = up.net if up.resident is None else up.resident
        payload = {name: getattr(up, name) for name in self.payload}
        mask = jnp.ones(env.num_groups, bool) if isinstance(own.send, tuple) else own.send > 0
        mine, sent = self.send(env, own.mine, net, Sent(up.net, **payload), mask, ctx)
        changed = {name: getattr(sent, name) for name in self.payload}
        return after._replace(own=Beside(after.own, mine)), up._replace(
            net=sent.net, resident=resident, **changed
        )

    def aggregate(self, env: Env, server: Around, cohort: Cohort) -> Around:
        new = self.inner.aggregate(env_inside(env), server.inner, cohort)
        mine, new = self.step(env, server.mine, server.inner, new, cohort)
        return Around(new, mine)

    # ---- hooks that are the inner method's -------------------------------------------------------
    def plan(self, env: Env, server: Around, ctx: Ctx) -> Plan:
        return self.inner.plan(env_inside(env), server.inner, ctx)

    def global_model(self, env: Env, server: Around) -> Tree:
        return self.inner.global_model(env, server.inner)

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        return self.inner.extra_floats(env, net)

    def wire(self, env: Env, net: Tree) -> Wire:
        return self.inner.wire(env, net)

    def extend(self, model: Any) -> Any:
        return self.inner.extend(model)

    def log(self, env: Env, old: Around, server: Around, cohort: Cohort) -> dict[str, Array]:
        return self.inner.log(env, old.inner, server.inner, cohort)

    def warnings(self, rounds: Any) -> list[str]:
        return self.inner.warnings(rounds)

    def personal(self, env: Env, server: Around, client: Client, ctx: Ctx) -> Tree:
        return self._inner.personal(env, server.inner, inside(client), ctx)

    def resident(self, env: Env, server: Around, client: Client, ctx: Ctx) -> Tree:
        return self._inner.resident(env, server.inner, inside(client), ctx)

    def predict(self, env: Env, predictor: Tree, x: Array) -> Array:
        return self._inner.predict(env, predictor, x)

    def select(self, env: Env, server: Around, t: Array, key: Array, stats: Stats) -> Array:
        return self._inner.select(env, server.inner, t, key, stats)

    def peer_ids(self, env: Env, server: Around, ids: Array) -> Array:
        return self._inner.peer_ids(env, server.inner, ids)

    def prepare(self, env: Env, server: Around, ids: Array, peers: Client) -> Around:
        return server._replace(
            inner=self._inner.prepare(env_inside(env), server.inner, ids, inside(peers))
        )

    def setup(self, env: Env, server: Around, client: Client, ctx: Ctx) -> Client:
        after = self._inner.setup(env, server.inner, inside(client), ctx)
        return after._replace(own=client.own._replace(inner=after.own))

    def finish(self, env: Env, server: Around, key: Array) -> Tree:
        return self._inner.finish(env, server.inner, key)

    def make_agent(self, env: Env) -> Any:
        return self._inner.make_agent(env)

    def observe(self, env: Env, server: Around, client: Client, ctx: Ctx) -> Array:
        return self._inner.observe(env_inside(env), server.inner, inside(client), ctx)

    def available(self, env: Env, server: Around, client: Client, ctx: Ctx) -> Array | None:
        return self._inner.available(env_inside(env), server.inner, inside(client), ctx)

    def imposed(
        self, env: Env, server: Around, client: Client, ctx: Ctx
    ) -> tuple[Array, Array] | None:
        return self._inner.imposed(env_inside(env), server.inner, inside(client), ctx)

    def plan_of(self, env: Env, action: Array, server: Around, ctx: Ctx) -> Plan:
        return self._inner.plan_of(env_inside(env), action, server.inner, ctx)

    def reward_of(
        self, env: Env, old: Around, server: Around, report: Any, action: Array, ctx: Ctx
    ) -> Array:
        return self._inner.reward_of(env_inside(env), old.inner, server.inner, report, action, ctx)

    def combine(
        self, env: Env, old: Around, server: Around, rewards: Array, cohort: Cohort
    ) -> Array:
        return self._inner.combine(env_inside(env), old.inner, server.inner, rewards, cohort)

    def log_actions(self, env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        return self._inner.log_actions(env, actions, active, ctx)

    @property
    def _inner(self) -> Any:
        """The inner method, which has what is asked of it here: see `ask`."""
        return self.inner
