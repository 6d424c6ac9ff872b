"""Accuracy and loss of predictors on rows of the pool: for ONE client on its own split, or on a server-held set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_sim.local import gather, repeat, turns
from fedjax_sim.types import Array, Ctx, Env, Tree

EVAL_BATCH = 250  # rows of a server-held set evaluated at once
CLIENT_EVAL_BATCH = 64  # rows of one client's split evaluated at once


class Score(NamedTuple):
    correct: Array  # []  number of correct predictions
    loss: Array  # []  summed cross-entropy
    count: Array  # type: ignore[assignment]   # []  examples


def predict_net(env: Env, net: Tree, x: Array) -> Array:
    """Logits of a plain net in inference mode."""
    features, _ = env.model.features(net, x, train=False)
    return env.model.head(net, features)


def score_rows(env: Env, predict: Callable[[Array], Array], rows: Array, n: Array, batch: int) -> Score:
    """Score of one predictor on the first n of `rows` [S]; costs ⌈n/batch⌉ forward passes."""
    size = rows.shape[0]
    batch = max(1, min(batch, size))
    padded = jnp.pad(rows, (0, -size % batch))

    def body(i: Array, total: Score) -> Score:
        x, y = gather(env, lax.dynamic_slice(padded, (i * batch,), (batch,)), i)
        real = (i * batch + jnp.arange(batch) < n).astype(env.dtype)
        logits = predict(x)
        hit = (logits.argmax(-1) == y).astype(env.dtype)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return Score(total.correct + (hit * real).sum(), total.loss + jnp.where(real > 0, loss, 0).sum(), total.count)

    zero = jnp.zeros((), env.dtype)
    planned = turns(env, -(-n // batch), padded.shape[0] // batch)
    total = repeat(planned, body, Score(zero, zero, zero))
    return total._replace(count=n.astype(env.dtype))


def score_client(env: Env, predict: Callable[[Array], Array], ctx: Ctx, split: str) -> Score:
    """Score of ONE client's predictor on its own rows of `split`."""
    return score_rows(env, predict, env.fed.rows[split][ctx.id], env.fed.size[split][ctx.id], CLIENT_EVAL_BATCH)


def accuracy(score: Score) -> Array:
    return score.correct / jnp.maximum(score.count, 1)


def client_accuracy(env: Env, net: Tree, ctx: Ctx, split: str = "val") -> Array:
    """Accuracy of a plain net on ONE client's own rows; what observations and rewards are made of."""
    return accuracy(score_client(env, lambda x: predict_net(env, net, x), ctx, split))


def held_accuracy(env: Env, net: Tree, split: str = "val") -> Array:
    """Accuracy of a plain net on a server-held set (validation, never test, inside a method)."""
    rows = env.fed.held[split]
    alone = dataclasses.replace(env, lanes=1)
    return accuracy(score_rows(alone, lambda x: predict_net(env, net, x), rows, jnp.int32(rows.shape[0]), EVAL_BATCH))


def hits_per_row(env: Env, predict: Callable[[Array], Array], rows: Array) -> tuple[Array, Array]:
    """(correct [R], loss [R]) of ONE predictor, row by row: one model scored for many clients at once."""
    size = rows.shape[0]
    batch = max(1, min(EVAL_BATCH, size))
    blocks = jnp.pad(rows, (0, -size % batch)).reshape(-1, batch)

    def block(numbered: tuple[Array, Array]) -> tuple[Array, Array]:
        i, rows = numbered
        x, y = gather(env, rows, i)
        logits = predict(x)
        return ((logits.argmax(-1) == y).astype(env.dtype), optax.softmax_cross_entropy_with_integer_labels(logits, y))

    hit, loss = lax.map(block, (jnp.arange(blocks.shape[0]), blocks))
    return hit.reshape(-1)[:size], loss.reshape(-1)[:size]


def by_owner(values: Array, owner: Array, num_clients: int) -> Array:
    """[R] values of rows -> [N] sums per client."""
    return jax.ops.segment_sum(values, owner, num_clients)
