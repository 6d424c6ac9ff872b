"""FedSAM (Qu et al., 2022; Caldarola et al., 2022): local steps look for flat minima, so that averages generalise.

    g  = ∇f_k(w; b),   w̃ = w + ρ g / (‖g‖ + 1e-12)         ‖·‖ over all parameters
    w ← SGD(w, ∇f_k(w̃; b))                                 same batch, weight decay and momentum on the second gradient

BatchNorm's running statistics, the running confusion and the logged loss are those of the first pass. Two gradients
per step.  ρ = 0 is FedAvg.  Wire: |w| down, |w| up.  State: none.  Evaluated: global.
"""

from __future__ import annotations

from collections.abc import Callable

import optax

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import descend, upload
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.tree import scaled_add
from fedjax_sim.types import Array, Client, Ctx, Env, Real, Tree, Upload, concrete

TINY = 1e-12


def sharpness_aware(rho: float) -> Callable:
    """The gradient plug of `descend`: the gradient at the worst point within about ρ of the parameters."""

    def gradient(grad_of: Callable, params: Tree, step: Array, draw: Callable, carry: Tree):
        batch = draw(step)
        first, grads = grad_of(params, batch)
        worst = scaled_add(params, rho / (optax.global_norm(grads) + TINY), grads)
        _, grads = grad_of(worst, batch)
        return first, grads, batch

    return gradient


def fedsam(rho: Real = 0.05, weights: str = "size") -> Method:
    """rho: radius of the perturbation; weights: 'size' or 'uniform'."""
    if concrete(rho) and rho < 0:
        raise UserError(f"fedsam has rho={rho:g}; allowed: 0 or more")

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        client, done = descend(env, net, client, ctx, gradient=sharpness_aware(rho))
        return client, upload(env, ctx, done, weights)

    return fedavg(weights)._replace(name="fedsam", local=local)
