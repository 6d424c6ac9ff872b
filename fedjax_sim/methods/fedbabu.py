"""FedBABU (Oh et al., 2022): learn the body against a fixed random classifier, personalise afterwards.

    φ_k ← SGD_E(Φ; Ψ⁰)                      the head Ψ⁰ is common, as it was drawn, and never moves
    Φ ← Σ_k (n_k / Σ_j n_j) φ_k             over the participants that reported
    evaluation: a copy of (Φ, Ψ⁰), body and head, is fine-tuned for F epochs on the client's training data

A frozen head does not decay either. F = 5 as in pFedRLLA's scripts (10 in the authors' code).
Wire: |φ| down, |φ| up.  State: none.  Evaluated: personal, the fine-tuned copy; global, (Φ, Ψ⁰).
"""

from __future__ import annotations

import math

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import descend, upload
from fedjax_sim.methods.fedavg import fedavg, fine_tuned
from fedjax_sim.methods.fedper import body_groups
from fedjax_sim.plans import masked_plan
from fedjax_sim.types import Client, Ctx, Env, Plan, Tree, Upload


def fedbabu(ft_epochs: float = 5.0, weights: str = "size") -> Method:
    """ft_epochs: F, epochs of fine-tuning at evaluation; weights: 'size' or 'uniform'."""
    if not 0 <= ft_epochs < math.inf:
        raise UserError(f"fedbabu has ft_epochs={ft_epochs:g}; allowed: 0 or more")

    def plan(env: Env, server: Server, ctx: Ctx) -> Plan:
        return masked_plan(env, ctx.epochs, body_groups(env), body_groups(env))

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        client, done = descend(env, net, client, ctx, trainable=body_groups(env))
        return client, upload(env, ctx, done, weights)

    def personal(env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return fine_tuned(env, server.net, client, ctx, ft_epochs)

    return fedavg(weights)._replace(name="fedbabu", plan=plan, local=local, personal=personal, adapts=True)
