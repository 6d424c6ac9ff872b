"""FedNTD (Lee et al., 2022): distil the received model on the logits of the classes that are not
the true one.

Globally known classes are forgotten in the logits of the classes that a client does not have; these
logits are kept near the received model's.

    client objective:  L_local(z, y) + β τ² KL( softmax(ẑᵍ/τ) ‖ softmax(ẑ/τ) ),
                       mean over the batch

ẑ drops the true class's entry (C−1 are left); zᵍ are the logits of the received model, frozen, in
inference mode. L_local is the run's loss.  β = 0 is FedAvg.  Wire: |w| down, |w| up.  State: none.
Evaluated: global.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import Aux, Batch, forward, local_loss, local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload


def not_true_divergence(
    teacher: Array, student: Array, labels: Array, mask: Array, tau: float
) -> Array:
    """Mean over the real examples of KL(teacher ‖ student) over the not-true classes; logits [B,
    C], labels [B] -> [].

    The true logit does not matter:

    >>> z, other = jnp.array([[9.0, 1.0, 2.0]]), jnp.array([[0.0, 1.0, 2.0]])
    >>> float(not_true_divergence(z, other, jnp.array([0]), jnp.array([True]), 1.0))
    0.0
    """
    true = jax.nn.one_hot(labels, student.shape[-1], dtype=bool)  # [B, C]

    def log_probabilities(logits: Array) -> Array:
        logits = jnp.where(mask[:, None], logits, 0) / tau  # padding may hold anything
        return logits - jax.nn.logsumexp(jnp.where(true, -jnp.inf, logits), axis=-1, keepdims=True)

    log_q, log_p = log_probabilities(teacher), log_probabilities(student)
    each = jnp.where(true, 0, jnp.exp(log_q) * (log_q - log_p)).sum(-1)  # [B]
    return jnp.where(mask, each, 0).sum() / jnp.maximum(mask.sum(), 1).astype(each.dtype)


@register("fedntd")
class FedNTD(FedAvg):
    """Distils the received model on the logits of the classes that are not true."""

    needs_classes = "it distils the logits of the classes that an example does not have"

    beta: Real = field(1.0, ge=0, help="weight of the distillation")
    tau: Real = field(1.0, gt=0, help="temperature of the distillation")

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        def objective(now: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            logits, _, stats = forward(env, now, batch)
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            teacher = lax.stop_gradient(forward(env, net, batch, train=False)[0])
            distillation = not_true_divergence(teacher, logits, batch.y, batch.mask, self.tau)
            return loss + self.beta * self.tau**2 * distillation, Aux(logits, stats, confusion)

        client, done = local_sgd(env, net, client, ctx, objective=objective)
        return client, self.upload(env, ctx, done)
