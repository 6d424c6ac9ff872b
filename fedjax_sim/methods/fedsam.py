"""FedSAM (Qu et al., 2022; Caldarola et al., 2022): local steps look for flat minima, so that
averages generalise.

    g  = ∇f_k(w; b),   w̃ = w + ρ g / (‖g‖ + 1e-12)         ‖·‖ over all parameters
    w ← SGD(w, ∇f_k(w̃; b))             same batch, weight decay and momentum on the second gradient

BatchNorm's running statistics, the running confusion and the logged loss are those of the first
pass. Two gradients per step.  ρ = 0 is FedAvg.  Wire: |w| down, |w| up.  State: none.  Evaluated:
global.
"""

from __future__ import annotations

from collections.abc import Callable

import optax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.tree import scaled_add
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload

TINY = 1e-12


def sharpness_aware(rho: float) -> Callable:
    """The gradient plug of `local_sgd`: the gradient at the worst point within about ρ of the
    parameters."""

    def gradient(grad_of: Callable, params: Tree, step: Array, draw: Callable, carry: Tree):
        batch = draw(step)
        first, grads = grad_of(params, batch)
        worst = scaled_add(params, rho / (optax.global_norm(grads) + TINY), grads)
        _, grads = grad_of(worst, batch)
        return first, grads, batch

    return gradient


@register("fedsam")
class FedSAM(FedAvg):
    """Sharpness-aware local steps look for flat minima."""

    rho: Real = field(0.05, ge=0, help="radius of the perturbation")

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, done = local_sgd(env, net, client, ctx, gradient=sharpness_aware(self.rho))
        return client, self.upload(env, ctx, done)
