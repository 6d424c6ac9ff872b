"""FedPolicy: after aggregation a server-side agent decides, per participant, which block of the
model goes back.

    state    S_k = [vec(C_k), acc(resident_k), ACC(Θ), ‖resident_k − Θ‖/‖Θ‖]
             C_k: soft confusion, rows sum to 1
    action   a_k ~ π(·|S_k):  full {Φ, Ψ} | backbone {Φ, ψ_k} | head {φ_k, Ψ}
             the rest stays as the client left it
    client   trained_k = SGD_E(init_k);  resident_k ← trained_k
    server   Θ ← (1/|K|) Σ_k trained_k
    reward   r_k = [acc(trained_k) − acc(resident_k)] + λ [ACC(Θ⁺) − ACC(Θ)]
             combined; its two terms alone: local, global
             r_k = ACC(Θ⁺) − ACC(Θ⁺ without k)                  contribution
             r_k = [acc(trained_k) − acc(resident_k)] + λ [ACC(Θ⁺) − ACC(Θ⁺ without k)]   mixture

acc is measured on the client's own validation rows, ACC on the server's; test rows are never used.
A transition is stored after the aggregation, with S'_k from trained_k and Θ⁺
(next_state=aggregation, as in the paper), or when the client takes part again, with what is
observed of it then (participation).

Before its first participation a client's resident model is Θ⁰, parts of which would enter the
average untrained. So only `full` is available then; first=any allows every action, as in the paper.

Agents are any of `agents/`, the static policies full, backbone and head, and `oracle`, which tries
every candidate on the client's validation rows and takes the one with the lowest loss (greedy, not
an upper bound). Static policies and random are also methods of these names. They need no validation
rows, and without any their reward is unknown (nan).

What a client kept enters the average too (send=all, as in the paper). With send=taken a client
sends only what it took; a group that it took in part counts with that weight. Rules without
learning: `docs/rules.md`.

Wire: |block| down, |w| up (C² + 1 report floats are not counted, as in the paper); with
send=taken |block| up.
State: the resident model, C_k, acc, when it last took part.
Evaluated: global; personal = resident.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from agents.registry import DISCRETE
from fedjax_sim.errors import UserError
from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Method, Personal, SetsUp
from fedjax_sim.local import local_sgd
from fedjax_sim.local.score import client_merit, held_merit
from fedjax_sim.methods import register
from fedjax_sim.methods.controllers import Steered
from fedjax_sim.methods.fedpolicy.actions import ACTIONS, BLOCKS, Actions, block_masks, oracle_agent
from fedjax_sim.methods.fedpolicy.contribution import contributions
from fedjax_sim.methods.fedpolicy.features import features, gaps
from fedjax_sim.methods.fedpolicy.rules import EXAMPLE, SEEN, parse, rule_agent
from fedjax_sim.methods.fedpolicy.state import (
    STATES,
    Own,
    Server,
    candidate_losses,
    observation_size,
    observe,
)
from fedjax_sim.plans import blend, merge
from fedjax_sim.tree import square_norm, subtract
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload

REWARDS = ("combined", "local", "global", "contribution", "mixture")
# learn nothing and need no validation rows; all but `rule` look at nothing
STATIC = (*BLOCKS, "random", "rule")
EVERYWHERE = ("blocks", "exchange_mix")  # what they may be called with: the default, and it
EXCHANGES = ("rule", "evolved")  # say what is taken and sent of backbone and head


def choosers() -> tuple[str, ...]:
    """Agents that choose a block; `fixed` goes by the block it always sends."""
    return (*(name for name in DISCRETE if name != "fixed"), "oracle", "rule")


WIDE = (
    1000  # observations wider than this (31 classes) are remembered 2,000 times instead of 10,000
)


class Report(NamedTuple):
    """What ONE client tells beside its model."""

    before: Array  # []  acc(resident)
    after: Array  # []  acc(trained)
    backbone_gap: Array  # []  ‖Φ − φ_k‖ at the start of the round
    head_gap: Array  # []  ‖Ψ − ψ_k‖
    moved: Array  # []  ‖init_k − Θ‖²


def scored(env: Env) -> bool:
    """Whether there are validation rows, on clients and on the server."""
    return "val" in env.fed.rows and "val" in env.fed.server_rows


def check_run(env: Env) -> None:
    """What an agent that learns needs of a federation."""
    if "val" not in env.fed.rows:
        raise UserError(
            f"fedpolicy needs validation rows on every client and '{env.fed.name}' was split"
            " without; allowed: --protocol fedpolicy"
        )
    if "val" not in env.fed.server_rows:
        raise UserError(
            f"fedpolicy needs rows that the server holds back for validation and '{env.fed.name}'"
            " has none; allowed: --protocol fedpolicy with --server-val 1 or more"
        )


class Redistribution(Steered, Personal, SetsUp, Method):
    """A policy decides which block of the aggregate a participant gets back; static ones observe
    nothing."""

    weights: str = field(
        "uniform",
        choices=("size", "uniform"),
        help="weights of the average: by n_k, or equal",
        kw_only=True,
    )
    first: str = field(
        "full",
        choices=("full", "any"),
        help="actions allowed at a first participation",
        kw_only=True,
    )
    send: str = field(
        "all",
        choices=("all", "taken"),
        help="what a participant sends: every group, or only what it took",
        kw_only=True,
    )
    agent: ClassVar[Any] = "full"
    rule = ""
    actions = "blocks"
    state = "all"
    state_scaling = "normalised"
    reward = "combined"
    next_state = "aggregation"
    greedy = False
    lam: ClassVar[Any] = 0.25
    loss = "c3e"

    @property
    def space(self) -> Actions:
        return ACTIONS["exchange_mix" if self.agent_name in EXCHANGES else self.actions]()

    @property
    def seen(self) -> str:
        """Which of STATES the agent sees."""
        return "portable" if self.agent_name == "evolved" else self.state

    @property
    def evolves(self) -> str:
        return "agent.parameters" if self.agent_name == "evolved" else ""

    @property
    def static(self) -> bool:
        return self.agent_name in STATIC

    @property
    def scores_uploads(self) -> bool:
        """Whether the reward asks what each upload was worth to the aggregate."""
        return self.reward in ("contribution", "mixture")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(
            {
                "resident",
                *(["confusion"] if not self.static and "confusion" in STATES[self.seen] else []),
                *(["stack"] if self.scores_uploads else []),
            }
        )

    # ---- the controller's side -------------------------------------------------------------------
    def make_agent(self, env: Env) -> Any:
        from agents.delayed import Delayed
        from agents.fixed import Fixed, Uniform
        from agents.greedy import Greedy

        block_masks(env)  # a head to tell from a backbone
        if not self.static or self.scores_uploads:
            check_run(env)
        choices = self.space.size(env)
        if self.agent_name == "rule":
            return rule_agent(self.rule, self.send == "taken", env.dtype)
        if self.static:
            policy = (
                Uniform()
                if self.agent_name == "random"
                else Fixed(action=BLOCKS.index(self.agent_name))
            )
            return policy.sized(1, choices, env.dtype)
        size = observation_size(self.seen, env.model.classes)
        if self.agent == "oracle":
            return oracle_agent(env.dtype)
        wide = 10_000 if size <= WIDE else 2_000
        for_this_run = self.for_run(
            size, choices, env, horizon=env.rounds or 105, cohort=env.cohort, capacity=wide
        )
        for_this_run = (
            for_this_run
            if self.next_state == "aggregation"
            else Delayed(inner=for_this_run, num_actors=env.num_clients)
        )
        return Greedy(inner=for_this_run) if self.greedy else for_this_run

    def observe(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        if self.agent_name == "rule":
            return features(env, server, client, ctx, SEEN)
        if self.static:
            return jnp.zeros(1, env.dtype)
        if self.agent == "oracle":
            takes = jax.vmap(lambda a: self.space.take(env, a))(jnp.arange(self.space.size(env)))
            return candidate_losses(env, server, client, ctx, takes)
        scaling = "centred" if self.agent_name == "evolved" else self.state_scaling
        return observe(env, server, client, ctx, self.seen, scaling)

    def available(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Array | None:
        if self.space.continuous or self.first == "any":
            return None
        choices = jnp.arange(self.space.size(env))
        takes = jax.vmap(lambda a: self.space.take(env, a))(choices)
        return client.own.joined | (takes >= 1).all(1)

    def imposed(
        self, env: Env, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Array, Array] | None:
        if not self.space.continuous or self.first == "any":
            return None
        size = self.space.size(env)
        said = jnp.arange(size) < (self.space.takes or size)
        # takes everything; what it sends is the agent's choice
        return ~client.own.joined & said, jnp.ones(size, env.dtype)

    def plan_of(self, env: Env, action: Array, server: Server, ctx: Ctx) -> Plan:
        take, send = self.space.take(env, action), self.space.send(env, action)
        return Plan(take, send * take if self.send == "taken" else send, ctx.epochs)

    def reward_of(
        self, env: Env, old: Server, server: Server, report: Report, action: Array, ctx: Ctx
    ) -> Array:
        own, common = report.after - report.before, server.acc - old.acc
        return {"combined": own + self.lam * common, "global": common}.get(self.reward, own)

    def combine(
        self, env: Env, old: Server, server: Server, rewards: Array, cohort: Cohort
    ) -> Array:
        if not self.scores_uploads:
            return rewards
        share = contributions(env, old.net, server.acc, cohort)
        return share if self.reward == "contribution" else rewards + self.lam * share

    def log_actions(self, env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        return self.space.log(env, actions, active, ctx)

    # ---- the federated side ----------------------------------------------------------------------
    def server_accuracy(self, env: Env, net: Tree) -> Array:
        return held_merit(env, net) if scored(env) else jnp.full((), jnp.nan, env.dtype)

    def own_accuracy(self, env: Env, net: Tree, ctx: Ctx) -> Array:
        return client_merit(env, net, ctx) if scored(env) else jnp.zeros((), env.dtype)

    def init(self, env: Env, net: Tree) -> tuple[Server, Own]:
        return Server(net, self.server_accuracy(env, net)), Own(
            jnp.zeros((), env.dtype), jnp.full((), -1, jnp.int32)
        )

    def setup(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Client:
        return client._replace(own=client.own._replace(acc=self.own_accuracy(env, server.net, ctx)))

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        return client, blend(env, plan.take, server.net, client.resident)

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        backbone, head = gaps(env, server.net, client.resident)
        moved = subtract(net["params"], server.net["params"])
        before = client.own.acc
        client, done = local_sgd(env, net, client, ctx)
        after = self.own_accuracy(env, done.net, ctx)
        report = Report(before, after, jnp.sqrt(backbone), jnp.sqrt(head), square_norm(moved))
        client = client._replace(own=Own(after, jnp.asarray(ctx.t, jnp.int32)))
        return client, self.upload(env, ctx, done, sums=moved, report=report)

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        net = merge(env, cohort, server.net)
        return Server(net, self.server_accuracy(env, net))

    def log(self, env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        count = jnp.maximum(cohort.count, 1)
        mean = jax.tree.map(lambda a: jnp.where(cohort.ok, a, 0).sum() / count, cohort.reports)
        centre = square_norm(jax.tree.map(lambda a: a / count, cohort.sums))
        known = (
            dict(server_val_acc=server.acc, local_gain=mean.after - mean.before)
            if scored(env)
            else {}
        )
        return known | dict(
            backbone_mismatch=mean.backbone_gap,
            head_mismatch=mean.head_gap,
            init_drift=jnp.maximum(mean.moved - centre, 0),
        )


@register("fedpolicy")
class FedPolicy(Redistribution):
    """An agent decides which block of the model each client gets back.

    agent: auto (sac, ddpg for mix, rule where a rule is given), sac, trpo, a2c, ppo, dqn, q_bandit,
    random, full, backbone, head, rule, evolved, oracle, ddpg, or an agent of `agents/`; its
    hyper-parameters on the command line: --set fedpolicy.agent.lr=0.01.
    """

    agent: Any = field("auto", help="an agent, or its name")  # type: ignore[misc]
    actions: str = field(
        "blocks",
        choices=tuple(ACTIONS),
        help="blocks, a mask or an interpolation per parameter group, or also what is sent",
    )
    rule: str = field("", help=f"the rule of agent=rule, such as '{EXAMPLE}'")
    state: str = field(
        "all",
        choices=tuple(STATES),
        help="without confusion (ncf), nor own accuracy (ncfnla); without distance (ocmla); "
        "without server (opd)",
    )
    state_scaling: str = field(
        "normalised", choices=("normalised", "raw"), help="scale of confusion and distance"
    )
    reward: str = field("combined", choices=REWARDS, help="one of the equations of r_k")
    lam: Real = field(0.25, ge=0, help="λ, weight of the global term of the reward")  # type: ignore[misc]
    next_state: str = field(
        "aggregation",
        choices=("aggregation", "participation"),
        help="S': after the aggregation, or when the client takes part again",
    )

    greedy: bool = field(
        False,
        help=(
            "the agent's best action instead of a draw; it learns nothing (--start-from RUN:agent)"
        ),
    )

    def agents_allowed(self) -> Iterable[str]:
        if self.space.continuous:
            return ("ddpg", *EXCHANGES)
        return (*choosers(), *(BLOCKS if self.actions == "blocks" else ()))

    def agent_defaults(self, name: str) -> dict[str, Any]:
        if name == "evolved":
            return dict(continuous=True, bias=False)
        usual: dict[str, Any] = dict(horizon=None, cohort=None, capacity=None, hidden=(64,))
        return usual | (
            dict(actions="box", bootstrap=True, noise=0.2) if self.space.continuous else {}
        )

    def check_rule(self) -> None:
        """A rule belongs to agent=rule, and says all of what is taken and sent."""
        if self.agent_name != "rule":
            if self.rule:
                raise UserError(
                    f"fedpolicy.rule has no effect with agent '{self.agent_name}'; allowed:"
                    " fedpolicy.agent=rule"
                )
            return
        if not self.rule.strip():
            raise UserError(
                f"fedpolicy.agent=rule needs a rule; allowed: fedpolicy.rule='{EXAMPLE}' and the"
                " like"
            )
        if self.actions not in EVERYWHERE:
            raise UserError(
                f"fedpolicy.actions={self.actions} has no effect with agent 'rule', which says what"
                " is taken and sent of backbone and head"
            )
        if parse(self.rule)["discount"] and self.send == "taken":
            raise UserError(
                "fedpolicy.rule: discount has no effect with fedpolicy.send=taken, where nothing"
                " that was kept is sent"
            )

    def check_evolved(self) -> None:
        """A policy trained across federations sees and decides what means the same in all."""
        if self.agent_name != "evolved":
            return
        for option, allowed in (("state", ("all", "portable")), ("actions", EVERYWHERE)):
            if (value := getattr(self, option)) not in allowed:
                raise UserError(
                    f"fedpolicy.{option}={value} does not go with agent 'evolved'; allowed:"
                    f" {allowed[-1]}"
                )

    def check(self) -> None:
        usual = "ddpg" if self.space.continuous else "sac"
        self.resolve_agent("rule" if self.rule else usual)
        self.check_rule()
        name = self.agent_name
        self.check_evolved()
        for option, usual in (("state", "all"), ("state_scaling", "normalised")):
            if self.static and (value := getattr(self, option)) != usual:
                raise UserError(
                    f"fedpolicy.{option}={value} has no effect with agent '{name}', which ignores"
                    " the state"
                )
        if self.greedy and (self.static or name == "oracle"):
            raise UserError(
                f"fedpolicy.greedy=true has no effect with agent '{name}', which explores nothing"
            )
        if self.next_state != "aggregation" and (self.static or name == "oracle"):
            raise UserError(
                f"fedpolicy.next_state={self.next_state} has no effect with agent '{name}', which"
                " learns nothing"
            )
