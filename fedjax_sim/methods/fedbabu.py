"""FedBABU (Oh et al., 2022): learn the body against a fixed random classifier, personalise
afterwards.

    φ_k ← SGD_E(Φ; Ψ⁰)                      the head Ψ⁰ is common, as it was drawn, and never moves
    Φ ← Σ_k (n_k / Σ_j n_j) φ_k             over the participants that reported
    evaluation: a copy of (Φ, Ψ⁰), body and head, is fine-tuned for F epochs on the client's data

A frozen head does not decay either. F = 5 as in pFedRLLA's scripts (10 in the authors' code).
Wire: |φ| down, |φ| up.  State: none.  Evaluated: personal, the fine-tuned copy; global, (Φ, Ψ⁰).
"""

from __future__ import annotations

from fedjax_sim.fields import epochs
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg, fine_tuned
from fedjax_sim.plans import body_groups, masked_plan
from fedjax_sim.types import Client, Ctx, Env, Plan, Tree, Upload


@register("fedbabu")
class FedBABU(Personal, FedAvg):
    """Only the body is trained, against a fixed head; fine-tuned at evaluation."""

    ft_epochs: float = epochs(5.0, "F, epochs of fine-tuning at evaluation")
    adapts = True

    def plan(self, env: Env, server: Server, ctx: Ctx) -> Plan:
        return masked_plan(env, ctx.epochs, body_groups(env), body_groups(env))

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, done = local_sgd(env, net, client, ctx, trainable=body_groups(env))
        return client, self.upload(env, ctx, done)

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return fine_tuned(env, server.net, client, ctx, self.ft_epochs)
