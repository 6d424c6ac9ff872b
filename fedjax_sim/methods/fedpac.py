"""FedPAC (Xu et al., 2023): features aligned to global class centroids, classifiers combined by a
quadratic program.

Client, with the received backbone φ, global centroids g_c and its own head ψ_k; π_c its class
shares, m_c its class means:

    h_c = π_c m_c,     v = (1/n_k)[ Σ_c π_c E[‖f‖² | c] − Σ_c π_c² ‖m_c‖² ]        of the received φ
    head:      `head_epochs` epochs on ψ_k alone, learning rate `head_lr`
    backbone:  E epochs on φ alone,   L + λ·mean (f − g_y)²   (m_y where g_y is not known; no term
                                                              before any is)

Server:

    φ ← Σ_k (n_k/Σn) φ_k,     g_c ← Σ_k (n_kc/Σn_c) (class mean of client k after training)
    α_i = argmin_{α ∈ simplex} αᵀ(diag(v) + D_i)α,    D_i[j, l] = Σ_c ⟨h_ic − h_jc, h_ic − h_lc⟩
    ψ_i ← Σ_j α_ij ψ_j,   weights below 1e−3 set to 0, the rest scaled to sum 1

D_i is a Gram matrix and v ≥ 0, so the program is convex; see `simplex`. The server mixes the heads,
so it also keeps them ([N, |ψ|]) until a client takes part again; clients store nothing else.

Wire: |w| + Cd down, |w| + 2Cd + 1 up.  State: ψ_k.  Evaluated: φ with ψ_k (personal); φ with the
mean head (global).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, epochs, field
from fedjax_sim.hooks import Personal
from fedjax_sim.local import Aux, Batch, forward, local_loss, local_sgd
from fedjax_sim.local.features import class_statistics
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.methods.simplex import simplex_qp
from fedjax_sim.plans import merge
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload

SMALLEST = 1e-3  # weights below do not count
HEAD_PASS = 1  # tells the shuffles of the two passes apart


class Server(NamedTuple):
    net: Tree  # φ, and the mean of the heads
    heads: Tree  # ψ_k [N, …]
    centroids: Array  # g [C, d]
    known: Array  # [C] a class that somebody has reported


def mixing(variance: Array, shares: Array, ok: Array) -> Array:
    """α [M, M], row i for client i; variance v [M], shares h [M, C·d], ok [M]."""
    variance, shares = jnp.where(ok, variance, 0), jnp.where(ok[:, None], shares, 0)

    def one(i: Array) -> Array:
        apart = shares[i] - shares  # [M, C·d]
        alpha = simplex_qp(jnp.diag(variance) + apart @ apart.T, ok)
        alpha = jnp.where(alpha < SMALLEST, 0, alpha)
        alpha = alpha / alpha.sum()
        # on failure its own head
        return jnp.where(jnp.isfinite(alpha).all(), alpha, jnp.arange(ok.shape[0]) == i)

    return lax.map(one, jnp.arange(ok.shape[0]))


@register("fedpac")
class FedPAC(Personal, FedAvg):
    """Features aligned to class centroids, heads combined by a quadratic program."""

    needs_classes = "it aligns features with each class's mean"

    lam: Real = field(1.0, ge=0, help="λ, weight of the alignment")
    head_epochs: float = epochs(1.0, "epochs of the pass over the head")
    head_lr: Real = field(0.1, ge=0, help="learning rate of the pass over the head")
    payload = frozenset({"sums", "report"})

    def init(self, env: Env, net: Tree) -> tuple[Server, tuple]:
        classes, width = env.model.classes, env.model.width
        repeat = lambda a: jnp.broadcast_to(a, (env.num_clients, *a.shape))
        heads = jax.tree.map(repeat, net["params"][env.model.head_group])
        return (
            Server(net, heads, jnp.zeros((classes, width), env.dtype), jnp.zeros(classes, bool)),
            (),
        )

    def with_head(self, env: Env, server: Server, me: Array) -> Tree:
        own = jax.tree.map(lambda a: a[me], server.heads)
        return {**server.net, "params": {**server.net["params"], env.model.head_group: own}}

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        return client, self.with_head(env, server, ctx.id)

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        head = env.model.head_group
        sums = class_statistics(env, net, ctx.id, full=False)
        n = jnp.maximum(sums.count.sum(), 1)
        mean, prior = sums.total / jnp.maximum(sums.count, 1)[:, None], sums.count / n
        variance = (sums.square.sum() / n - (prior**2 * jnp.square(mean).sum(1)).sum()) / n
        goal = jnp.where(server.known[:, None], server.centroids, mean)
        strength = jnp.where(server.known.any(), self.lam, 0).astype(env.dtype)

        def objective(net: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            logits, features, stats = forward(env, net, batch)
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            far = jnp.where(batch.mask, jnp.square(features - goal[batch.y]).mean(1), 0)
            far = far.sum() / jnp.maximum(batch.mask.sum(), 1)
            return loss + strength * far, Aux(logits, stats, confusion)

        if self.head_epochs:
            rate = jnp.asarray(self.head_lr)
            client, tuned = local_sgd(
                env,
                net,
                client,
                ctx,
                trainable=(head,),
                epochs=self.head_epochs,
                lr=rate,
                salt=HEAD_PASS,
                track=False,
            )
            net = tuned.net
        body = tuple(g for g in env.model.groups if g != head)
        client, done = local_sgd(env, net, client, ctx, objective=objective, trainable=body)
        after = class_statistics(env, done.net, ctx.id, full=False)
        report = dict(
            head=done.net["params"][head], variance=variance, shares=prior[:, None] * mean
        )
        return client, self.upload(env, ctx, done, sums=(after.total, after.count), report=report)

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        ok, report = cohort.ok, cohort.reports
        alpha = mixing(report["variance"], report["shares"].reshape(ok.shape[0], -1), ok)
        to = jnp.where(ok, cohort.ids, env.num_clients)  # out of range: not written

        def mixed(stored: Array, sent: Array) -> Array:
            sent = jnp.where(ok.reshape(-1, *[1] * (sent.ndim - 1)), sent, 0)
            return stored.at[to].set(
                jnp.tensordot(alpha, sent, 1).astype(stored.dtype), mode="drop"
            )

        total, count = cohort.sums
        return Server(
            merge(env, cohort, server.net),
            jax.tree.map(mixed, server.heads, report["head"]),
            jnp.where(count[:, None] > 0, total / jnp.maximum(count, 1)[:, None], server.centroids),
            server.known | (count > 0),
        )

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return self.with_head(env, server, ctx.id)

    def resident(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return client.resident  # its mixed head is still at the server

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        size = env.model.classes * env.model.width
        return size, 2 * size + 1
