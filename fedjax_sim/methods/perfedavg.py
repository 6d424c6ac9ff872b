"""Per-FedAvg, first order (Fallah et al., 2020): an initialisation that is good after one local gradient step.

    w̃ = w − α ∇f_k(w; b₁),   w ← w − β ∇f_k(w̃; b₂)        two independent minibatches per step
    Θ ← Σ_k (n_k / Σ_j n_j) w_k                            over the participants that reported
    evaluation: one plain step of length α on one minibatch from Θ, used once and thrown away

Both steps are plain; with plain=False the outer one is the run's SGD, momentum and weight decay with it. b₂ are FedAvg's
minibatches, b₁ those of a second shuffle, so with α = 0 this is FedAvg with the same SGD. α = β = η.
BatchNorm's running statistics, the running confusion and the logged loss are those of the pass at w. Two gradients per
step.
Wire: |w| down, |w| up.  State: none.  Evaluated: personal, after the one step; global, Θ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import descend, stream, upload
from fedjax_sim.local.optim import Sgd
from fedjax_sim.methods.fedavg import FINE_TUNE, fedavg
from fedjax_sim.tree import scaled_add
from fedjax_sim.types import Array, Client, Ctx, Env, Real, Tree, Upload, concrete

INNER = 1  # tells the shuffles of b₁ from those of b₂
ONE_STEP = 1e-6  # of an epoch: fractions are counted in steps, and any work is at least one


def rate(option: str, value: Real | str) -> Real | None:
    """A learning rate as an option: a number, or None for the word 'lr', the run's own."""
    if not isinstance(value, str) and not concrete(value):
        return value
    try:
        number = None if value == "lr" else float(value)
    except ValueError:
        number = math.nan
    if number is not None and not 0 <= number < math.inf:
        raise UserError(f"perfedavg has {option}={value}; allowed: 0 or more, or lr for the run's learning rate")
    return number


def perfedavg(alpha: Real | str = "lr", beta: Real | str = "lr", plain: bool = True, weights: str = "size") -> Method:
    """alpha: α, the inner step, beta: β, the outer one ('lr': the run's); plain: no momentum, no weight decay in the outer
    step; weights: 'size' or 'uniform'."""
    inner, outer = rate("alpha", alpha), rate("beta", beta)

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        length = ctx.lr if inner is None else jnp.asarray(inner, env.dtype)
        first_batches = stream(env, ctx, jax.random.fold_in(ctx.key, INNER), env.max_epochs)

        def gradient(grad_of: Callable, params: Tree, step: Array, draw: Callable, carry: Tree):
            batch = first_batches(step)
            first, grads = grad_of(params, batch)
            _, grads = grad_of(scaled_add(params, -length, grads), draw(step))
            return first, grads, batch

        optimizer = Sgd() if plain else env.optimizer
        client, done = descend(env, net, client, ctx, gradient=gradient, optimizer=optimizer, lr=outer)
        return client, upload(env, ctx, done, weights)

    def personal(env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return descend(
            env, server.net, client, ctx, epochs=ONE_STEP, optimizer=Sgd(), lr=inner, salt=FINE_TUNE, track=False
        )[1].net

    why = "0: its steps are plain, as its equations say (plain=false: the run's)"
    replaced = (("momentum", why), ("weight_decay", why)) if plain else ()
    return fedavg(weights)._replace(name="perfedavg", local=local, personal=personal, adapts=True, replaces=replaced)
