"""SCAFFOLD, option II (Karimireddy et al., 2020): control variates cancel each client's gradient
bias.

    local step:     w ← w − η(g − c_k + c)           no momentum: it would invalidate the estimate
    after S steps:  c_k⁺ = c_k − c + (Θ − w_k)/(S·η)
    server:         Θ ← Θ + η_g · mean_k(w_k − Θ)                                  (uniform means)
                    c ← c + (n_t/N) · mean_k(c_k⁺ − c_k)

Weight decay belongs to the objective and is applied; N counts the clients that can take part.

Wire: 2|w| down, 2|w| up.  State: c_k.  Evaluated: global.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Method
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.plans import merge
from fedjax_sim.tree import subtract, zeros_like
from fedjax_sim.types import Client, Cohort, Ctx, Env, Tree, Upload


class Server(NamedTuple):
    net: Tree  # Θ
    control: Tree  # c, shaped like the parameters


@register("scaffold")
class Scaffold(Method):
    """Control variates cancel each client's gradient bias."""

    server_lr: Real = field(1.0, ge=0, help="η_g, learning rate of the server")
    weights = "uniform"
    replaces = (("momentum", "0: it would invalidate the control variates"),)
    needs_sgd = "its control variates are (Θ − w)/(S·η), a mean gradient after plain steps alone"
    payload = frozenset({"sums"})

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        zero = zeros_like(net["params"])
        return Server(net, zero), zero

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        mine = client.own  # c_k
        correct = lambda grads, params: jax.tree.map(
            lambda g, ck, c: g - ck + c, grads, mine, server.control
        )
        client, done = local_sgd(
            env, net, client, ctx, adjust=correct, optimizer=env.optimizer._replace(momentum=0.0)
        )
        scale = jnp.where(done.steps > 0, 1 / (jnp.maximum(done.steps, 1) * ctx.lr), 0)
        new = jax.tree.map(
            lambda ck, c, start, end: ck - c + scale * (start - end),
            mine,
            server.control,
            net["params"],
            done.net["params"],
        )
        return client._replace(own=new), self.upload(env, ctx, done, sums=subtract(new, mine))

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        mean = merge(env, cohort, server.net)
        net = jax.tree.map(lambda old, new: old + self.server_lr * (new - old), server.net, mean)
        return Server(
            net, jax.tree.map(lambda c, d: c + d / env.population, server.control, cohort.sums)
        )

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        control = sum(env.group_floats(net))
        return control, control
