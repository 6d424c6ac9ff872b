"""pFedMe (Dinh et al., 2020): the personal model is a proximal point of the client's copy of the
global model.

From w = θ = Θ, on every minibatch:

    θ ← θ − η_p [∇f_k(θ) + λ(θ − w) + ρ θ]      K times, on the same minibatch
    w ← w − η λ (w − θ)
    server:  Θ ← (1−β) Θ + β Σ_k (n_k / Σ_j n_j) w_k

Plain steps: the run's momentum and weight decay are not used. BatchNorm's running statistics, the
running confusion and the logged loss are those of the first of the K passes.  λ = 15, K = 5, η_p =
0.01, ρ = 0.001, β = 1 (the authors' code). Wire: |w| down, |w| up.  State: θ_k, the last θ.
Evaluated: θ_k (personal), Θ (global).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import local_sgd
from fedjax_sim.local.optim import Sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import OwnModel
from fedjax_sim.plans import merge
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Tree, Upload


@register("pfedme")
class PFedMe(OwnModel):
    """The personal model is a proximal point of the client's copy of the common one."""

    lam: Real = field(15.0, ge=0, help="λ, strength of the pull to w")
    inner_steps: int = field(5, ge=1, help="K, inner steps per minibatch")
    lr_personal: Real = field(0.01, ge=0, help="η_p, rate of the inner steps")
    decay_personal: Real = field(0.001, ge=0, help="ρ, weight decay of the inner steps")
    beta: Real = field(1.0, ge=0, help="β, share of the new mean in Θ")
    needs_sgd = (
        "its personal and its local model move by plain steps of two rates, as its equations say"
    )
    replaces = (
        ("momentum", "0: its equations are plain steps"),
        ("weight_decay", "its own term 0.001 θ̃"),
    )

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        def gradient(grad_of: Callable, w: Tree, step: Array, draw: Callable, theta: Tree):
            batch = draw(step)

            def nearer(theta: Tree, grads: Tree) -> Tree:
                slope = lambda p, g, a: g + self.lam * (p - a) + self.decay_personal * p
                return jax.tree.map(
                    lambda p, g, a: p - self.lr_personal * slope(p, g, a), theta, grads, w
                )

            (loss, aux), grads = grad_of(theta, batch)
            theta = nearer(theta, grads)
            theta = lax.fori_loop(
                1, self.inner_steps, lambda _, now: nearer(now, grad_of(now, batch)[1]), theta
            )
            return (
                (loss, aux._replace(carry=theta)),
                jax.tree.map(lambda a, p: self.lam * (a - p), w, theta),
                batch,
            )

        client, done = local_sgd(
            env, net, client, ctx, gradient=gradient, optimizer=Sgd(), carry=net["params"]
        )
        own = {"params": done.carry, "batch_stats": done.net["batch_stats"]}
        return client._replace(own=own), self.upload(env, ctx, done)

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        mean = merge(env, cohort, server.net)
        step = jnp.asarray(self.beta, env.dtype)
        return Server(
            jax.tree.map(lambda old, new: (1 - step) * old + step * new, server.net, mean)
        )
