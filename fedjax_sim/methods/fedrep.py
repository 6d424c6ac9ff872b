"""FedRep (Collins et al., 2021): first fit the head to the representation, then the representation
to the head.

    ψ_k ← SGD_{E_h}(ψ_k; Φ)                 Φ frozen, from the kept ψ_k
    φ_k ← SGD_E(Φ; ψ_k)                     ψ_k frozen
    Φ ← Σ_k (n_k / Σ_j n_j) φ_k             over the participants that reported

A frozen group neither moves nor decays; momentum starts anew in each of the two. BatchNorm's
running statistics follow the minibatches in both. E_h = 0 with a head that is not frozen is FedPer.
E_h = 5 as in pFedRLLA's table (1 in the authors' code). Wire: |φ| down, |φ| up.  State: ψ_k.
Evaluated: personal, the latest Φ with ψ_k.
"""

from __future__ import annotations

from fedjax_sim.fields import epochs, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedper import PrivateHead
from fedjax_sim.plans import body_groups, part
from fedjax_sim.types import Client, Ctx, Env, Tree, Upload

HEAD = 1  # tells the shuffles of the head's epochs from those of the body's


@register("fedrep")
class FedRep(PrivateHead):
    """As FedPer, but the head first and then the backbone."""

    head_epochs: float = epochs(5.0, "E_h, epochs of the head")
    freeze_head: bool = field(True, help="whether ψ_k is fixed while φ is trained")

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        head = (env.model.head_group,)
        if self.head_epochs:
            client, fitted = local_sgd(
                env, net, client, ctx, trainable=head, epochs=self.head_epochs, salt=HEAD
            )
            net = fitted.net
        client, done = local_sgd(
            env, net, client, ctx, trainable=body_groups(env) if self.freeze_head else None
        )
        return client._replace(own=part(done.net, head)), self.upload(env, ctx, done)
