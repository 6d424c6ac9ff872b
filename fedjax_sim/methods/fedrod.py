"""FedRoD (Chen and Chao, 2022): a class-balanced predictor for everyone, a private residual for
local frequencies.

f = φ(x), Ψ the generic head, ψ_k the personal one (linear, from Ψ⁰), n_{k,c} the client's training
labels:

    generic:   L( Ψ(f) + log(n_{k,c} + 1e-8), y )             balanced softmax; alone moves φ and Ψ
    personal:  L( stop(Ψ(f)) + ψ_k(stop(f)), y )              moves ψ_k alone
    Φ, Ψ ← Σ_k (n_k / Σ_j n_j) (φ_k, Ψ_k)                     over the participants that reported

Both on the same minibatch, with the same optimiser; L is the run's loss.
Wire: |w| down, |w| up.  State: ψ_k.  Evaluated: personal, Ψ(f) + ψ_k(f) with the latest Φ, Ψ;
global, Ψ(f).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import Aux, Batch, forward, local_loss, local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload

ABSENT = 1e-8  # examples of a class that the client does not have
OWN = "personal head"  # the group of ψ_k while it is trained beside the net


def with_head(env: Env, net: Tree, head: Tree) -> Tree:
    return {**net, "params": {**net["params"], env.model.head_group: head}}


@register("fedrod")
class FedRoD(Personal, FedAvg):
    """A class-balanced common head and a private residual head."""

    needs_classes = "its balanced loss shifts logits by the client's counts of classes"

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        return Server(net), net["params"][env.model.head_group]

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        prior = jnp.log(env.counts[ctx.id] + ABSENT)  # [C]

        def objective(both: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            generic, features, stats = forward(env, both, batch)
            own = env.model.head(
                with_head(env, both, both["params"][OWN]), lax.stop_gradient(features)
            )
            logits = lax.stop_gradient(generic) + own
            balanced, confusion = local_loss(env, ctx, generic + prior, batch, confusion)
            residual = env.loss.value(logits, batch.y, batch.mask, env.counts[ctx.id], confusion)
            return balanced + residual, Aux(logits, stats, confusion)

        optimizer = env.optimizer
        if optimizer.groups is not None and env.model.head_group in optimizer.groups:
            # decays as the generic head does
            optimizer = optimizer._replace(groups=(*optimizer.groups, OWN))
        start = {**net, "params": {**net["params"], OWN: client.own}}
        client, done = local_sgd(env, start, client, ctx, objective=objective, optimizer=optimizer)
        params = dict(done.net["params"])
        head = params.pop(OWN)
        return client._replace(own=head), self.upload(
            env, ctx, done._replace(net={**done.net, "params": params})
        )

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        head = server.net["params"][env.model.head_group]
        # linear: a sum of heads is a head
        return with_head(env, server.net, jax.tree.map(jnp.add, head, client.own))
