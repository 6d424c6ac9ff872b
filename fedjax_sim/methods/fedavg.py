"""FedAvg (McMahan et al., 2017), and FedAvg with fine-tuning at evaluation.

    w_k ← SGD_E(Θ)                      every participant, from the common model
    Θ   ← Σ_k (n_k / Σ_j n_j) w_k       over the participants that reported

FedAvg+FT: the same training; when a client's own model is asked for, it is Θ fine-tuned on its training data for
`ft_epochs` epochs, used once and thrown away. Its learning rate is that of the last round trained.

Wire: |w| down, |w| up.  State: none.  Evaluated: global (FedAvg), personal (FedAvg+FT).
"""

from __future__ import annotations

from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import descend, upload
from fedjax_sim.types import Client, Ctx, Env, Tree, Upload

FINE_TUNE = 1000  # tells the shuffles of fine-tuning from those of training


def fedavg(weights: str = "size") -> Method:
    """weights: 'size' (n_k) or 'uniform'."""

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        client, done = descend(env, net, client, ctx)
        return client, upload(env, ctx, done, weights)

    return Method("fedavg", local)


def fine_tuned(env: Env, net: Tree, client: Client, ctx: Ctx, epochs: float) -> Tree:
    """ONE client's net after `epochs` epochs on its own training data, at the round's learning rate."""
    return descend(env, net, client, ctx, epochs=epochs, salt=FINE_TUNE, track=False)[1].net


def fedavg_ft(weights: str = "size", ft_epochs: float = 5.0) -> Method:
    """weights: 'size' or 'uniform'; ft_epochs: epochs of fine-tuning at evaluation."""

    def personal(env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return fine_tuned(env, server.net, client, ctx, ft_epochs)

    return fedavg(weights)._replace(name="fedavg_ft", personal=personal, adapts=True)
