"""What is known of ONE client when its plan is made, by name: what rules ask for, and what a small
controller can look at in any federation.

    effective_classes    exp(entropy of its training labels): 1 to C
    label_entropy        that entropy over log C: 0 to 1
    size                 training examples
    relative_size        size over the mean of all clients
    log_size             its logarithm
    staleness            rounds since it took part; as many as there were where it never did
    relative_staleness   log(1 + staleness · M/N): M/N is the share that takes part
    joined               1 if it has taken part before, else 0
    round                the coming round, from 1
    progress             rounds completed over those planned
    backbone_distance    ‖φ_k − Φ‖/‖Φ‖
    head_distance        ‖ψ_k − Ψ‖/‖Ψ‖

None of these looks at validation or test rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fedjax_sim.tree import square_norm, subtract
from fedjax_sim.types import Array, Client, Ctx, Env, Tree


def gaps(env: Env, a: Tree, b: Tree) -> tuple[Array, Array]:
    """(‖Φ_a − Φ_b‖², ‖Ψ_a − Ψ_b‖²) over the parameters of two nets; the head is
    `model.head_group`."""
    return squares(env, subtract(a["params"], b["params"]))


def squares(env: Env, params: Tree) -> tuple[Array, Array]:
    """(‖backbone‖², ‖head‖²)."""
    head = env.model.head_group
    return square_norm({g: d for g, d in params.items() if g != head}), square_norm(params[head])


def entropy(env: Env, ctx: Ctx) -> Array:
    """Of the client's training labels, in nats."""
    counts = env.counts[ctx.id]
    share = counts / jnp.maximum(counts.sum(), 1)
    return -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0).sum()


def relative_size(env: Env, ctx: Ctx) -> Array:
    size = env.fed.size["train"]
    return size[ctx.id] * jnp.maximum((size > 0).sum(), 1) / jnp.maximum(size.sum(), 1)


def staleness(client: Client, ctx: Ctx) -> Array:
    return jnp.where(client.own.joined, ctx.t - client.own.last, ctx.t)


def distance(env: Env, server: Any, client: Client, block: int) -> Array:
    apart = gaps(env, client.resident, server.net)[block]
    whole = squares(env, server.net["params"])[block]
    return jnp.sqrt(apart / jnp.where(whole > 0, whole, 1))


# (env, server, client, ctx) -> []                                                       ONE client
FEATURES: dict[str, Callable[[Env, Any, Client, Ctx], Array]] = {
    "effective_classes": lambda env, server, client, ctx: jnp.exp(entropy(env, ctx)),
    "label_entropy": lambda env, server, client, ctx: (
        entropy(env, ctx) / jnp.log(max(env.counts.shape[1], 2))
    ),
    "size": lambda env, server, client, ctx: env.fed.size["train"][ctx.id],
    "relative_size": lambda env, server, client, ctx: relative_size(env, ctx),
    "log_size": lambda env, server, client, ctx: jnp.log(
        jnp.maximum(relative_size(env, ctx), 1e-3)
    ),
    "staleness": lambda env, server, client, ctx: staleness(client, ctx),
    "relative_staleness": lambda env, server, client, ctx: jnp.log1p(
        staleness(client, ctx) * (env.cohort / env.population if env.share is None else env.share)
    ),
    "joined": lambda env, server, client, ctx: client.own.joined,
    "round": lambda env, server, client, ctx: ctx.t + 1,
    "progress": lambda env, server, client, ctx: ctx.t / max(env.rounds, 1),
    "backbone_distance": lambda env, server, client, ctx: distance(env, server, client, 0),
    "head_distance": lambda env, server, client, ctx: distance(env, server, client, 1),
}


def features(
    env: Env, server: Any, client: Client, ctx: Ctx, names: tuple[str, ...] = tuple(FEATURES)
) -> Array:
    """[len(names)] of ONE client."""
    values = [FEATURES[name](env, server, client, ctx) for name in names]
    return jnp.stack([jnp.asarray(value, env.dtype) for value in values])
