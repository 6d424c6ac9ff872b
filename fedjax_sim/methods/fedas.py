"""FedAS (Yang et al., 2024): the incoming backbone is aligned to local features; under-trained
clients weigh less.

    prototypes:  p_c = class means of the features of the client's OLD backbone φ_k
    align:       one pass over the local rows from Φ, batches of 16, SGD with lr 0.01:
                 Σ_{c in batch} mean (f_Φ(x_c) − p_c)²
    train:       E epochs of (aligned Φ, own head ψ_k), together
    Fisher:      F_k = Σ_batches ‖∇_w NLL(batch)‖²       batch means, inference mode, after training
    server:      Θ ← Σ_k (F_k/ΣF) w_k

Each client aligns a copy of its own of what it received.
Wire: |w| down, |w| + 1 up.  State: φ_k, ψ_k (the resident model).  Evaluated: Φ as the server has
it with ψ_k (personal), Θ (global).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Method, Personal, Server
from fedjax_sim.local import (
    Aux,
    Batch,
    batches_per_epoch,
    forward,
    local_sgd,
    most_steps,
    repeat,
    stream,
    turns,
)
from fedjax_sim.local.features import class_statistics
from fedjax_sim.local.optim import Sgd
from fedjax_sim.methods import register
from fedjax_sim.plans import with_own_statistics
from fedjax_sim.tree import square_norm
from fedjax_sim.types import Array, Client, Ctx, Env, Plan, Tree, Upload

ALIGN, FISHER = 3, 4  # tell the shuffles of the passes apart


def alignment(features: Array, goal: Array, labels: Array, mask: Array, classes: int) -> Array:
    """Σ over the classes of a batch of the mean square distance of their features [B, d] to their
    goals [B, d]."""
    member = jax.nn.one_hot(labels, classes, dtype=features.dtype) * mask[:, None]  # [B, C]
    each = jnp.where(mask, jnp.square(features - goal).mean(1), 0)
    return (each / jnp.maximum(member.sum(0)[labels], 1)).sum()


def fisher_trace(env: Env, net: Tree, ctx: Ctx) -> Array:
    """Σ_batches ‖∇ NLL‖² of ONE client's training rows."""
    plain = dataclasses.replace(env, fed=dataclasses.replace(env.fed, augment=""))
    draw = stream(plain, ctx, jax.random.fold_in(ctx.key, FISHER), 1)
    batches = batches_per_epoch(env, env.fed.size["train"][ctx.id])

    def add(k: Array, total: Array) -> Array:
        batch = draw(k)

        def loss(params: Tree) -> Array:
            logits = forward(env, {**net, "params": params}, batch, train=False)[0]
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
            return jnp.where(batch.mask, each, 0).sum() / jnp.maximum(batch.mask.sum(), 1)

        return total + jnp.where(k < batches, square_norm(jax.grad(loss)(net["params"])), 0).astype(
            env.dtype
        )

    return repeat(turns(env, batches, *most_steps(env, 1)), add, jnp.zeros((), env.dtype))


@register("fedas")
class FedAS(Personal, Method):
    """The received backbone is aligned to local features; Fisher-weighted averages."""

    needs_classes = "it aligns features with each class's mean"

    align_lr: Real = field(0.01, ge=0, help="learning rate of the alignment")
    align_batch: int = field(16, ge=1, help="batch size of the alignment")
    needs = frozenset({"resident"})

    def with_head(self, env: Env, net: Tree, client: Client) -> Tree:
        head = env.model.head_group
        return {**net, "params": {**net["params"], head: client.resident["params"][head]}}

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        old = with_own_statistics(env, client.resident, client)
        sums = class_statistics(env, old, ctx.id, full=False)
        goal = sums.total / jnp.maximum(sums.count, 1)[:, None]  # p [C, d]

        def objective(net: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            logits, features, stats = forward(env, net, batch)
            loss = alignment(features, goal[batch.y], batch.y, batch.mask, env.model.classes)
            return loss, Aux(logits, stats, confusion)

        body = tuple(g for g in env.model.groups if g != env.model.head_group)
        small = dataclasses.replace(env, batch_size=self.align_batch)
        new = with_own_statistics(env, server.net, client)
        client, aligned = local_sgd(
            small,
            new,
            client,
            ctx,
            objective=objective,
            trainable=body,
            epochs=1.0,
            optimizer=Sgd(),
            lr=jnp.asarray(self.align_lr),
            salt=ALIGN,
            track=False,
        )
        return client, self.with_head(env, aligned.net, client)

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, done = local_sgd(env, net, client, ctx)
        return client, self.upload(env, ctx, done)._replace(weight=fisher_trace(env, done.net, ctx))

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return self.with_head(env, server.net, client)

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        return 0, 1
