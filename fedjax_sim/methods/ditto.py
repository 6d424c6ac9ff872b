"""Ditto (Li et al., 2021): FedAvg, and beside it a private model pulled towards the global one.

    global branch:    FedAvg
    personal branch:  v_k ← v_k − η[∇f_k(v_k) + λ(v_k − Θ)]   for E_p epochs, Θ as received, from
                                                              the kept v_k

The two branches see independent shuffles.  Wire: |w| down, |w| up.  State: v_k.  Evaluated: v_k
(personal), Θ (global).
"""

from __future__ import annotations

from fedjax_sim.fields import Real, epochs, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import OwnModel
from fedjax_sim.methods.fedprox import pull
from fedjax_sim.types import Client, Ctx, Env, Tree, Upload


@register("ditto")
class Ditto(OwnModel):
    """FedAvg and a private model pulled towards it."""

    lam: Real = field(0.5, ge=0, help="λ, strength of the pull to the global model")
    personal_epochs: float = epochs(
        0.0, "E_p, for the personal model (0: as many as for the global one)"
    )

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, mine = local_sgd(
            env,
            client.own,
            client,
            ctx,
            adjust=pull(self.lam, server.net["params"]),
            epochs=self.personal_epochs or None,
            salt=1,
            track=False,
        )
        client, done = local_sgd(env, net, client, ctx)
        return client._replace(own=mine.net), self.upload(env, ctx, done)
