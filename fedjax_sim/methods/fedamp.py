"""FedAMP (Huang et al., 2021): attentive message passing; similar clients are pulled together by
personal cloud models.

    ξ_ij = α·A'(‖w_i − w_j‖²),   A'(x) = e^{−x/σ}/σ,   j ≠ i;       ξ_ii = 1 − Σ_j ξ_ij
    u_i  = Σ_j ξ_ij w_j                                              the cloud model of client i
    client:  from its own w_i,  min f_i(w) + (λ/2α)‖w − u_i‖²      the gradient gains (λ/α)(w − u_i)

The attention reads the stored models of the K = `peers` clients that uploaded last (0: of all that
ever have, K = N); clients that never uploaded do not count. A round holds a copy of these K models,
and reads each once for the distances (over all parameters) and once for the sum. With peers = M
they are those of the previous round's reporters. ξ_ii is not clipped: it is negative if more than
σ/α (20) close neighbours are found.

Wire: |w| down (u_i), |w| up.  State: w_i (the resident model).  Evaluated: w_i (personal).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Method, Peers, Personal
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedprox import pull
from fedjax_sim.plans import mix
from fedjax_sim.tree import square_norm, subtract
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload


class Server(NamedTuple):
    last: Array  # [N] the round of every client's last upload, from 1; 0: none


def attention(env: Env, own: Tree, others: Array, alpha: float, sigma: float) -> Array:
    """[K+1] weights of ONE client over the peers' stored models and, last, its own; others [K]
    bool: whom it sees."""

    def one(j: Array) -> Array:
        peer = jax.tree.map(lambda a: a[j], env.peers.resident["params"])
        return alpha * jnp.exp(-square_norm(subtract(own, peer)) / sigma) / sigma

    weights = jnp.where(others, lax.map(one, jnp.arange(others.shape[0])), 0).astype(env.dtype)
    return jnp.append(weights, 1 - weights.sum())


@register("fedamp")
class FedAMP(Peers, Personal, Method):
    """Personal cloud models: attention over clients with similar weights."""

    lam: Real = field(5e-7, ge=0, help="λ, strength of the pull to the cloud model")
    alpha: Real = field(5e-3, gt=0, help="α_k, step size of the attention")
    sigma: Real = field(0.1, gt=0, help="σ of the attention")
    peers: int = field(0, ge=0, help="how many models the attention reads (0: all)")
    has_global_model = False
    needs = frozenset({"resident"})

    def reached(self, env: Env, server: Server) -> Array:
        """[K] who uploaded last; the lower number first among equals."""
        few = min(self.peers or env.num_clients, env.num_clients)
        return (
            lax.top_k(server.last, few)[1]
            if few < env.num_clients
            else jnp.arange(few, dtype=jnp.int32)
        )

    def peer_ids(self, env: Env, server: Server, ids: Array) -> Array:
        return self.reached(env, server)

    def init(self, env: Env, net: Tree) -> tuple[Server, tuple]:
        return Server(jnp.zeros(env.num_clients, jnp.int32)), ()

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        own = {"params": net["params"]}
        who = self.reached(env, server)
        weights = attention(
            env, own["params"], (server.last[who] > 0) & (who != ctx.id), self.alpha, self.sigma
        )
        everywhere = jnp.broadcast_to(weights, (env.num_groups, weights.shape[0]))
        cloud = mix(env, everywhere, {"params": env.peers.resident["params"]}, own)
        client, done = local_sgd(
            env, net, client, ctx, adjust=pull(self.lam / self.alpha, cloud["params"])
        )
        return client, self.upload(env, ctx, done)

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        return Server(server.last.at[cohort.ids].max(jnp.where(cohort.ok, cohort.t + 1, 0)))

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        return client, client.resident
