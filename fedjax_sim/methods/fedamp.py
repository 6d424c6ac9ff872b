"""FedAMP (Huang et al., 2021): attentive message passing; similar clients are pulled together by personal cloud models.

    ξ_ij = α·A'(‖w_i − w_j‖²),   A'(x) = e^{−x/σ}/σ,   j ≠ i;       ξ_ii = 1 − Σ_j ξ_ij
    u_i  = Σ_j ξ_ij w_j                                              the cloud model of client i
    client:  from its own w_i,  min f_i(w) + (λ/2α)‖w − u_i‖²,       i.e. the gradient gains (λ/α)(w − u_i)

The attention reaches over the K = `peers` clients that uploaded last (0: over everybody who ever has, K = N), with their
stored models; clients that have never uploaded do not count. A round holds a copy of these K models; each is read on its
own, once for the distances (over all parameters) and once for the sum. peers = M is the previous round's reporters.
ξ_ii is left as it comes: it is negative where more than σ/α (20) close neighbours are found.

Wire: |w| down (u_i), |w| up.  State: w_i (the resident model).  Evaluated: w_i (personal).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, resident_net
from fedjax_sim.local import descend, upload
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.methods.fedprox import pull
from fedjax_sim.plans import mix
from fedjax_sim.tree import square_norm, subtract
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Real, Tree, Upload, concrete


class Server(NamedTuple):
    last: Array  # [N] the round of every client's last upload, from 1; 0: none


def attention(env: Env, own: Tree, others: Array, alpha: float, sigma: float) -> Array:
    """[K+1] weights of ONE client over the peers' stored models and, last, its own; others [K] bool: whom it sees."""

    def one(j: Array) -> Array:
        peer = jax.tree.map(lambda a: a[j], env.rows.resident["params"])
        return alpha * jnp.exp(-square_norm(subtract(own, peer)) / sigma) / sigma

    weights = jnp.where(others, lax.map(one, jnp.arange(others.shape[0])), 0).astype(env.dtype)
    return jnp.append(weights, 1 - weights.sum())


def fedamp(lam: Real = 5e-7, alpha: Real = 5e-3, sigma: Real = 0.1, peers: int = 0) -> Method:
    """lam: λ; alpha: α_k; sigma: σ of the attention; peers: how many models it reaches (0: all)."""
    if concrete(lam, alpha, sigma) and not (0 <= lam < math.inf and 0 < alpha < math.inf and 0 < sigma < math.inf):
        raise UserError(
            f"fedamp has lam={lam:g}, alpha={alpha:g}, sigma={sigma:g}; allowed: finite, lam at least 0, the others above 0"
        )
    if peers < 0:
        raise UserError(f"fedamp has peers={peers}; allowed: 0 for all, or a number of clients")

    def reached(env: Env, server: Server, ids: Array = None) -> Array:
        """[K] who uploaded last; the lower number first among equals."""
        few = min(peers or env.num_clients, env.num_clients)
        return lax.top_k(server.last, few)[1] if few < env.num_clients else jnp.arange(few, dtype=jnp.int32)

    def init(env: Env, net: Tree):
        return Server(jnp.zeros(env.num_clients, jnp.int32)), ()

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        own = {"params": net["params"]}
        who = reached(env, server)
        weights = attention(env, own["params"], (server.last[who] > 0) & (who != ctx.id), alpha, sigma)
        everywhere = jnp.broadcast_to(weights, (env.num_groups, weights.shape[0]))
        cloud = mix(env, everywhere, {"params": env.rows.resident["params"]}, own)
        client, done = descend(env, net, client, ctx, adjust=pull(lam / alpha, cloud["params"]))
        return client, upload(env, ctx, done)

    def aggregate(env: Env, server: Server, cohort: Cohort) -> Server:
        return Server(server.last.at[cohort.ids].max(jnp.where(cohort.ok, cohort.t + 1, 0)))

    return fedavg()._replace(
        name="fedamp",
        init=init,
        peers=reached,
        receive=lambda env, server, client, plan, ctx: (client, client.resident),
        local=local,
        aggregate=aggregate,
        personal=resident_net,
        global_model=None,
        needs=frozenset({"resident"}),
    )
