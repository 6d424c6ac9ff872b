"""Q-bandit: one server-side bandit picks, per client and round, how many leading layers it shares and how long it trains.

    state    s_k = [onehot(k), a_k, b_k/L, c_k/E_max]             budgets: c_k epochs, b_k layers (soft)
    action   (L_k, E_k) ∈ {1..L} × {0.01, 0.1, 0.5, 1, 2, 5}      ε-greedy on Q_θ(s_k, ·)
    client   layers 1..L_k ← the server's, L_k+1..L as it left them;  w_k ← SGD, max(1, round(E_k·⌈n_k/B⌉)) steps
    server   layer ℓ ← Σ_{k: L_k≥ℓ} n_k w_k^ℓ / Σ_{k: L_k≥ℓ} n_k;  a layer that nobody shared stays
    reward   r_k = a_k − λ_comp max(0, E_k−c_k) − λ_comm max(0, L_k−b_k) − λ_dist d_k;  scope `round`: Σ_k r_k for all
             d_k = (Σ_{ℓ≤L_k} ‖Δ_k^ℓ − mean_{j: L_j≥ℓ} Δ_j^ℓ‖²)^{1/2},  Δ: the update of this round
    agent    Huber_1(Q_θ(s_k, a_k) − r_k), no bootstrap;  ε ← max(0.05, 0.97 ε)

a_k: accuracy of the trained model on the minibatches of its round (every example once), or on its validation rows. A
layer is a parameter group of the model (cnn6, resnet18: six). control=layers trains the run's epochs, control=epochs
shares all layers; both drop the other budget from state and reward. Policies that do not learn: random; full (FedAvg: all
layers, the run's epochs); compliant (the largest depth and epochs of the menu within budget). clip=true cuts what any
agent chose to the client's budgets. Stragglers are judged by what they were told; who drops out counts nowhere.

Wire: Σ_{ℓ≤L_k} |w^ℓ| down and up.  State: the resident model, a_k, L_k.
Evaluated: global (the latest value of every layer); personal = server layers ≤ L_k, own layers above.
Logged: exceed_compute, exceed_comm (clients with E_k > c_k, L_k > b_k), depth_k, epochs_k (0: did not report),
divergence (mean d_k), pairwise_distance, seen_accuracy (mean a_k).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.registry import DISCRETE
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.hooks import Control, Method, into_resident
from fedjax_sim.local import batches_per_epoch, descend, most_steps, repeat, stream, turns, upload
from fedjax_sim.local.score import client_accuracy, predict_net
from fedjax_sim.methods.controllers import check_agent, make_agent
from fedjax_sim.methods.qbandit.actions import CONTROLS, MENU, Actions, prefix, read_menu
from fedjax_sim.methods.qbandit.budgets import Budgets, budgets_now, read_budgets, read_vary
from fedjax_sim.methods.qbandit.distance import divergence, pairwise_distance
from fedjax_sim.options import shown
from fedjax_sim.plans import blend
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Real, Tree, Upload, concrete


def choosers() -> tuple[str, ...]:
    """Agents, and policies without one, that choose depth and epochs."""
    return (*(name for name in DISCRETE if name != "fixed"), "full", "compliant")


class Server(NamedTuple):
    net: Tree  # the latest value of every layer
    budgets: Budgets  # [N]; in the state, so that a resumed run keeps those it began with


class Own(NamedTuple):
    accuracy: Array  # []  a_k of its last round, 0 before
    depth: Array  # []  L_k of its last round, all layers before


class Report(NamedTuple):
    accuracy: Array  # []  a_k


def round_accuracy(env: Env, net: Tree, ctx: Ctx, steps: Array) -> Array:
    """Accuracy of ONE client's trained net on the minibatches it was trained on in this round, every example once."""
    draw = stream(env, ctx, jax.random.fold_in(ctx.key, 0), 1.0)  # the batches of `descend`, its first epoch
    steps = jnp.minimum(steps, batches_per_epoch(env, env.fed.size["train"][ctx.id]))

    def add(k: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        batch = draw(k)
        seen = (batch.mask & (k < steps)).astype(env.dtype)
        hit = (predict_net(env, net, batch.x).argmax(-1) == batch.y) * seen
        return total[0] + hit.sum(), total[1] + seen.sum()

    nothing = jnp.zeros((), env.dtype)
    hits, count = repeat(turns(env, steps, *most_steps(env, 1.0)), add, (nothing, nothing))
    return hits / jnp.maximum(count, 1)


def qbandit(
    agent: str = "q_bandit",
    control: str = "joint",
    scope: str = "client",
    budgets: Any = "table1",
    vary: str = "0",
    clip: bool = False,
    accuracy: str = "train",
    depths: tuple[int, ...] = (),
    menu: str = MENU,
    lam_comp: Real = 1.0,
    lam_comm: Real = 2.0,
    lam_dist: Real = 0.01,
    agent_options: Mapping[str, Any] | None = None,
) -> Method:
    """agent: q_bandit, another discrete agent of `agents/`, random, full (FedAvg) or compliant (oracle).
    control: joint, layers or epochs.  scope: whose reward a client's action gets: client (its own terms) or round (the
    paper's sum over all).  budgets: table1 (the paper's ten clients, in turn for other numbers) or a .csv file with the
    columns epochs,layers and a line per client.  vary: v or v:period, budgets that swing by the share v.
    clip: cut actions to the budgets.  accuracy: train or heldout (validation rows).  depths: choices of L_k such as
    1x3x6, default all.  menu: choices of E_k.  lam_comp, lam_comm, lam_dist: λ of the reward.
    agent_options: hyper-parameters of the agent; on the command line --set qbandit.agent.lr=0.01.
    """
    chosen = dict(agent_options or {})
    check_agent("qbandit", agent, choosers(), chosen)
    steers = lookup("control of qbandit", shown(str(control)), CONTROLS)
    lookup("scope of qbandit", shown(str(scope)), dict.fromkeys(("client", "round")))
    lookup("accuracy of qbandit", shown(str(accuracy)), dict.fromkeys(("train", "heldout")))
    space = Actions(agent, steers, tuple(depths), read_menu(menu), bool(clip))
    works = "epochs" in steers and agent != "full"  # the run's epochs are not used
    swing = read_vary(vary)
    for name, value in (("lam_comp", lam_comp), ("lam_comm", lam_comm), ("lam_dist", lam_dist)):
        if concrete(value) and not value >= 0:
            raise UserError(f"qbandit.{name}={value:g} is not allowed; use 0 or more")
    for name, given, word in (("depths", bool(depths), "layers"), ("menu", menu != MENU, "epochs")):
        if given and (agent == "full" or word not in steers):
            raise UserError(f"qbandit.{name} says nothing with agent={agent} and control={control}; leave it out")

    def limits(env: Env, server: Server, id: Array, t: Array) -> Budgets:
        """ONE client's budgets in the round after t completed ones."""
        return budgets_now(env, server.budgets, id, t, swing)

    # ---- the controller's side ------------------------------------------------------------------------------------
    def make(env: Env) -> Any:
        layers, epochs = space.choices(env)
        read_budgets(budgets, env.num_clients, env.num_groups)  # what is wrong with them is said before anything is built
        if accuracy == "heldout" and "val" not in env.fed.rows:
            raise UserError(
                f"qbandit.accuracy=heldout needs validation rows on every client and '{env.fed.name}' was split without; "
                f"allowed: --val-fraction above 0, or --protocol fedpolicy"
            )
        size, count = env.num_clients + 1 + len(steers), len(layers) * len(epochs)
        if agent in ("full", "compliant"):
            return make_agent("fixed", size, count, {"action": 0}, {}, env.dtype)
        return make_agent(agent, size, count, chosen, dict(horizon=env.rounds or 100, cohort=env.cohort), env.dtype)

    def observe(env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        most = limits(env, server, ctx.id, ctx.t)
        scaled = dict(layers=most.layers / env.num_groups, epochs=jnp.minimum(most.epochs / max(space.choices(env)[1]), 1))
        parts = [jax.nn.one_hot(ctx.id, env.num_clients), client.own.accuracy[None], *(scaled[w][None] for w in steers)]
        return jnp.concatenate([part.astype(env.dtype) for part in parts])

    def plan(env: Env, action: Array, server: Server, ctx: Ctx) -> Plan:
        told = space.order(env, action, limits(env, server, ctx.id, ctx.t))
        shared = prefix(env, told.layers)
        return Plan(shared, shared, told.epochs)

    def reward(env: Env, old: Server, server: Server, report: Report, action: Array, ctx: Ctx) -> Array:
        most = limits(env, server, ctx.id, ctx.t)
        told = space.order(env, action, most)
        weights = dict(epochs=lam_comp, layers=lam_comm)
        over = sum(weights[w] * jnp.maximum(getattr(told, w) - getattr(most, w), 0) for w in steers)
        return report.accuracy - over

    def combine(env: Env, old: Server, server: Server, rewards: Array, cohort: Cohort) -> Array:
        rewards = rewards - lam_dist * divergence(env, cohort)
        if scope == "client":
            return rewards
        return jnp.broadcast_to(jnp.where(cohort.ok, rewards, 0).sum(), rewards.shape)

    # ---- the federated side ---------------------------------------------------------------------------------------
    def init(env: Env, net: Tree) -> tuple[Server, Own]:
        given = read_budgets(budgets, env.num_clients, env.num_groups)
        given = Budgets(jnp.asarray(given.epochs, env.dtype), jnp.asarray(given.layers))
        return Server(net, given), Own(jnp.zeros((), env.dtype), jnp.int32(env.num_groups))

    def receive(env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx) -> tuple[Client, Tree]:
        depth = (plan.take > 0).sum().astype(jnp.int32)
        return into_resident(env, server, client._replace(own=client.own._replace(depth=depth)), plan, ctx)

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        client, done = descend(env, net, client, ctx)
        seen = round_accuracy(env, done.net, ctx, done.steps) if accuracy == "train" else client_accuracy(env, done.net, ctx)
        client = client._replace(own=client.own._replace(accuracy=seen))
        return client, upload(env, ctx, done, report=Report(seen))

    def personal(env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return blend(env, prefix(env, client.own.depth), server.net, client.resident)

    def log(env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        most = jax.vmap(lambda id: limits(env, server, id, cohort.t))(cohort.ids)
        depth = (cohort.plan.take > 0).sum(1)
        each = lambda values: jnp.zeros(env.num_clients, values.dtype).at[cohort.ids].set(jnp.where(cohort.ok, values, 0))
        mean = lambda values: jnp.where(cohort.ok, values, 0).sum() / jnp.maximum(cohort.count, 1)
        return dict(
            exceed_compute=(cohort.ok & (cohort.plan.epochs > most.epochs)).sum(),
            exceed_comm=(cohort.ok & (depth > most.layers)).sum(),
            depth=each(depth),
            epochs=each(cohort.plan.epochs),
            divergence=mean(divergence(env, cohort)),
            pairwise_distance=pairwise_distance(env, cohort),
            seen_accuracy=mean(cohort.reports.accuracy),
        )

    return Method(
        name="qbandit",
        local=local,
        init=init,
        receive=receive,
        personal=personal,
        control=Control(make, observe, plan, reward, combine=combine),
        log=log,
        needs=frozenset({"resident", "stack"}),
        max_epochs=max(space.works) if works else 0.0,
        replaces=(("epochs", f"what {agent} chooses among {'x'.join(f'{e:g}' for e in space.works)}"),) if works else (),
    )
