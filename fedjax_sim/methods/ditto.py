"""Ditto (Li et al., 2021): FedAvg, and beside it a private model pulled towards the global one.

    global branch:    FedAvg
    personal branch:  v_k ← v_k − η[∇f_k(v_k) + λ(v_k − Θ)]   for E_p epochs, Θ as received, from the kept v_k

The two branches see independent shuffles.  Wire: |w| down, |w| up.  State: v_k.  Evaluated: v_k (personal), Θ (global).
"""

from __future__ import annotations

from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import descend, upload
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.methods.fedprox import pull
from fedjax_sim.types import Client, Ctx, Env, Real, Tree, Upload


def ditto(lam: Real = 0.5, personal_epochs: float = 0.0, weights: str = "size") -> Method:
    """lam: λ; personal_epochs: E_p (0: as many as the global branch); weights: 'size' or 'uniform'."""

    def init(env: Env, net: Tree):
        return Server(net), net

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        client, mine = descend(
            env,
            client.own,
            client,
            ctx,
            adjust=pull(lam, server.net["params"]),
            epochs=personal_epochs or None,
            salt=1,
            track=False,
        )
        client, done = descend(env, net, client, ctx)
        return client._replace(own=mine.net), upload(env, ctx, done, weights)

    return fedavg(weights)._replace(
        name="ditto", init=init, local=local, personal=lambda env, server, client, ctx: client.own
    )
