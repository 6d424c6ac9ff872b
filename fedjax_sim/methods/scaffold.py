"""SCAFFOLD, option II (Karimireddy et al., 2020): control variates cancel each client's gradient bias.

    local step:  w ← w − η(g − c_k + c)                    no momentum: it would invalidate the estimate
    after S steps:  c_k⁺ = c_k − c + (Θ − w_k)/(S·η)
    server:  Θ ← Θ + η_g · mean_k(w_k − Θ),   c ← c + (n_t/N) · mean_k(c_k⁺ − c_k)      (uniform means)

Weight decay belongs to the objective and is applied; N counts the clients that can take part.

Wire: 2|w| down, 2|w| up.  State: c_k.  Evaluated: global.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.hooks import Method
from fedjax_sim.local import descend, upload
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.plans import merge
from fedjax_sim.tree import subtract, zeros_like
from fedjax_sim.types import Client, Cohort, Ctx, Env, Real, Tree, Upload


class Server(NamedTuple):
    net: Tree  # Θ
    control: Tree  # c, shaped like the parameters


def scaffold(server_lr: Real = 1.0) -> Method:
    """server_lr: η_g."""

    def init(env: Env, net: Tree):
        zero = zeros_like(net["params"])
        return Server(net, zero), zero

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        mine = client.own  # c_k
        correct = lambda grads, params: jax.tree.map(lambda g, ck, c: g - ck + c, grads, mine, server.control)
        client, done = descend(env, net, client, ctx, adjust=correct, optimizer=env.optimizer._replace(momentum=0.0))
        scale = jnp.where(done.steps > 0, 1 / (jnp.maximum(done.steps, 1) * ctx.lr), 0)
        new = jax.tree.map(
            lambda ck, c, start, end: ck - c + scale * (start - end), mine, server.control, net["params"], done.net["params"]
        )
        return client._replace(own=new), upload(env, ctx, done, "uniform", sums=subtract(new, mine))

    def aggregate(env: Env, server: Server, cohort: Cohort) -> Server:
        mean = merge(env, cohort, server.net)
        net = jax.tree.map(lambda old, new: old + server_lr * (new - old), server.net, mean)
        return Server(net, jax.tree.map(lambda c, d: c + d / env.population, server.control, cohort.sums))

    def extra_floats(env: Env, net: Tree) -> tuple[int, int]:
        control = sum(env.group_floats(net))
        return control, control

    return fedavg()._replace(
        name="scaffold",
        init=init,
        local=local,
        aggregate=aggregate,
        extra_floats=extra_floats,
        replaces=(("momentum", "0: it would invalidate the control variates"),),
    )
