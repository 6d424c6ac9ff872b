"""CCVR (Luo et al., 2021): FedAvg, with the classifier refitted on features drawn from class-wise
Gaussians.

Clients send per class c of their training data: n_kc, Σ f and Σ f² (diagonal) or Σ f fᵀ (full) of
the features f; sums over clients pool exactly:

    μ_c = Σ_k Σ f / n_c,     Σ_c = (Σ_k Σ f fᵀ − n_c μ_c μ_cᵀ) / (n_c − 1)
    draw `samples` features from N(μ_c, Σ_c) for every class seen
    retrain the last layer Ψ on them: SGD, lr 0.01, momentum 0.9, batches of 256, one epoch;
    cross-entropy, whatever the run's loss is

mode=per_round_diag   after every round, diagonal, features of the participants' trained models;
                      the next round starts from the calibrated head.
                      Wire: |w| down, |w| + C(2d+1) up.
mode=post_full        the original: once after the last round, full covariance, features of Θ, from
                      every client that ever reported; until then FedAvg.
                      Wire: |w| down, |w| up per round (at the end C(1+d+d²) per client).

State: none.  Evaluated: global.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_sim.fields import MOST_EPOCHS, Real, field
from fedjax_sim.hooks import Finishes, Kind
from fedjax_sim.local import epoch_permutations, local_sgd
from fedjax_sim.local.features import Statistics, class_statistics, gaussians, zero_statistics
from fedjax_sim.local.optim import Sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.plans import merge
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Tree, Upload

MODES = ("per_round_diag", "post_full")
HEAD_BATCH, HEAD_MOMENTUM = 256, 0.9


class Server(NamedTuple):
    net: Tree
    joined: Tree  # [N] has ever reported (post_full), else ()


def draw_features(key: Array, mean: Array, covariance: Array, samples: int) -> Array:
    """[C, samples, d] from the class Gaussians; the root of a full covariance is taken over its
    eigenvectors."""
    noise = jax.random.normal(key, (mean.shape[0], samples, mean.shape[1]), mean.dtype)
    if covariance.ndim == 2:
        return mean[:, None] + jnp.sqrt(covariance)[:, None] * noise

    def one(
        args: tuple[Array, Array],
    ) -> Array:  # ONE class; fewer examples than features: singular
        covariance, noise = args
        values, vectors = jnp.linalg.eigh((covariance + covariance.T) / 2)
        return (noise * jnp.sqrt(jnp.maximum(values, 0))) @ vectors.T

    return mean[:, None] + lax.map(one, (covariance, noise))


def calibrate(
    env: Env, net: Tree, key: Array, sums: Statistics, samples: int, lr: float, epochs: int
) -> Tree:
    """The net with its last group refitted on virtual features of the classes seen."""
    classes, head = env.model.classes, env.model.head_group
    draw, shuffle = jax.random.split(key)
    features = draw_features(draw, *gaussians(sums), samples).reshape(classes * samples, -1)
    labels = jnp.repeat(jnp.arange(classes), samples)
    seen = sums.count > 0
    n, size = seen.sum() * samples, classes * samples
    # shuffled, then the classes never seen to the end, where no batch reaches them
    permutations = epoch_permutations(shuffle, jnp.int32(size), size, epochs)
    permutations = jax.vmap(lambda order: order[jnp.argsort(~seen[labels[order]], stable=True)])(
        permutations
    )
    permutations = jnp.pad(permutations, ((0, 0), (0, -size % HEAD_BATCH)))
    per_epoch, optimizer = -(-n // HEAD_BATCH), Sgd(HEAD_MOMENTUM).transform()

    def step(k: Array, carry):
        params, state = carry
        start = (k % jnp.maximum(per_epoch, 1)) * HEAD_BATCH
        rows = lax.dynamic_slice(
            permutations, (k // jnp.maximum(per_epoch, 1), start), (1, HEAD_BATCH)
        )[0]
        real = (start + jnp.arange(HEAD_BATCH) < n).astype(features.dtype)

        def loss(params: Tree) -> Array:
            logits = env.model.head(
                {**net, "params": {**net["params"], head: params}}, features[rows]
            )
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows])
            return (each * real).sum() / jnp.maximum(real.sum(), 1)

        direction, state = optimizer.update(jax.grad(loss)(params), state, params)
        return jax.tree.map(lambda p, d: p - lr * d, params, direction), state

    params = net["params"][head]
    params, _ = lax.fori_loop(0, epochs * per_epoch, step, (params, optimizer.init(params)))
    return {**net, "params": {**net["params"], head: params}}


@register("ccvr")
class CCVR(Finishes, FedAvg):
    """FedAvg, its classifier refitted on features drawn from class Gaussians."""

    needs_classes = "it fits the head to Gaussians of each class's features"

    mode: str = field("per_round_diag", choices=MODES, help="when the classifier is refitted")
    samples: int = field(128, ge=1, help="features drawn per class")
    head_lr: Real = field(0.01, ge=0, help="learning rate of the calibration")
    head_epochs: int = field(1, ge=1, le=MOST_EPOCHS, help="epochs of the calibration")
    payload = frozenset({"sums"})

    @property
    def every_round(self) -> bool:
        return self.mode == "per_round_diag"

    def ask(self, kind: type[Kind]) -> Kind | None:
        return None if kind is Finishes and self.every_round else super().ask(kind)

    def calibrated(self, env: Env, net: Tree, key: Array, sums: Statistics) -> Tree:
        return calibrate(env, net, key, sums, self.samples, self.head_lr, self.head_epochs)

    def init(self, env: Env, net: Tree) -> tuple[Server, tuple]:
        return Server(net, () if self.every_round else jnp.zeros(env.num_clients, bool)), ()

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        client, done = local_sgd(env, net, client, ctx)
        sums: Tree = class_statistics(env, done.net, ctx.id, full=False) if self.every_round else ()
        return client, self.upload(env, ctx, done, sums=sums)

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        net = merge(env, cohort, server.net)
        if self.every_round:
            return server._replace(net=self.calibrated(env, net, cohort.key, cohort.sums))
        return Server(net, server.joined.at[cohort.ids].max(cohort.ok))

    def finish(self, env: Env, server: Server, key: Array) -> Tree:
        def add(i: Array, sums: Statistics) -> Statistics:
            more = lax.cond(
                server.joined[i],
                lambda: class_statistics(env, server.net, i, full=True),
                lambda: zero_statistics(env, full=True),
            )
            return jax.tree.map(jnp.add, sums, more)

        sums = lax.fori_loop(0, env.num_clients, add, zero_statistics(env, full=True))
        return self.calibrated(env, server.net, key, sums)

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        return 0, env.model.classes * (2 * env.model.width + 1) if self.every_round else 0
