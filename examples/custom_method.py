"""Your own method in ten lines, compared with FedAvg.

python examples/custom_method.py [ROUNDS]
"""

import sys

import jax.numpy as jnp

import fedjax_sim as fs
from fedjax_sim.local import local_sgd


class ByLoss(fs.Method):
    """FedAvg that weighs clients by their training loss: the largest loss counts most (power 0:
    equal weights)."""

    power: fs.Real = fs.field(1.0, ge=0)

    def local(self, env, net, server, client, ctx):  # ONE client
        client, done = local_sgd(env, net, client, ctx)
        return client, self.upload(env, ctx, done)._replace(
            weight=jnp.maximum(done.loss, 1e-6) ** self.power
        )


rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
print(
    fs.compare(
        "fedavg",
        ByLoss(1.0),
        model="mlp",
        clients=10,
        partition="dirichlet:0.1",
        rounds=rounds,
        epochs=1,
    )
)
