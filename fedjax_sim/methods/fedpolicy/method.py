"""FedPolicy: after aggregation a server-side agent decides, per participant, which block of the model goes back.

    state    S_k = [vec(C_k), acc(resident_k), ACC(Θ), ‖resident_k − Θ‖/‖Θ‖]        C_k: soft confusion, rows sum to 1
    action   a_k ~ π(·|S_k):  full {Φ, Ψ} | backbone {Φ, ψ_k} | head {φ_k, Ψ}       the rest stays as the client left it
    client   trained_k = SGD_E(init_k);  resident_k ← trained_k
    server   Θ ← (1/|K|) Σ_k trained_k
    reward   r_k = [acc(trained_k) − acc(resident_k)] + λ [ACC(Θ⁺) − ACC(Θ)]        combined; its terms: local, global
             r_k = ACC(Θ⁺) − ACC(Θ⁺ without k)                                      contribution, see there
             r_k = [acc(trained_k) − acc(resident_k)] + λ [ACC(Θ⁺) − ACC(Θ⁺ without k)]                        mixture

acc: on the client's own validation rows; ACC: on the server's. Test data is never looked at. Transitions are stored
after aggregation: S'_k from trained_k and Θ⁺ (next_state=aggregation, the paper's) or, complete only then, what is seen
of the client when it takes part again (participation). Before its first participation a client's resident model is Θ⁰,
parts of which would enter the average untrained: only `full` is available then (first=any: every action, the paper's).
Agents: any of `agents/`, the static policies full, backbone, head, and `oracle`, which tries every candidate on the
client's validation rows and takes the one with the lowest loss (greedy, not an upper bound). Static policies and random
are the methods of these names; they need no validation rows, and without any their reward is not known (nan).

Wire: |block| down, |w| up (C² + 1 report floats are not counted, as in the paper).
State: the resident model, C_k, acc, whether it took part.  Evaluated: global; personal = resident.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.registry import DISCRETE
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.hooks import Control, Method, resident_net
from fedjax_sim.local import descend, upload
from fedjax_sim.local.score import client_accuracy, held_accuracy
from fedjax_sim.methods.controllers import check_agent, make_agent
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.methods.fedpolicy.actions import ACTIONS, BLOCKS, block_masks, oracle_agent
from fedjax_sim.methods.fedpolicy.contribution import contributions
from fedjax_sim.methods.fedpolicy.state import STATES, Own, Server, candidate_losses, gaps, observation_size, observe
from fedjax_sim.plans import blend, merge
from fedjax_sim.tree import square_norm, subtract
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Real, Tree, Upload, concrete

REWARDS = ("combined", "local", "global", "contribution", "mixture")
STATIC = (*BLOCKS, "random")  # learn nothing, so that they look at nothing


def choosers() -> tuple[str, ...]:
    """Agents that choose a block; `fixed` goes by the block it always sends."""
    return (*(name for name in DISCRETE if name != "fixed"), "oracle")


WIDE = 1000  # observations wider than this (31 classes) are remembered 2,000 times instead of 10,000


class Report(NamedTuple):
    """What ONE client tells beside its model."""

    before: Array  # []  acc(resident)
    after: Array  # []  acc(trained)
    backbone_gap: Array  # []  ‖Φ − φ_k‖ at the start of the round
    head_gap: Array  # []  ‖Ψ − ψ_k‖
    moved: Array  # []  ‖init_k − Θ‖²


def scored(env: Env) -> bool:
    """Whether there are validation rows, on clients and on the server."""
    return "val" in env.fed.rows and "val" in env.fed.held


def check_run(env: Env) -> None:
    """What an agent that learns needs of a federation."""
    if "val" not in env.fed.rows:
        raise UserError(
            f"fedpolicy needs validation rows on every client and '{env.fed.name}' was split without; "
            f"allowed: --protocol fedpolicy"
        )
    if "val" not in env.fed.held:
        raise UserError(
            f"fedpolicy needs rows that the server holds back for validation and '{env.fed.name}' has none; "
            f"allowed: --protocol fedpolicy with --server-val 1 or more"
        )


def fedpolicy(
    agent: str = "auto",
    actions: str = "blocks",
    state: str = "all",
    state_scaling: str = "normalised",
    reward: str = "combined",
    lam: Real = 0.25,
    next_state: str = "aggregation",
    first: str = "full",
    weights: str = "uniform",
    agent_options: Mapping[str, Any] | None = None,
) -> Method:
    """agent: auto (sac, or ddpg for mix), sac, trpo, a2c, ppo, dqn, q_bandit, random, full, backbone, head, oracle, ddpg.
    actions: blocks, layerwise (a mask over the parameter groups) or mix (an interpolation per group).
    state: all, ncf (no confusion), ncfnla (nor local accuracy), ocmla (no distance), opd (no server accuracy).
    state_scaling: normalised or raw.
    reward: combined, local, global, contribution or mixture.  lam: λ of combined and mixture.
    next_state: aggregation or participation.  first: full or any, what a first participation allows.
    weights: of the average, uniform or size.
    agent_options: hyper-parameters of the agent; on the command line --set fedpolicy.agent.lr=0.01.
    """
    space = lookup("actions of fedpolicy", actions, ACTIONS)()
    agent = agent if agent != "auto" else "ddpg" if space.continuous else "sac"
    chosen = dict(agent_options or {})
    check_agent(
        "fedpolicy",
        agent,
        ("ddpg",) if space.continuous else (*choosers(), *(BLOCKS if actions == "blocks" else ())),
        chosen,
    )
    lookup("state of fedpolicy", state, STATES)
    lookup("state_scaling of fedpolicy", state_scaling, dict.fromkeys(("normalised", "raw")))
    lookup("reward of fedpolicy", reward, dict.fromkeys(REWARDS))
    lookup("next_state of fedpolicy", next_state, dict.fromkeys(("aggregation", "participation")))
    lookup("first of fedpolicy", first, dict.fromkeys(("full", "any")))
    static = agent in STATIC
    for name, value, default in (("state", state, "all"), ("state_scaling", state_scaling, "normalised")):
        if static and value != default:
            raise UserError(f"fedpolicy.{name}={value} has no effect with agent '{agent}', which looks at no state")
    if next_state != "aggregation" and (static or agent == "oracle"):
        raise UserError(f"fedpolicy.next_state={next_state} has no effect with agent '{agent}', which learns nothing")
    if concrete(lam) and not lam >= 0:
        raise UserError(f"fedpolicy.lam={lam:g} is not allowed; use 0 or more")

    share = reward in ("contribution", "mixture")

    def takes(env: Env) -> Array:
        return jax.vmap(lambda a: space.take(env, a))(jnp.arange(space.size(env)))

    def make(env: Env) -> Any:
        block_masks(env)  # a head to tell from a backbone
        if not static or share:
            check_run(env)
        if static:
            known = {} if agent == "random" else {"action": BLOCKS.index(agent)}
            return make_agent("random" if agent == "random" else "fixed", 1, space.size(env), known, {}, env.dtype)
        size, choices = observation_size(state, env.model.classes), space.size(env)
        if agent == "oracle":
            return oracle_agent(env.dtype)
        defaults: dict[str, Any] = dict(
            horizon=env.rounds or 105, cohort=env.cohort, hidden=(64,), capacity=10_000 if size <= WIDE else 2_000
        )
        if space.continuous:
            defaults |= dict(actions="box", bootstrap=True, noise=0.2)
        made = make_agent(agent, size, choices, chosen, defaults, env.dtype)
        if next_state == "aggregation":
            return made
        from agents.delayed import delayed

        return delayed(made, env.num_clients, size, choices, space.continuous, env.dtype)

    # ---- the controller's side ------------------------------------------------------------------------------------
    def watch(env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        if static:
            return jnp.zeros(1, env.dtype)
        if agent == "oracle":
            return candidate_losses(env, server, client, ctx, takes(env))
        return observe(env, server, client, state, state_scaling)

    def available(env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        return client.own.joined | (jnp.arange(space.size(env)) == space.full(env))

    def plan(env: Env, action: Array, server: Server, ctx: Ctx) -> Plan:
        return Plan(space.take(env, action), jnp.ones(env.num_groups), ctx.epochs)

    def reward_of(env: Env, old: Server, new: Server, report: Report, action: Array, ctx: Ctx) -> Array:
        own, common = report.after - report.before, new.acc - old.acc
        return {"combined": own + lam * common, "global": common}.get(reward, own)

    def combine(env: Env, old: Server, server: Server, own: Array, cohort: Cohort) -> Array:
        share = contributions(env, old.net, server.acc, cohort)
        return share if reward == "contribution" else own + lam * share

    # ---- the federated side ---------------------------------------------------------------------------------------
    def server_accuracy(env: Env, net: Tree) -> Array:
        return held_accuracy(env, net) if scored(env) else jnp.full((), jnp.nan, env.dtype)

    def own_accuracy(env: Env, net: Tree, ctx: Ctx) -> Array:
        return client_accuracy(env, net, ctx) if scored(env) else jnp.zeros((), env.dtype)

    def init(env: Env, net: Tree) -> tuple[Server, Own]:
        return Server(net, server_accuracy(env, net)), Own(jnp.zeros((), env.dtype), jnp.zeros((), bool))

    def setup(env: Env, server: Server, client: Client, ctx: Ctx) -> Client:
        return client._replace(own=client.own._replace(acc=own_accuracy(env, server.net, ctx)))

    def receive(env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx) -> tuple[Client, Tree]:
        take = plan.take
        if space.continuous and first == "full":  # an interpolation has no availability to forbid it
            take = jnp.where(client.own.joined, take, 1)
        return client, blend(env, take, server.net, client.resident)

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        backbone, head = gaps(env, server.net, client.resident)
        moved = subtract(net["params"], server.net["params"])
        before = client.own.acc
        client, done = descend(env, net, client, ctx)
        after = own_accuracy(env, done.net, ctx)
        report = Report(before, after, jnp.sqrt(backbone), jnp.sqrt(head), square_norm(moved))
        client = client._replace(own=Own(after, jnp.ones((), bool)))
        return client, upload(env, ctx, done, weights, sums=moved, report=report)

    def aggregate(env: Env, server: Server, cohort: Cohort) -> Server:
        net = merge(env, cohort, server.net)
        return Server(net, server_accuracy(env, net))

    def log(env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        count = jnp.maximum(cohort.count, 1)
        mean = jax.tree.map(lambda a: jnp.where(cohort.ok, a, 0).sum() / count, cohort.reports)
        centre = square_norm(jax.tree.map(lambda a: a / count, cohort.sums))
        known = dict(server_val_acc=server.acc, local_gain=mean.after - mean.before) if scored(env) else {}
        return known | dict(
            backbone_mismatch=mean.backbone_gap, head_mismatch=mean.head_gap, init_drift=jnp.maximum(mean.moved - centre, 0)
        )

    may = None if space.continuous or first == "any" else available
    return fedavg(weights)._replace(
        name="fedpolicy",
        init=init,
        setup=setup,
        receive=receive,
        local=local,
        aggregate=aggregate,
        log=log,
        personal=resident_net,
        control=Control(make, watch, plan, reward_of, may, combine if share else None, space.log),
        needs=frozenset({"resident", *([] if static else ["confusion"]), *(["stack"] if share else [])}),
        loss="c3e",
    )
