"""pFedFDA (McLaughlin and Su, 2024): a generative classifier; clients interpolate global and local
class Gaussians.

Global class means μ_g [C, d] (at first uniform in [0, 1]) and one covariance Σ_g [d, d] (at first
I) travel as a group.

    LDA(μ, Σ):  Σ̃ = (1−ε)Σ + ε·tr(Σ)/d·I,   ε = 1e−4
                coef = Σ̃⁻¹μ,   bias = −½ diag(μ coefᵀ) + log(π + 1e−4)
    client:     E epochs on φ alone with the logits of LDA(μ_g, Σ_g), π its own label shares
    fit:        on the features of the trained φ: class means (μ_g for absent classes),
                Σ = S/(n−1) + I, S the scatter around them
    β:          (β_μ, β_Σ) on a grid over [0, 1]², least cross-entropy of
                LDA(β·local + (1−β)·global), 2-fold: the local part is fitted on the even rows and
                tested on the odd ones, and the other way round
    upload:     φ and the interpolated μ, Σ, fitted on all rows;   server: size-weighted averages

Evaluated: the latest φ, with fit, β and LDA head made anew (personal); no gradient step, but a pass
over the training rows. Wire: |φ| + Cd + d² down and up.  State: β_k, the last one chosen (for
inspection).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve

from fedjax_sim.fields import field
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import Aux, Batch, local_loss, local_sgd
from fedjax_sim.local.features import client_features
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.models import Model, with_group
from fedjax_sim.plans import masked_plan, with_own_statistics
from fedjax_sim.types import Array, Client, Ctx, Env, Plan, Tree, Upload

GROUP = "gaussians"
SHRINK = 1e-4  # ε
PRIOR = 1e-4  # added to every label share
JITTER = 1e-4  # the authors' code adds it to every entry of the covariance


class Gaussians(NamedTuple):
    mean: Array  # μ [C, d]
    covariance: Array  # Σ [d, d]


def blended(beta: Array, local: Gaussians, common: Gaussians) -> Gaussians:
    """β·local + (1−β)·common, β = (β_μ, β_Σ)."""
    return Gaussians(
        *(b * one + (1 - b) * other for b, one, other in zip(beta, local, common, strict=True))
    )


def solver(covariance: Array):
    """(m [C, d]) -> Σ̃⁻¹m [C, d]."""
    width = covariance.shape[0]
    smooth = (1 - SHRINK) * covariance + SHRINK * jnp.trace(covariance) / width * jnp.eye(
        width, dtype=covariance.dtype
    )
    factor = cho_factor(smooth, lower=True)
    return lambda mean: cho_solve(factor, mean.T).T


def lda(model: Gaussians, prior: Array) -> tuple[Array, Array]:
    """(coef [C, d], bias [C]) of linear discriminant analysis; prior [C], positive.

    >>> coef, bias = lda(
    ...     Gaussians(jnp.array([[2.0], [0.0]]), jnp.array([[4.0]])), jnp.array([0.5, 0.5])
    ... )
    >>> coef.ravel().tolist(), (bias - jnp.log(0.5)).tolist()
    ([0.5, 0.0], [-0.5, 0.0])
    """
    coef = solver(model.covariance)(model.mean)
    return coef, jnp.log(prior) - (model.mean * coef).sum(1) / 2


def fit(features: Array, labels: Array, use: Array, common: Array, jitter: bool) -> Gaussians:
    """The Gaussians of the rows in use; features [S, d], labels [S], use [S] bool, common: μ_g [C,
    d]."""
    member = jax.nn.one_hot(labels, common.shape[0], dtype=features.dtype) * use[:, None]  # [S, C]
    count = member.sum(0)
    mean = jnp.where(
        count[:, None] > 0, member.T @ features / jnp.maximum(count, 1)[:, None], common
    )
    around = jnp.where(use[:, None], features - mean[labels], 0)
    covariance = around.T @ around / jnp.maximum(count.sum() - 1, 1) + jnp.eye(
        features.shape[1], dtype=features.dtype
    )
    return Gaussians(mean, covariance + (JITTER if jitter else 0))


def surface(
    features: Array,
    labels: Array,
    real: Array,
    common: Gaussians,
    prior: Array,
    grid: Array,
    jitter: bool,
) -> Array:
    """[G, G] (β_μ, β_Σ): mean two-fold cross-entropy. One factorisation per fold and β_Σ: coef is
    linear in β_μ."""
    odd = jnp.arange(labels.shape[0]) % 2 == 1

    def fold(test: Array) -> Array:
        local = fit(features, labels, real & ~test, common.mean, jitter)

        def column(b_cov: Array) -> Array:  # -> [G] over β_μ
            invert = solver(b_cov * local.covariance + (1 - b_cov) * common.covariance)
            mine, theirs = invert(local.mean), invert(common.mean)  # [C, d]
            z_mine, z_theirs = features @ mine.T, features @ theirs.T  # [S, C]

            def one(b: Array) -> Array:
                mean, coef = b * local.mean + (1 - b) * common.mean, b * mine + (1 - b) * theirs
                logits = b * z_mine + (1 - b) * z_theirs + jnp.log(prior) - (mean * coef).sum(1) / 2
                each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
                return jnp.where(real & test, each, 0).sum()

            return lax.map(one, grid)

        return lax.map(column, grid).T

    return (fold(odd) + fold(~odd)) / jnp.maximum(real.sum(), 1)


@register("pfedfda")
class PFedFDA(Personal, FedAvg):
    """Class Gaussians as the classifier, interpolated between global and local."""

    needs_classes = "its head is made of Gaussians of each class's features"

    grid: int = field(21, ge=2, help="grid points of each β")
    cov_jitter: bool = field(
        False, help="add 1e-4 to every entry of the local covariance, as the authors' code does"
    )
    has_global_model = False
    adapts = True

    def extend(self, model: Model) -> Model:
        dtype = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))["params"])[0].dtype
        start = lambda key: {
            "mean": jax.random.uniform(key, (model.classes, model.width), dtype),
            "covariance": jnp.eye(model.width, dtype=dtype),
        }
        return with_group(model, GROUP, start)

    def shared(self, env: Env) -> tuple[str, ...]:
        return tuple(g for g in env.model.groups if g != env.model.head_group)

    def common(self, net: Tree) -> Gaussians:
        return Gaussians(**net["params"][GROUP])

    def prior_of(self, env: Env, ctx: Ctx) -> Array:
        counts = env.counts[ctx.id].astype(env.dtype)
        return counts / jnp.maximum(counts.sum(), 1) + PRIOR

    def adapted(self, env: Env, net: Tree, server: Server, ctx: Ctx) -> tuple[Array, Gaussians]:
        """(β, the interpolated Gaussians) of ONE client's training rows under the backbone of
        `net`."""
        features, labels, real = client_features(env, net, ctx.id)
        betas = jnp.linspace(0, 1, self.grid, dtype=env.dtype)
        losses = surface(
            features,
            labels,
            real,
            self.common(server.net),
            self.prior_of(env, ctx),
            betas,
            self.cov_jitter,
        )
        best = jnp.argmin(losses)  # ties: the smaller β_μ, then the smaller β_Σ
        beta = jnp.stack([betas[best // self.grid], betas[best % self.grid]])
        local = fit(features, labels, real, self.common(server.net).mean, self.cov_jitter)
        return beta, blended(beta, local, self.common(server.net))

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        coef, bias = lda(self.common(server.net), self.prior_of(env, ctx))

        def objective(net: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            features, stats = env.model.features(net, batch.x, train=True, mask=batch.mask)
            logits = features @ coef.T + bias
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            return loss, Aux(logits, stats, confusion)

        body = tuple(g for g in self.shared(env) if g != GROUP)
        client, done = local_sgd(env, net, client, ctx, objective=objective, trainable=body)
        beta, own = self.adapted(env, done.net, server, ctx)
        sent = {**done.net, "params": {**done.net["params"], GROUP: own._asdict()}}
        return client._replace(own=beta), self.upload(env, ctx, done._replace(net=sent))

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        net = with_own_statistics(env, server.net, client)
        return net, lda(self.adapted(env, net, server, ctx)[1], self.prior_of(env, ctx))

    def predict(self, env: Env, predictor: Tree, x: Array) -> Array:
        net, (coef, bias) = predictor
        return env.model.features(net, x, train=False)[0] @ coef.T + bias

    def init(self, env: Env, net: Tree) -> tuple[Server, Array]:
        return Server(net), jnp.full(2, 0.5, env.dtype)

    def plan(self, env: Env, server: Server, ctx: Ctx) -> Plan:
        return masked_plan(env, ctx.epochs, self.shared(env), self.shared(env))
