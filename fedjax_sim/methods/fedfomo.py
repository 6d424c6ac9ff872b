"""FedFomo (Zhang et al., 2021): a client weighs others' models by what each gains on its own
validation rows.

The server stores every client's last upload and an affinity P [N, N], at first the identity. Client
i gets the `models` models with the largest P_i among those that were uploaded. With L_i the mean
cross-entropy on its validation rows and θ_i its model before this round:

    ω_n = (L_i(θ_i) − L_i(θ_n)) / (‖θ_n − θ_i‖ + 1e−5),    ω⁺ = max(ω, 0)
    θ_i ← Σ_n (ω_n⁺ / Σω⁺) θ_n   if Σω⁺ > 0, else θ_i;      then E epochs from it
    server:  P_i[n] ← P_i[n] + ω_n

Validation rows are the client's own split; where the data have none, the last 20 % of its training
rows, which are then not trained on. Candidates are evaluated and added one at a time. The round
holds the K = min(N, M·models) stored models that are sent.

Wire: models·|w| down, |w| + models up.  State: θ_i (the resident model).  Evaluated: θ_i
(personal).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import field
from fedjax_sim.hooks import Method, Peers, Personal
from fedjax_sim.local import local_sgd
from fedjax_sim.local.score import mean_loss
from fedjax_sim.methods import register
from fedjax_sim.plans import with_own_statistics
from fedjax_sim.tree import scaled_add, square_norm, subtract
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload

EPSILON = 1e-5
HELD_OUT = 0.2  # of the training rows, where there is no validation split


class Server(NamedTuple):
    affinity: Array  # P [N, N]
    uploaded: Array  # [N] has a stored model
    ids: Array  # [M] the cohort of this round: whose candidates the rows are


def hold_out(env: Env, ctx: Ctx) -> tuple[Env, Array, Array]:
    """(what ONE client trains on, its validation rows, how many are real)."""
    fed = env.fed
    if "val" in fed.rows:
        return env, fed.rows["val"][ctx.id], fed.size["val"][ctx.id]
    validated = jnp.floor(HELD_OUT * fed.size["train"]).astype(jnp.int32)  # [N]
    kept = fed.size["train"] - validated
    rows = jnp.roll(fed.rows["train"][ctx.id], -kept[ctx.id])
    return (
        dataclasses.replace(env, fed=dataclasses.replace(fed, size={**fed.size, "train": kept})),
        rows,
        validated[ctx.id],
    )


@register("fedfomo")
class FedFomo(Peers, Personal, Method):
    """Others' models, weighted by what each gains on own validation rows."""

    models: int = field(5, ge=1, help="how many models each participant receives")
    has_global_model = False
    needs = frozenset({"resident"})
    payload = frozenset({"report"})

    def few(self, env: Env) -> int:
        return min(self.models, env.num_clients)

    def candidates(self, env: Env, server: Server, me: Array) -> Array:
        """[few] client numbers with the largest affinity; the lower number first among equals."""
        return lax.top_k(jnp.where(server.uploaded, server.affinity[me], -jnp.inf), self.few(env))[
            1
        ]

    def everybody(self, env: Env) -> bool:
        return env.cohort * self.few(env) >= env.num_clients

    def init(self, env: Env, net: Tree) -> tuple[Server, tuple]:
        n = env.num_clients
        return (
            Server(
                jnp.eye(n, dtype=env.dtype),
                jnp.zeros(n, bool),
                jnp.arange(env.cohort, dtype=jnp.int32),
            ),
            (),
        )

    def peer_ids(self, env: Env, server: Server, ids: Array) -> Array:
        if self.everybody(env):
            return jnp.arange(env.num_clients, dtype=jnp.int32)
        return jax.vmap(lambda i: self.candidates(env, server, i))(ids).reshape(-1)

    def prepare(self, env: Env, server: Server, ids: Array, peers: Client) -> Server:
        return server._replace(ids=ids.astype(jnp.int32))

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        chosen = self.candidates(env, server, ctx.id)
        slot = jnp.argmax(server.ids == ctx.id)
        place = chosen if self.everybody(env) else slot * self.few(env) + jnp.arange(self.few(env))
        env_of, rows, n = hold_out(env, ctx)
        stored = lambda j: with_own_statistics(
            env, jax.tree.map(lambda a: a[place[j]], env.peers.resident), client
        )

        loss = lambda net: mean_loss(env, net, rows, n)
        before = loss(net)

        def gain(j: Array) -> Array:
            other = stored(j)
            far = jnp.sqrt(square_norm(subtract(other["params"], net["params"])))
            return (before - loss(other)) / (far + EPSILON)

        # its own model gains nothing, exactly: a rounding error over 1e-5 would be a weight
        counts = server.uploaded[chosen] & (chosen != ctx.id)
        # [few]
        omega = jnp.where(counts, lax.map(gain, jnp.arange(self.few(env))), 0).astype(env.dtype)
        good = jnp.maximum(omega, 0)
        share = good / jnp.where(good.sum() > 0, good.sum(), 1)
        start = jax.tree.map(lambda a: jnp.where(good.sum() > 0, 0, a), net)
        start = lax.fori_loop(
            0, self.few(env), lambda j, total: scaled_add(total, share[j], stored(j)), start
        )
        client, done = local_sgd(env_of, with_own_statistics(env, start, client), client, ctx)
        return client, self.upload(env, ctx, done, report=(chosen, omega))

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        chosen, omega = cohort.reports
        omega = jnp.where(cohort.ok[:, None], omega, 0)
        return server._replace(
            affinity=server.affinity.at[cohort.ids[:, None], chosen].add(omega),
            uploaded=server.uploaded.at[cohort.ids].max(cohort.ok),
        )

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        return (self.few(env) - 1) * sum(env.group_floats(net)), self.few(env)

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        return client, client.resident
