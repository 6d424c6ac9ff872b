"""pFedMe (Dinh et al., 2020): the personal model is a proximal point of the client's copy of the global model.

From w = θ = Θ, on every minibatch:

    θ ← θ − η_p [∇f_k(θ) + λ(θ − w) + ρ θ]      K times, on the same minibatch
    w ← w − η λ (w − θ)
    server:  Θ ← (1−β) Θ + β Σ_k (n_k / Σ_j n_j) w_k

Plain steps: the run's momentum and weight decay are not used. BatchNorm's running statistics, the running confusion and
the logged loss are those of the first of the K passes.  λ = 15, K = 5, η_p = 0.01, ρ = 0.001, β = 1 (the authors' code).
Wire: |w| down, |w| up.  State: θ_k, the last θ.  Evaluated: θ_k (personal), Θ (global).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import descend, upload
from fedjax_sim.local.optim import Sgd
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.plans import merge
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Real, Tree, Upload, concrete


def pfedme(
    lam: Real = 15.0,
    inner_steps: int = 5,
    lr_personal: Real = 0.01,
    decay_personal: Real = 0.001,
    beta: Real = 1.0,
    weights: str = "size",
) -> Method:
    """lam: λ; inner_steps: K; lr_personal: η_p; decay_personal: ρ; beta: β; weights: 'size' or 'uniform'."""
    for name, value in (("lam", lam), ("lr_personal", lr_personal), ("decay_personal", decay_personal)):
        if concrete(value) and not 0 <= value < math.inf:
            raise UserError(f"pfedme has {name}={value:g}; allowed: 0 or more")
    if concrete(beta) and (not 0 <= beta < math.inf or inner_steps < 1):
        raise UserError(f"pfedme has beta={beta:g}, inner_steps={inner_steps}; allowed: beta 0 or more, 1 step or more")

    def init(env: Env, net: Tree):
        return Server(net), net

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        def gradient(grad_of: Callable, w: Tree, step: Array, draw: Callable, theta: Tree):
            batch = draw(step)

            def nearer(theta: Tree, grads: Tree) -> Tree:
                return jax.tree.map(
                    lambda p, g, a: p - lr_personal * (g + lam * (p - a) + decay_personal * p), theta, grads, w
                )

            (loss, aux), grads = grad_of(theta, batch)
            theta = nearer(theta, grads)
            theta = lax.fori_loop(1, inner_steps, lambda _, now: nearer(now, grad_of(now, batch)[1]), theta)
            return (loss, aux._replace(carry=theta)), jax.tree.map(lambda a, p: lam * (a - p), w, theta), batch

        client, done = descend(env, net, client, ctx, gradient=gradient, optimizer=Sgd(), carry=net["params"])
        own = {"params": done.carry, "batch_stats": done.net["batch_stats"]}
        return client._replace(own=own), upload(env, ctx, done, weights)

    def aggregate(env: Env, server: Server, cohort: Cohort) -> Server:
        mean = merge(env, cohort, server.net)
        step = jnp.asarray(beta, env.dtype)
        return Server(jax.tree.map(lambda old, new: (1 - step) * old + step * new, server.net, mean))

    def personal(env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return client.own

    replaced = (("momentum", "0: its equations are plain steps"), ("weight_decay", "its own term 0.001 θ̃"))
    return fedavg(weights)._replace(
        name="pfedme", init=init, local=local, aggregate=aggregate, personal=personal, replaces=replaced
    )
