"""Q-bandit: one server-side bandit picks, per client and round, how many leading layers it shares
and how long it trains.

    state    s_k = [onehot(k), a_k, b_k/L, c_k/E_max]         budgets: c_k epochs, b_k layers (soft)
    action   (L_k, E_k) ∈ {1..L} × {0.01, 0.1, 0.5, 1, 2, 5}      ε-greedy on Q_θ(s_k, ·)
    client   layers 1..L_k ← the server's, L_k+1..L as it left them
             w_k ← SGD, max(1, round(E_k·⌈n_k/B⌉)) steps
    server   layer ℓ ← Σ_{k: L_k≥ℓ} n_k w_k^ℓ / Σ_{k: L_k≥ℓ} n_k;  a layer that nobody shared stays
    reward   r_k = a_k − λ_comp max(0, E_k−c_k) − λ_comm max(0, L_k−b_k) − λ_dist d_k
             scope `round`: Σ_k r_k for all
             d_k = (Σ_{ℓ≤L_k} ‖Δ_k^ℓ − mean_{j: L_j≥ℓ} Δ_j^ℓ‖²)^{1/2},  Δ: the update of this round
    agent    Huber_1(Q_θ(s_k, a_k) − (r_k − mean)/spread), no bootstrap;  ε ← max(0.05, 0.97 ε)
             mean and spread (1 where it is less): of the rewards that it learns from

Beside the paper's learner there is agent=ridge_bandit. Penalties are known functions of the action:
they are part of its observation, the reward leaves them out, and they are subtracted when an action
is chosen. Its values of a depth and of a number of epochs add up. It tries only actions within
budget, and leaves the largest of these only for a gain that it is sure of.

reward=gain: L_val(M_k before) − L_val(M_k after the server has averaged) of the composed model M_k,
minus the cohort's mean, which falls during training. dual=η: λ ← λ + η · mean excess of a round.

a_k is the accuracy of the trained model on rows that it was not trained on, the client's validation
rows (under protocol qbandit a twentieth of its rows). With accuracy=train it is measured on the
minibatches of the round, every example once: it then rises with the time spent on them, so an
action is rewarded for what it did not achieve.

A layer is a parameter group of the model (cnn6, resnet18: six). control=layers trains the run's
epochs, control=epochs shares all layers; both drop the other budget from state and reward.
clip=true cuts the action of any agent to the client's budgets. Stragglers are judged by their plan;
clients that drop out are not counted.

Policies that do not learn: random; full (FedAvg: all layers, the run's epochs); compliant (the
largest depth and epochs of the menu within budget).

Wire: Σ_{ℓ≤L_k} |w^ℓ| down and up.  State: the resident model, a_k, L_k.
Evaluated: global (the latest value of every layer); personal = server layers ≤ L_k, own layers
above. Logged: exceed_compute, exceed_comm (clients with E_k > c_k, L_k > b_k), depth_k, epochs_k
(0: did not report), divergence (mean d_k), pairwise_distance, seen_accuracy (mean a_k).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.registry import DISCRETE
from fedjax_sim.errors import UserError
from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Method, Personal, into_resident
from fedjax_sim.local import batches_per_epoch, local_sgd, most_steps, repeat, stream, turns
from fedjax_sim.local.score import client_merit, mean_loss, predict_net
from fedjax_sim.methods import register
from fedjax_sim.methods.controllers import Steered
from fedjax_sim.methods.qbandit.actions import CONTROLS, MENU, Actions, prefix, read_menu
from fedjax_sim.methods.qbandit.budgets import Budgets, budgets_now, read_budgets, read_vary
from fedjax_sim.methods.qbandit.distance import divergence, pairwise_distance
from fedjax_sim.plans import blend
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload


def choosers() -> tuple[str, ...]:
    """Agents, and policies without one, that choose depth and epochs."""
    return (*(name for name in DISCRETE if name != "fixed"), "full", "compliant")


class Server(NamedTuple):
    net: Tree  # the latest value of every layer
    budgets: Budgets  # [N]; in the state, so that a resumed run keeps those it began with
    prices: Tree = ()  # {epochs, layers: []} λ_comp and λ_comm where they follow dual ascent


class Own(NamedTuple):
    accuracy: Array  # []  a_k of its last round, 0 before
    depth: Array  # []  L_k of its last round, all layers before
    loss: Tree = ()  # []  with reward=gain: of its composed model when this round began


class Report(NamedTuple):
    accuracy: Array  # []  a_k
    loss: Tree = ()  # []  with reward=gain: of its composed model before the round


def round_accuracy(env: Env, net: Tree, ctx: Ctx, steps: Array) -> Array:
    """Accuracy of ONE client's trained net on the minibatches it was trained on in this round,
    every example once."""
    # the batches of `local_sgd`, its first epoch
    draw = stream(env, ctx, jax.random.fold_in(ctx.key, 0), 1.0)
    steps = jnp.minimum(steps, batches_per_epoch(env, env.fed.size["train"][ctx.id]))

    def add(k: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        batch = draw(k)
        seen = (batch.mask & (k < steps)).astype(env.dtype)
        hit = (predict_net(env, net, batch.x).argmax(-1) == batch.y) * seen
        return total[0] + hit.sum(), total[1] + seen.sum()

    nothing = jnp.zeros((), env.dtype)
    hits, count = repeat(turns(env, steps, *most_steps(env, 1.0)), add, (nothing, nothing))
    return hits / jnp.maximum(count, 1)


def val_loss(env: Env, net: Tree, id: Array) -> Array:
    """Of ONE client's held-out rows."""
    return mean_loss(env, net, env.fed.rows["val"][id], env.fed.size["val"][id])


