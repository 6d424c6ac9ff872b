"""Per-FedAvg, first order (Fallah et al., 2020): an initialisation that is good after one local
gradient step.

    w̃ = w − α ∇f_k(w; b₁),   w ← w − β ∇f_k(w̃; b₂)        two independent minibatches per step
    Θ ← Σ_k (n_k / Σ_j n_j) w_k                            over the participants that reported
    evaluation: one plain step of length α on one minibatch from Θ, used once and thrown away

Both steps are plain; with plain=False the outer one is the run's SGD, momentum and weight decay
with it. b₂ are FedAvg's minibatches, b₁ those of a second shuffle, so with α = 0 this is FedAvg
with the same SGD. With --shuffle off b₁ is the minibatch after b₂ in the order of the rows (after
the last the first one); a client with a single minibatch has no other. α = β = η. BatchNorm's
running statistics, the running confusion and the logged loss are those of the pass at w. Two
gradients per step. Wire: |w| down, |w| up.  State: none.  Evaluated: personal, after the one step;
global, Θ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import batches_per_epoch, local_sgd, stream
from fedjax_sim.local.optim import Sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FINE_TUNE, FedAvg
from fedjax_sim.tree import scaled_add
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload

INNER = 1  # tells the shuffles of b₁ from those of b₂
ONE_STEP = 1e-6  # of an epoch: fractions are counted in steps, and any work is at least one


def rate(value: Any) -> Any:
    """A learning rate as an option: a number, or None for the word 'lr', the run's own."""
    return None if isinstance(value, str) else value


@register("perfedavg")
class PerFedAvg(Personal, FedAvg):
    """A common start that is good after one local gradient step."""

    alpha: Real | str = field(
        "lr", words=("lr",), ge=0, help="α, rate of the inner step (lr: the run's)"
    )
    beta: Real | str = field(
        "lr", words=("lr",), ge=0, help="β, rate of the outer step (lr: the run's)"
    )
    plain: bool = field(True, help="no momentum, no weight decay in the outer step")
    adapts = True

    @property
    def replaces(self) -> tuple[tuple[str, str], ...]:
        why = "0: its steps are plain, as its equations say (plain=false: the run's)"
        return (("momentum", why), ("weight_decay", why)) if self.plain else ()

    @property
    def needs_sgd(self) -> str:
        return (
            "both of its steps are plain (plain=false with alpha a number: the outer one is the"
            " run's)" * (self.plain or isinstance(self.alpha, str))
        )

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        length = ctx.lr if isinstance(self.alpha, str) else jnp.asarray(self.alpha, env.dtype)
        per_epoch = jnp.maximum(batches_per_epoch(env, env.fed.size["train"][ctx.id]), 1)
        first_batches = stream(env, ctx, jax.random.fold_in(ctx.key, INNER), env.max_epochs)

        def gradient(grad_of: Callable, params: Tree, step: Array, draw: Callable, carry: Tree):
            batch = first_batches(step if env.shuffle else (step + 1) % per_epoch)
            first, grads = grad_of(params, batch)
            _, grads = grad_of(scaled_add(params, -length, grads), draw(step))
            return first, grads, batch

        optimizer = Sgd() if self.plain else env.optimizer
        client, done = local_sgd(
            env, net, client, ctx, gradient=gradient, optimizer=optimizer, lr=rate(self.beta)
        )
        return client, self.upload(env, ctx, done)

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return local_sgd(
            env,
            server.net,
            client,
            ctx,
            epochs=ONE_STEP,
            optimizer=Sgd(),
            lr=rate(self.alpha),
            salt=FINE_TUNE,
            track=False,
        )[1].net
