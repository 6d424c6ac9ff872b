"""What is measured of a predictor beside accuracy and loss: sums over rows, and the figures that they make on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.local.batches import gather
from fedjax_sim.local.score import EVAL_BATCH
from fedjax_sim.types import Array, Env, Tree


class Metric(NamedTuple):
    """One metric: sums that add up over batches, clients and devices, and the figures that they make."""

    name: str
    sums: Callable[[Array, Array, Array], dict[str, Array]]  # (logits [B, C], labels [B], real [B] 0 or 1) -> named sums
    finish: Callable[[dict[str, Any]], dict[str, float]]  # (the sums as NumPy arrays) -> figures by name; on the host
    better: int = 1  # 1: larger figures are better, -1: smaller ones


def sums_over(env: Env, metrics: tuple[Metric, ...], predict: Callable[[Array], Array], rows: Array, n: Array) -> Tree:
    """{metric: {name: sum}} of ONE predictor on the first n of `rows` [R]."""
    size = rows.shape[0]
    batch = max(1, min(EVAL_BATCH, size))
    blocks = jnp.pad(rows, (0, -size % batch)).reshape(-1, batch)

    def block(i: Array) -> Tree:
        x, y = gather(env, blocks[i], i)
        real = (i * batch + jnp.arange(batch) < n).astype(env.dtype)
        logits = predict(x)
        return {metric.name: metric.sums(logits, y, real) for metric in metrics}

    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(block, jnp.int32(0)))
    add = lambda i, total: jax.tree.map(jnp.add, total, block(i))
    return lax.fori_loop(0, blocks.shape[0], add, zero)
