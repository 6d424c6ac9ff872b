"""FedRep (Collins et al., 2021): first fit the head to the representation, then the representation to the head.

    ψ_k ← SGD_{E_h}(ψ_k; Φ)                 Φ frozen, from the kept ψ_k
    φ_k ← SGD_E(Φ; ψ_k)                     ψ_k frozen
    Φ ← Σ_k (n_k / Σ_j n_j) φ_k             over the participants that reported

A frozen group neither moves nor decays; momentum starts anew in each of the two. BatchNorm's running statistics follow
the minibatches in both. E_h = 0 with a head that is not frozen is FedPer.
E_h = 5 as in pFedRLLA's table (1 in the authors' code).
Wire: |φ| down, |φ| up.  State: ψ_k.  Evaluated: personal, the latest Φ with ψ_k.
"""

from __future__ import annotations

import math

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import descend, upload
from fedjax_sim.methods.fedper import body_groups, fedper
from fedjax_sim.plans import part
from fedjax_sim.types import Client, Ctx, Env, Tree, Upload

HEAD = 1  # tells the shuffles of the head's epochs from those of the body's


def fedrep(head_epochs: float = 5.0, freeze_head: bool = True, weights: str = "size") -> Method:
    """head_epochs: E_h; freeze_head: whether ψ_k stands still while φ is trained; weights: 'size' or 'uniform'."""
    if not 0 <= head_epochs < math.inf:
        raise UserError(f"fedrep has head_epochs={head_epochs:g}; allowed: 0 or more")

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        head = (env.model.head_group,)
        if head_epochs:
            client, fitted = descend(env, net, client, ctx, trainable=head, epochs=head_epochs, salt=HEAD)
            net = fitted.net
        client, done = descend(env, net, client, ctx, trainable=body_groups(env) if freeze_head else None)
        return client._replace(own=part(done.net, head)), upload(env, ctx, done, weights)

    return fedper(weights=weights)._replace(name="fedrep", local=local)