def composed_losses(env: Env, net: Tree, cohort: Cohort) -> Array:
    """[M] held-out losses of the clients' models with the new server's layers where they share."""
    alone = dataclasses.replace(env, vmap_width=1)

    def one(each: tuple) -> Array:
        own, take, id = each
        return val_loss(alone, blend(env, take, net, own), id)

    return jax.lax.map(one, (cohort.nets, cohort.plan.take, cohort.ids))


@register("qbandit")
class QBandit(Steered, Personal, Method):
    """A bandit decides how many layers each client shares and how long it trains.

    agent: q_bandit, ridge_bandit, another discrete agent of `agents/`, random, full (FedAvg) or
    compliant (oracle); its hyper-parameters on the command line: --set qbandit.agent.lr=0.01.
    scope: whose reward a client's action gets: client (its own terms) or round (the paper's sum
    over all).
    budgets: table1 (the paper's ten clients, in turn for other numbers), a .csv file with the
    columns epochs,layers and a line per client, or pairs of numbers.
    """

    needs_classes = "its rewards are accuracies of classes"

    agent: Any = field("q_bandit", help="an agent, or its name")  # type: ignore[misc]
    control: str = field("joint", choices=tuple(CONTROLS), help="what the agent decides")
    scope: str = field("client", choices=("client", "round"), help="whose reward an action gets")
    budgets: Any = field("table1", help="table1, a .csv file, or pairs (epochs, layers)")
    vary: str = field("0", help="v or v:period: budgets that vary by the share v")
    clip: bool = field(False, help="cut actions to the budgets")
    accuracy: str = field(
        "heldout",
        choices=("heldout", "train"),
        help="where a_k is measured: validation rows, or the round's minibatches",
    )
    depths: tuple[int, ...] = field((), help="depths L_k to choose from, such as 1x3x6 (none: all)")
    menu: Any = field(MENU, help="epochs E_k to choose from")
    reward: str = field(
        "accuracy",
        choices=("accuracy", "gain"),
        help="a_k, or how far the held-out loss of the client's composed model fell, minus the"
        " cohort's mean",
    )
    dual: Real = field(
        0.0, ge=0, off=True, help="step of dual ascent on the two λ, by the mean excess of a round"
    )
    lam_comp: Real = field(1.0, ge=0, help="λ of exceeded epochs")
    lam_comm: Real = field(2.0, ge=0, help="λ of exceeded layers")
    lam_dist: Real = field(0.01, ge=0, help="λ of the divergence")
    needs = frozenset({"resident", "stack"})
    panels: ClassVar[dict[str, tuple[str, str, bool]]] = {  # type: ignore[misc]
        "exceed_compute": ("beyond the budget of computation", "client-rounds so far", True),
        "exceed_comm": ("beyond the budget of communication", "client-rounds so far", True),
        "depth": ("layers shared, mean over clients", "layers", False),
        "epochs": ("local epochs, mean over clients", "epochs", False),
        "pairwise_distance": ("mean distance between clients' models", "distance", False),
    }

    def agents_allowed(self) -> Iterable[str]:
        return choosers()

    def agent_defaults(self, name: str) -> dict[str, Any]:
        return dict(horizon=None, cohort=None, grid=None, known=True)

    def check(self) -> None:
        self.resolve_agent("q_bandit")
        if isinstance(
            self.budgets, (list, tuple, np.ndarray)
        ):  # a fact of the program has to be comparable
            object.__setattr__(
                self,
                "budgets",
                tuple(tuple(pair) for pair in np.asarray(self.budgets, object).tolist()),
            )
        read_menu(self.menu)
        read_vary(self.vary)
        for name, given, word in (
            ("depths", bool(self.depths), "layers"),
            ("menu", self.menu != MENU, "epochs"),
        ):
            if given and (self.agent_name == "full" or word not in self.steers):
                raise UserError(
                    f"qbandit.{name} has no effect with agent={self.agent_name} and"
                    f" control={self.control}; leave it out"
                )

    @property
    def knows_penalties(self) -> bool:
        """Whether the agent's observation contains them, and the reward leaves them out."""
        return getattr(self.agent, "known", False)

    @property
    def steers(self) -> tuple[str, ...]:
        return CONTROLS[self.control]

    @property
    def space(self) -> Actions:
        return Actions(
            self.agent_name, self.steers, tuple(self.depths), read_menu(self.menu), self.clip
        )

    @property
    def chooses_epochs(self) -> bool:
        """Whether its agent chooses the epochs, so that those of the run are not used."""
        return "epochs" in self.steers and self.agent_name != "full"

    @property
    def max_epochs(self) -> float:
        return max(self.space.menu) if self.chooses_epochs else 0.0

    @property
    def replaces(self) -> tuple[tuple[str, str], ...]:
        chosen = "x".join(f"{e:g}" for e in self.space.menu)
        return (
            (("epochs", f"what {self.agent_name} chooses among {chosen}"),)
            if self.chooses_epochs
            else ()
        )

    def limits(self, env: Env, server: Server, id: Array, t: Array) -> Budgets:
        """ONE client's budgets in the round after t completed ones."""
        return budgets_now(env, server.budgets, id, t, read_vary(self.vary))

    # ---- the controller's side -------------------------------------------------------------------
    def make_agent(self, env: Env) -> Any:
        from agents.fixed import Fixed

        layers, epochs = self.space.choices(env)
        # what is wrong with them is said first
        read_budgets(self.budgets, env.num_clients, env.num_groups)
        gain = self.reward == "gain"
        if (self.accuracy == "heldout" or gain) and "val" not in env.fed.rows:
            what = "reward=gain" if gain else "accuracy=heldout"
            raise UserError(
                f"qbandit.{what} needs validation rows on every client and"
                f" '{env.fed.name}' was split without; allowed: --protocol qbandit, --val-fraction"
                " above 0, or qbandit.accuracy=train"
            )
        size, count = env.num_clients + 1 + len(self.steers), len(layers) * len(epochs)
        size += count if self.knows_penalties else 0
        if self.agent_name in ("full", "compliant"):
            return Fixed().sized(size, count, env.dtype)
        found = dict(horizon=env.rounds or 100, cohort=env.cohort)
        return self.for_run(size, count, env, grid=(len(layers), len(epochs)), **found)

    def price(self, server: Server) -> dict[str, Array]:
        """λ of exceeded epochs and layers, as they are now."""
        return server.prices or dict(epochs=self.lam_comp, layers=self.lam_comm)

    def observe(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        most = self.limits(env, server, ctx.id, ctx.t)
        longest_work = max(self.space.choices(env)[1])
        scaled = dict(
            layers=most.layers / env.num_groups, epochs=jnp.minimum(most.epochs / longest_work, 1)
        )
        own = [jax.nn.one_hot(ctx.id, env.num_clients), client.own.accuracy[None]]
        known: list[Array] = []
        if self.knows_penalties:
            beyond, price = self.space.excess(env, most), self.price(server)
            known = [-jnp.stack([price[w] * beyond[w] for w in self.steers]).sum(0)]
        parts = (*own, *(scaled[w][None] for w in self.steers), *known)
        return jnp.concatenate([part.astype(env.dtype) for part in parts])

    def plan_of(self, env: Env, action: Array, server: Server, ctx: Ctx) -> Plan:
        budgets = self.space.order(env, action, self.limits(env, server, ctx.id, ctx.t))
        shared = prefix(env, budgets.layers)
        return Plan(shared, shared, budgets.epochs)

    def reward_of(
        self, env: Env, old: Server, server: Server, report: Report, action: Array, ctx: Ctx
    ) -> Array:
        # of a gain the loss afterwards is missing yet: `combine` knows the server's new layers
        worth = report.loss if self.reward == "gain" else report.accuracy
        if self.knows_penalties:
            return worth
        most = self.limits(env, server, ctx.id, ctx.t)
        budgets = self.space.order(env, action, most)
        price = self.price(old)
        over = sum(
            price[w] * jnp.maximum(getattr(budgets, w) - getattr(most, w), 0) for w in self.steers
        )
        return worth - over

    def combine(
        self, env: Env, old: Server, server: Server, rewards: Array, cohort: Cohort
    ) -> Array:
        rewards = rewards - self.lam_dist * divergence(env, cohort)
        if self.reward == "gain":
            now = composed_losses(env, server.net, cohort)
            fell = jnp.where(cohort.ok, cohort.reports.loss - now, 0)
            rewards = rewards - now - fell.sum() / jnp.maximum(cohort.count, 1)
        if self.scope == "client":
            return rewards
        return jnp.broadcast_to(jnp.where(cohort.ok, rewards, 0).sum(), rewards.shape)

    # ---- the federated side ----------------------------------------------------------------------
    def init(self, env: Env, net: Tree) -> tuple[Server, Own]:
        given = read_budgets(self.budgets, env.num_clients, env.num_groups)
        given = Budgets(jnp.asarray(given.epochs, env.dtype), jnp.asarray(given.layers))
        number = lambda value: jnp.asarray(value, env.dtype)
        prices: Any = ()
        if self.has("dual"):
            prices = dict(epochs=number(self.lam_comp), layers=number(self.lam_comm))
        loss: Any = number(0) if self.reward == "gain" else ()
        return Server(net, given, prices), Own(number(0), jnp.int32(env.num_groups), loss)

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        own: Any = client.own
        if self.reward == "gain":
            own = own._replace(loss=val_loss(env, self.personal(env, server, client, ctx), ctx.id))
        own = own._replace(depth=(plan.take > 0).sum().astype(jnp.int32))
        return client._replace(own=own), into_resident(env, server, client, plan)

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, done = local_sgd(env, net, client, ctx)
        train = self.accuracy == "train"
        seen = (
            round_accuracy(env, done.net, ctx, done.steps)
            if train
            else client_merit(env, done.net, ctx)
        )
        client = client._replace(own=client.own._replace(accuracy=seen))
        return client, self.upload(env, ctx, done, report=Report(seen, client.own.loss))

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        server = super().aggregate(env, server, cohort)
        if not self.has("dual"):
            return server
        depth = (cohort.plan.take > 0).sum(1)
        most = jax.vmap(lambda id: self.limits(env, server, id, cohort.t))(cohort.ids)
        mean = lambda over: (
            jnp.where(cohort.ok, jnp.maximum(over, 0), 0).sum() / jnp.maximum(cohort.count, 1)
        )
        over = dict(epochs=mean(cohort.plan.epochs - most.epochs), layers=mean(depth - most.layers))
        prices = {w: price + self.dual * over[w] for w, price in server.prices.items()}
        return server._replace(prices=prices)

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return blend(env, prefix(env, client.own.depth), server.net, client.resident)

    def log(self, env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        most = jax.vmap(lambda id: self.limits(env, server, id, cohort.t))(cohort.ids)
        depth = (cohort.plan.take > 0).sum(1)
        each = lambda values: (
            jnp.zeros(env.num_clients, values.dtype)
            .at[cohort.ids]
            .set(jnp.where(cohort.ok, values, 0))
        )
        mean = lambda values: jnp.where(cohort.ok, values, 0).sum() / jnp.maximum(cohort.count, 1)
        return dict(
            exceed_compute=(cohort.ok & (cohort.plan.epochs > most.epochs)).sum(),
            exceed_comm=(cohort.ok & (depth > most.layers)).sum(),
            depth=each(depth),
            epochs=each(cohort.plan.epochs),
            divergence=mean(divergence(env, cohort)),
            pairwise_distance=pairwise_distance(env, cohort),
            seen_accuracy=mean(cohort.reports.accuracy),
            **{f"price_{w}": price for w, price in (server.prices or {}).items()},
        )
