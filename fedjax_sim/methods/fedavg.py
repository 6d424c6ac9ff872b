"""FedAvg (McMahan et al., 2017), and FedAvg with fine-tuning at evaluation.

    w_k ← SGD_E(Θ)                      every participant, from the common model
    Θ   ← Σ_k (n_k / Σ_j n_j) w_k       over the participants that reported

FedAvg+FT: the same training; when a client's own model is asked for, it is Θ fine-tuned on its
training data for `ft_epochs` epochs, used once and thrown away. Its learning rate is that of the
last round trained.

Wire: |w| down, |w| up.  State: none.  Evaluated: global (FedAvg), personal (FedAvg+FT).
"""

from __future__ import annotations

from fedjax_sim.fields import epochs, field
from fedjax_sim.hooks import Method, Personal, Server
from fedjax_sim.local import local_sgd
from fedjax_sim.methods import register
from fedjax_sim.types import Client, Ctx, Env, Tree

FINE_TUNE = 1000  # tells the shuffles of fine-tuning from those of training


@register("fedavg")
class FedAvg(Method):
    """Clients train from the common model, the server averages."""

    weights: str = field(
        "size",
        choices=("size", "uniform"),
        help="weights of the average: by n_k, or equal",
        kw_only=True,
    )


class OwnModel(Personal, FedAvg):
    """A client keeps a whole model beside the common one, from Θ⁰ on, and predicts with it."""

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        return Server(net), net

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return client.own


def fine_tuned(env: Env, net: Tree, client: Client, ctx: Ctx, epochs: float) -> Tree:
    """ONE client's net after `epochs` epochs on its own training data, at the round's learning
    rate."""
    return local_sgd(env, net, client, ctx, epochs=epochs, salt=FINE_TUNE, track=False)[1].net


@register("fedavg_ft")
class FedAvgFT(Personal, FedAvg):
    """FedAvg, fine-tuned on local data when it is evaluated."""

    ft_epochs: float = epochs(5.0, "epochs of fine-tuning at evaluation")
    adapts = True

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return fine_tuned(env, server.net, client, ctx, self.ft_epochs)
