"""Class-wise statistics of ONE client's features: sums that add up over clients, and Gaussians made
of them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from fedjax_sim.local.batches import gather, repeat, turns
from fedjax_sim.platform import exact
from fedjax_sim.types import Array, Count, Env, Scalar, Tree

ROWS = 64  # rows of a client passed through the model at once
LOOKED_AT = 64  # about how many images; a feature above 0 on one of them is alive


class Statistics(NamedTuple):
    """Sums over examples, class by class: they add up over clients."""

    count: Float[Array, " classes"]  # type: ignore[assignment]
    total: Float[Array, "classes features"]
    square: Float[Array, "classes features *again"]  # with the last axis: outer products


def zero_statistics(env: Env, full: bool) -> Statistics:
    classes, width = env.model.classes, env.model.width
    shape = (classes, width, width) if full else (classes, width)
    return Statistics(
        jnp.zeros(classes, env.dtype),
        jnp.zeros((classes, width), env.dtype),
        jnp.zeros(shape, env.dtype),
    )


def class_statistics(env: Env, net: Tree, client: Count, full: bool) -> Statistics:
    """Of ONE client's training rows, with the features of `net` in inference mode."""
    rows, n = env.fed.rows["train"][client], env.fed.size["train"][client]
    batch = max(1, min(ROWS, rows.shape[0]))
    padded = jnp.pad(rows, (0, -rows.shape[0] % batch))

    def add(i: Count, sums: Statistics) -> Statistics:
        x, y = gather(env, lax.dynamic_slice(padded, (i * batch,), (batch,)), i)
        real = i * batch + jnp.arange(batch) < n
        features = jnp.where(real[:, None], env.model.features(net, x, train=False)[0], 0)  # [B, d]
        member = jax.nn.one_hot(y, env.model.classes, dtype=env.dtype) * real[:, None]  # [B, C]
        product = exact(jnp.matmul)  # `gaussians` takes the difference of such sums
        if full:
            square = exact(jnp.einsum)("bc,bi,bj->cij", member, features, features)
        else:
            square = product(member.T, jnp.square(features))
        return Statistics(
            sums.count + member.sum(0),
            sums.total + product(member.T, features),
            sums.square + square,
        )

    return repeat(
        turns(env, -(-n // batch), padded.shape[0] // batch), add, zero_statistics(env, full)
    )


def client_features(
    env: Env, net: Tree, client: Count
) -> tuple[Float[Array, "examples features"], Int[Array, " examples"], Bool[Array, " examples"]]:
    """(features, labels, real) of ONE client's training rows in inference mode, in
    the order of its rows."""
    rows, n = env.fed.rows["train"][client], env.fed.size["train"][client]
    batch = max(1, min(ROWS, rows.shape[0]))
    padded = jnp.pad(rows, (0, -rows.shape[0] % batch))
    real = jnp.arange(padded.shape[0]) < n

    def fill(
        i: Count, features: Float[Array, "examples features"]
    ) -> Float[Array, "examples features"]:
        x, _ = gather(env, lax.dynamic_slice(padded, (i * batch,), (batch,)), i)
        return lax.dynamic_update_slice_in_dim(
            features, env.model.features(net, x, train=False)[0], i * batch, 0
        )

    empty = jnp.zeros((padded.shape[0], env.model.width), env.dtype)
    features = repeat(turns(env, -(-n // batch), padded.shape[0] // batch), fill, empty)
    return jnp.where(real[:, None], features, 0), env.fed.y[padded], real


def gaussians(
    sums: Statistics,
) -> tuple[Float[Array, "classes features"], Float[Array, "classes features *again"]]:
    """(means, covariances [C, d, d] or variances [C, d]); zero for a class without examples
    or with one."""
    count = sums.count[:, None]
    mean = sums.total / jnp.maximum(count, 1)
    if sums.square.ndim == 3:
        spread = sums.square - count[:, :, None] * mean[:, :, None] * mean[:, None, :]
        return mean, jnp.where(
            count[:, :, None] > 1, spread / jnp.maximum(count - 1, 1)[:, :, None], 0
        )
    # rounding must not make it negative
    spread = jnp.maximum(sums.square - count * jnp.square(mean), 0)
    return mean, jnp.where(count > 1, spread / jnp.maximum(count - 1, 1), 0)


def live_features(env: Env, net: Tree, ids: Int[Array, " participants"]) -> Scalar:
    """Share of the features of `net` that are above 0 for one of a few training images of the
    clients `ids`."""
    each = -(-LOOKED_AT // ids.shape[0])
    rows, n = env.fed.rows["train"][ids], env.fed.size["train"][ids]  # [M, S], [M]
    place = jnp.arange(each) % jnp.maximum(n, 1)[:, None]  # [M, each], a client's own
    x, _ = gather(env, jnp.take_along_axis(rows, place, 1).reshape(-1), jnp.int32(0))
    real = jnp.broadcast_to((n > 0)[:, None], place.shape).reshape(-1, 1)
    features, _ = env.model.features(net, x, train=False)
    return ((features > 0) & real).any(0).mean(dtype=env.dtype)
