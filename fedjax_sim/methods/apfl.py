"""APFL (Deng et al., 2020): the personal model is a mixture of a local and the global model, its
weight learned.

On every minibatch, the two models side by side:

    w ← w − η ∇f_k(w)                       the global branch, from Θ: FedAvg
    v ← v − η ∇f_k(v)                       the personal branch, from the kept v_k
    α ← clip( α − η [⟨v − w, α ∇f_k(v) + (1−α) ∇f_k(w)⟩ + 0.02 α], 0, 1)

with the gradients of this step and v, w after it. At the end of the round v_k ← (1−α) w + α v; w is
uploaded. The two gradients stand for the paper's gradient at the mixture, as in the code behind the
published tables. α⁰ = 1 (pFedRLLA). Wire: |w| down, |w| up.  State: v_k, α_k.  Evaluated: v_k
(personal), Θ (global).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import Aux, Batch, local_sgd, supervised
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload

SHRINK = 0.02  # pull of α towards 0


class Own(NamedTuple):
    """What ONE client keeps."""

    net: Tree  # v_k
    alpha: Array  # []


def pair(a: Tree, b: Tree) -> Tree:
    """Two nets as one whose groups hold both: plugs and optimisers that work group by group need no
    change."""
    return {kind: {name: (a[kind][name], b[kind][name]) for name in a[kind]} for kind in a}


def half(both: Tree, which: int) -> Tree:
    return {
        kind: {name: two[which] for name, two in groups.items()} for kind, groups in both.items()
    }


@register("apfl")
class APFL(Personal, FedAvg):
    """The personal model is a learned mixture of a local and the global one."""

    alpha: Real = field(1.0, ge=0, le=1, help="α⁰, weight of the local model at the start")
    learn_alpha: bool = field(True, help="whether α is learned")

    @property
    def needs_sgd(self) -> str:
        return (
            "α is learned by gradient steps of the same learning rate (learn_alpha=false: it stays)"
            * self.learn_alpha
        )

    def init(self, env: Env, net: Tree) -> tuple[Server, Own]:
        return Server(net), Own(net, jnp.asarray(self.alpha, env.dtype))

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        plain = supervised(env, ctx)

        def objective(both: Tree, batch: Batch, confusion: Tree, alpha: Array) -> tuple[Array, Aux]:
            loss, aux = plain(half(both, 0), batch, confusion)
            own, mine = plain(half(both, 1), batch, confusion)
            stats = {
                name: (aux.batch_stats[name], mine.batch_stats[name]) for name in aux.batch_stats
            }
            # its gradient, but not its value: the log is that of the global branch
            return loss + own - lax.stop_gradient(own), aux._replace(batch_stats=stats, carry=alpha)

        def weigh(alpha: Array, grads: Tree, params: Tree) -> Array:
            slope = SHRINK * alpha
            for name in params:
                (w, v), (dw, dv) = params[name], grads[name]
                each = jax.tree.map(
                    lambda w, v, a, b: ((v - w) * (alpha * b + (1 - alpha) * a)).sum(), w, v, dw, dv
                )
                slope = slope + sum(jax.tree.leaves(each))
            return jnp.clip(alpha - ctx.lr * slope, 0, 1)

        kept = client.own
        client, done = local_sgd(
            env,
            pair(net, kept.net),
            client,
            ctx,
            objective=objective,
            after=weigh if self.learn_alpha else None,
            carry=kept.alpha,
        )
        w, v, alpha = half(done.net, 0), half(done.net, 1), done.carry
        mixed = jax.tree.map(lambda w, v: (1 - alpha) * w + alpha * v, w, v)
        return client._replace(own=Own(mixed, alpha)), self.upload(env, ctx, done._replace(net=w))

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return client.own.net
