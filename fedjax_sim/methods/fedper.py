"""FedPer (Arivazhagan et al., 2019): a common representation and private last layers, trained together.

    (φ_k, ψ_k) ← SGD_E(Φ, ψ_k)              from the common Φ and the kept ψ_k (Θ⁰'s before the first time)
    Φ ← Σ_k (n_k / Σ_j n_j) φ_k             over the participants that reported

ψ is the linear head, or the last K_P groups of the model; K_P = 0 is FedAvg. Clients train as under the `backbone`
redistribution with size weights; there the head is uploaded as well.
Wire: |φ| down, |φ| up.  State: ψ_k.  Evaluated: personal, the latest Φ with ψ_k.
"""

from __future__ import annotations

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server, server_net
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.plans import masked_plan, overlay, part
from fedjax_sim.types import Client, Ctx, Env, Plan, Tree, Upload


def last_groups(env: Env, layers: int) -> tuple[str, ...]:
    """The last `layers` groups of the network, the head with them; something must be left to share."""
    model = env.model
    network = model.groups[: model.groups.index(model.head_group) + 1]
    if not 0 <= layers < len(network):
        raise UserError(
            f"{layers} parameter groups cannot stay private where model '{model.name}' has {len(network)}; "
            f"allowed: 0 to {len(network) - 1}"
        )
    return network[len(network) - layers :]


def body_groups(env: Env, layers: int = 1) -> tuple[str, ...]:
    """All other groups: the backbone."""
    own = last_groups(env, layers)
    return tuple(name for name in env.model.groups if name not in own)


def fedper(layers: int = 1, weights: str = "size") -> Method:
    """layers: K_P, groups of parameters that stay private (1: the head); weights: 'size' or 'uniform'."""
    base = fedavg(weights)

    def init(env: Env, net: Tree):
        return Server(net), part(net, last_groups(env, layers))

    def plan(env: Env, server: Server, ctx: Ctx) -> Plan:
        shared = body_groups(env, layers)
        return masked_plan(env, ctx.epochs, shared, shared)

    def own_net(env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return overlay(server.net, client.own)

    def receive(env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx) -> tuple[Client, Tree]:
        return client, own_net(env, server, client, ctx)

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        client, up = base.local(env, net, server, client, ctx)
        return client._replace(own=part(up.net, last_groups(env, layers))), up

    return base._replace(
        name="fedper",
        init=init,
        plan=plan,
        receive=receive,
        local=local,
        personal=own_net,
        global_model=None if layers else server_net,  # Θ's head is never trained
    )
