"""FedPer (Arivazhagan et al., 2019): a common representation and private last layers, trained
together.

    (φ_k, ψ_k) ← SGD_E(Φ, ψ_k)       from the common Φ and the kept ψ_k (Θ⁰'s before the first time)
    Φ ← Σ_k (n_k / Σ_j n_j) φ_k             over the participants that reported

ψ is the linear head, or the last K_P groups of the model; K_P = 0 is FedAvg. Clients train as under
the `backbone` redistribution with size weights; there the head is uploaded as well. Wire: |φ| down,
|φ| up.  State: ψ_k.  Evaluated: personal, the latest Φ with ψ_k.
"""

from __future__ import annotations

from fedjax_sim.fields import field
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.plans import body_groups, last_groups, masked_plan, overlay, part
from fedjax_sim.types import Client, Ctx, Env, Plan, Tree, Upload


class PrivateHead(Personal, FedAvg):
    """The last `layers` groups stay on the client."""

    layers = 1

    @property
    def has_global_model(self) -> bool:
        return self.layers == 0  # Θ's head is never trained

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        return Server(net), part(net, last_groups(env, self.layers))

    def plan(self, env: Env, server: Server, ctx: Ctx) -> Plan:
        shared = body_groups(env, self.layers)
        return masked_plan(env, ctx.epochs, shared, shared)

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        return client, self.personal(env, server, client, ctx)

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, up = super().local(env, net, server, client, ctx)
        return client._replace(own=part(up.net, last_groups(env, self.layers))), up

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return overlay(server.net, client.own)


@register("fedper")
class FedPer(PrivateHead):
    """A common backbone, private heads, trained together."""

    layers: int = field(1, help="K_P, groups of parameters that stay private (1: the head)")
