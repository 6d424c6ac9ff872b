"""FedProx (Li et al., 2020): local iterates stay near the received model.

    client objective:  f_k(w) + (μ/2)‖w − Θ‖²,   i.e. the gradient gains μ(w − Θ)

μ = 0 is FedAvg.  Wire: |w| down, |w| up.  State: none.  Evaluated: global.
"""

from __future__ import annotations

import jax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.types import Client, Ctx, Env, Tree, Upload


def pull(mu: float, anchor: Tree):
    """The gradient plug of (μ/2)‖w − anchor‖²: g + μ(w − anchor), group by group."""

    def adjust(grads: Tree, params: Tree) -> Tree:
        return {
            g: jax.tree.map(lambda d, w, a: d + mu * (w - a), grads[g], params[g], anchor[g])
            for g in grads
        }

    return adjust


@register("fedprox")
class FedProx(FedAvg):
    """FedAvg with a proximal term to the received model."""

    mu: Real = field(0.01, ge=0, help="strength of the proximal term")

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, done = local_sgd(env, net, client, ctx, adjust=pull(self.mu, server.net["params"]))
        return client, self.upload(env, ctx, done)
