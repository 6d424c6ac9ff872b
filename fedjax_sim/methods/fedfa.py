"""FedFA (Zhou and Konukoglu, 2023): features are augmented as if their channel statistics were
random.

After each stage of the model, in training, with probability p per batch and stage. x [B, h, w, Ch];
μ, σ [B, Ch] are an example's channel mean and deviation over its map, variances are unbiased, ε =
1e-6:

    σ = √(Var_map(x) + ε),   v_μ = Var_batch(μ) + ε,   v_σ = Var_batch(σ) + ε
    q = 1/(1 + 1/(Γ_μ + ε)),   γ_μ = Ch·q/Σq,   s_μ = √((γ_μ + 1) v_μ)       the same for σ with Γ_σ
    β̂ ~ N(μ, s_μ²),   γ̂ ~ N(σ, s_σ²),   output  γ̂·(x − μ)/σ + β̂
    client:  μ̄ ← 0.99 μ̄ + 0.01 mean_batch(μ), σ̄ likewise, whenever active; from 0 and 1; kept
    server:  parameters averaged;  Γ_μ = Var_k(μ̄_k),  Γ_σ = Var_k(σ̄_k) per channel; from 1

Padding examples enter no statistic.  p = 0 is FedAvg.  Wire: |w| + 2ΣCh down (Γ), |w| + 2ΣCh up
(μ̄, σ̄). State: μ̄_k, σ̄_k.  Evaluated: global.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.errors import UserError
from fedjax_sim.fields import Real, field
from fedjax_sim.local import Aux, Batch, forward, local_loss, local_sgd
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.plans import merge
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Tree, Upload

EPSILON, KEEP = 1e-6, 0.99
NOISE = 2000  # tells these draws from those of data augmentation


class Moments(NamedTuple):
    """Of one stage: running statistics of a client, or their variances over clients."""

    mean: Array  # [Ch]
    std: Array  # [Ch]


class Server(NamedTuple):
    net: Tree
    spread: dict[str, Moments]  # Γ by stage


def masked_moments(values: Array, mask: Array) -> tuple[Array, Array]:
    """(mean [Ch], unbiased variance [Ch]) of the rows of `values` [B, Ch] that the mask lets in; 0
    for a single one.

    >>> masked_moments(jnp.array([[1.0], [3.0], [9.0]]), jnp.array([True, True, False]))[1].tolist()
    [2.0]
    """
    on = mask.reshape(-1, *[1] * (values.ndim - 1))
    n = mask.sum().astype(values.dtype)
    mean = jnp.where(on, values, 0).sum(0) / jnp.maximum(n, 1)
    return mean, jnp.where(on, jnp.square(values - mean), 0).sum(0) / jnp.maximum(n - 1, 1)


def sampling_deviation(batch_variance: Array, spread: Array) -> Array:
    """s = √((γ + 1)(v + ε)) of one statistic, all [Ch]; spread: Γ over the clients."""
    share = 1 / (1 + 1 / (spread + EPSILON))
    share = share.shape[0] * share / share.sum()
    return jnp.sqrt((share + 1) * (batch_variance + EPSILON))


def augment_features(x: Array, mask: Array, spread: Moments, noise: Array) -> tuple[Array, Moments]:
    """One active layer: (x with new channel statistics, mean over the batch of the old ones).

    x [B, h, w, Ch]; noise [2, B, Ch] standard normal, for β̂ and γ̂.
    """
    mean = x.mean((1, 2))  # [B, Ch]
    around = x - mean[:, None, None]
    std = jnp.sqrt(jnp.square(around).sum((1, 2)) / max(x.shape[1] * x.shape[2] - 1, 1) + EPSILON)
    (mean_of, mean_var), (std_of, std_var) = masked_moments(mean, mask), masked_moments(std, mask)
    shift = mean + sampling_deviation(mean_var, spread.mean) * noise[0]
    scale = std + sampling_deviation(std_var, spread.std) * noise[1]
    return (scale / std)[:, None, None] * around + shift[:, None, None], Moments(mean_of, std_of)


@register("fedfa")
class FedFA(FedAvg):
    """Channel statistics of feature maps are varied as they vary over clients."""

    needs_classes = "it shifts the statistics of images' feature maps"

    p: Real = field(0.5, ge=0, le=1, help="chance that a layer is active in a batch")
    payload = frozenset({"report"})

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        if not env.model.stages:
            raise UserError(
                f"fedfa augments feature maps, and model '{env.model.name}' has none; allowed: a"
                " model with convolutions"
            )
        one = lambda channels: jnp.ones(channels, env.dtype)
        spread = {
            name: Moments(one(channels), one(channels)) for name, channels in env.model.stages
        }
        return Server(net, spread), {name: Moments(0 * m.mean, m.std) for name, m in spread.items()}

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        stage = {name: i for i, (name, _) in enumerate(env.model.stages)}

        def objective(
            net: Tree, batch: Batch, confusion: Tree, running: dict[str, Moments]
        ) -> tuple[Array, Aux]:
            after = dict(running)

            def tap(name: str, x: Array) -> Array:
                coin, normal = jax.random.split(jax.random.fold_in(batch.key, NOISE + stage[name]))
                active = jax.random.bernoulli(coin, self.p)
                noise = jax.random.normal(normal, (2, x.shape[0], x.shape[-1]), x.dtype)
                new, now = augment_features(x, batch.mask, server.spread[name], noise)
                after[name] = jax.tree.map(
                    lambda old, value: jnp.where(
                        active, KEEP * old + (1 - KEEP) * lax.stop_gradient(value), old
                    ),
                    running[name],
                    now,
                )
                return jnp.where(active, new, x)

            logits, _, stats = forward(env, net, batch, tap=tap)
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            return loss, Aux(logits, stats, confusion, after)

        client, done = local_sgd(env, net, client, ctx, objective=objective, carry=client.own)
        return client._replace(own=done.carry), self.upload(env, ctx, done, report=done.carry)

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        spread = jax.tree.map(lambda values: masked_moments(values, cohort.ok)[1], cohort.reports)
        return Server(merge(env, cohort, server.net), spread)

    def extra_floats(self, env: Env, net: Tree) -> tuple[int, int]:
        channels = sum(channels for _, channels in env.model.stages)
        return 2 * channels, 2 * channels
