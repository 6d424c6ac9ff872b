"""FedPHP (Li et al., 2021): the personal model is inherited; a momentum copy of past ones teaches
features to the new.

    w ← SGD_E(Θ)  of  (1−λ) f_k(w) + λ MMD²( φ_w(x), φ_{p_k}(x) )    p_k frozen, in inference mode
    p_k ← (1−μ_t) w_k + μ_t p_k,   μ_t = μ·t/T                     t = 1 … T, the round; p_k from Θ⁰
    Θ ← Σ_k (n_k / Σ_j n_j) w_k                                      over those that reported

MMD²: `local.mmd`.

λ = 0 is FedAvg, and with μ = 0 p_k is what the client last trained. λ = μ = 0.1 (pFedRLLA).
Wire: |w| down, |w| up.  State: p_k.  Evaluated: p_k (personal), Θ (global).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import Aux, Batch, forward, local_loss, local_sgd
from fedjax_sim.local.mmd import mmd_rbf
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import OwnModel
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload


@register("fedphp")
class FedPHP(OwnModel):
    """Past personal models teach their features to the new one."""

    needs_classes = "it compares one vector of features per example (MMD)"

    lam: Real = field(0.1, ge=0, le=1, help="λ, share of the features' discrepancy")
    mu: Real = field(0.1, ge=0, le=1, help="μ, share of the past at the end")

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        past = client.own

        def objective(now: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            logits, features, stats = forward(env, now, batch)
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            taught = lax.stop_gradient(env.model.features(past, batch.x, train=False)[0])
            apart = mmd_rbf(features, taught, batch.mask)
            return (1 - self.lam) * loss + self.lam * apart, Aux(logits, stats, confusion)

        client, done = local_sgd(env, net, client, ctx, objective=objective)
        share = self.mu * jnp.minimum((ctx.t + 1).astype(env.dtype) / max(env.rounds, 1), 1)  # μ_t
        own = jax.tree.map(lambda new, old: (1 - share) * new + share * old, done.net, past)
        return client._replace(own=own), self.upload(env, ctx, done)
