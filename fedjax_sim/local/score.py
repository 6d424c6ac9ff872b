"""Sums of the run's metrics for predictors on rows of the pool: of ONE client's split, or of a
server-held set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, Num

from fedjax_sim.local import gather, repeat, turns
from fedjax_sim.metrics import make_metrics
from fedjax_sim.metrics.base import Metric, value_of
from fedjax_sim.tasks import task_called
from fedjax_sim.types import Array, Count, Ctx, Env, Scalar, Tree

EVAL_BATCH = 250  # rows of a server-held set evaluated at once
CLIENT_EVAL_BATCH = 64  # rows of one client's split evaluated at once

Scores = dict[str, dict[str, Array]]  # {metric: {name: sum}}


def measured(env: Env) -> tuple[Metric, ...]:
    """The run's metrics, the primary one first."""
    return env.metrics or make_metrics((), env.fed.classes, task_called(env.fed.task).metrics)


def primary(env: Env) -> Metric:
    """The metric by which models are compared: accuracy in classification."""
    return measured(env)[0]


def loss_metric(env: Env) -> Metric:
    """The metric called `loss`, which every task has."""
    return next(metric for metric in measured(env) if metric.name == "loss")


def predict_net(
    env: Env, net: Tree, x: Num[Array, " batch *shape"]
) -> Float[Array, " batch *outputs"]:
    """Logits of a plain net in inference mode."""
    features, _ = env.model.features(net, x, train=False)
    return env.model.head(net, features)


def sums_of(
    metrics: tuple[Metric, ...],
    prediction: Float[Array, " batch *outputs"],
    target: Num[Array, " batch *target"],
    real: Float[Array, " batch"],
) -> Scores:
    return {
        metric.name: metric.sums(prediction, target, real)
        for metric in metrics
        if metric.sums is not None
    }


def counted(scores: Scores, count: Float[Array, " *clients"]) -> Scores:
    """With the number of rows, where a metric does not count by itself."""
    return {name: {"count": count, **sums} for name, sums in scores.items()}


def score_rows(
    env: Env,
    predict: Callable[[Array], Array],
    rows: Int[Array, " examples"],
    n: Count,
    batch: int,
    metrics: tuple[Metric, ...] | None = None,
) -> Scores:
    """Sums of one predictor over the first n of `rows` [S]; costs ⌈n/batch⌉ forward passes.
    metrics: None: the run's."""
    size = rows.shape[0]
    batch = max(1, min(batch, size))
    padded = jnp.pad(rows, (0, -size % batch))
    metrics = measured(env) if metrics is None else metrics

    def some(i: Count) -> Scores:
        x, y = gather(env, lax.dynamic_slice(padded, (i * batch,), (batch,)), i)
        return sums_of(
            metrics, predict(x), y, (i * batch + jnp.arange(batch) < n).astype(env.dtype)
        )

    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(some, jnp.int32(0)))
    planned = turns(env, -(-n // batch), padded.shape[0] // batch)
    total = repeat(planned, lambda i, total: jax.tree.map(jnp.add, total, some(i)), zero)
    return counted(total, n.astype(env.dtype))


def score_client(
    env: Env,
    predict: Callable[[Array], Array],
    ctx: Ctx,
    split: str,
    metrics: tuple[Metric, ...] | None = None,
) -> Scores:
    """Sums of ONE client's predictor over its own rows of `split`."""
    return score_rows(
        env,
        predict,
        env.fed.rows[split][ctx.id],
        env.fed.size[split][ctx.id],
        CLIENT_EVAL_BATCH,
        metrics,
    )


def merit(env: Env, net: Tree, rows: Int[Array, " examples"], n: Count, batch: int) -> Scalar:
    """The primary metric of a plain net on the first n of `rows`, larger is better: accuracy; 0
    without rows."""
    metric = primary(env)
    found = score_rows(env, lambda x: predict_net(env, net, x), rows, n, batch, (metric,))
    value = value_of(metric, found[metric.name])
    return value if metric.better > 0 else -value


def client_merit(env: Env, net: Tree, ctx: Ctx, split: str = "val") -> Scalar:
    """`merit` of a plain net on ONE client's own rows; what observations and rewards are made
    of."""
    return merit(
        env, net, env.fed.rows[split][ctx.id], env.fed.size[split][ctx.id], CLIENT_EVAL_BATCH
    )


def held_merit(env: Env, net: Tree, split: str = "val") -> Scalar:
    """`merit` of a plain net on a server-held set (validation, never test, inside a method)."""
    rows = env.fed.server_rows[split]
    return merit(
        dataclasses.replace(env, vmap_width=1), net, rows, jnp.int32(rows.shape[0]), EVAL_BATCH
    )


def mean_loss(env: Env, net: Tree, rows: Int[Array, " examples"], n: Count) -> Scalar:
    """The mean loss of a plain net on the first n of ONE client's `rows`; 0 without rows."""
    metric = loss_metric(env)
    found = score_rows(
        env, lambda x: predict_net(env, net, x), rows, n, CLIENT_EVAL_BATCH, (metric,)
    )
    return value_of(metric, found[metric.name])


def score_each_row(
    env: Env, predict: Callable[[Array], Array], rows: Int[Array, " examples"]
) -> Scores:
    """{metric: {name: [R, …]}} of ONE predictor, row by row, not `counted`: one model scored for
    many clients at once."""
    size = rows.shape[0]
    batch = max(1, min(EVAL_BATCH, size))
    blocks = jnp.pad(rows, (0, -size % batch)).reshape(-1, batch)
    real = jnp.ones(1, env.dtype)
    alone = jax.vmap(lambda says, y: sums_of(measured(env), says[None], y[None], real))

    def block(numbered: tuple[Count, Int[Array, " batch"]]) -> Scores:
        i, rows = numbered
        x, y = gather(env, rows, i)
        return alone(predict(x), y)

    found = lax.map(block, (jnp.arange(blocks.shape[0]), blocks))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:size], found)


def by_owner(values: Tree, owner: Int[Array, " examples"], num_clients: int) -> Tree:
    """[R, …] values of rows -> [N, …] sums per client."""
    return jax.tree.map(lambda a: jax.ops.segment_sum(a, owner, num_clients), values)
