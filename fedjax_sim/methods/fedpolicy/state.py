"""What FedPolicy's agent sees of ONE client: its confusion, its accuracy, the server's, and how far
apart the two are."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from fedjax_sim.local.score import mean_loss
from fedjax_sim.plans import blend
from fedjax_sim.tree import square_norm, subtract
from fedjax_sim.types import Array, Client, Ctx, Env, Tree

# which parts of the state the agent sees; the names are the ablation's
STATES: dict[str, tuple[str, ...]] = {
    "all": ("confusion", "local", "server", "distance"),
    "ncf": ("local", "server", "distance"),
    "ncfnla": ("server", "distance"),
    "ocmla": ("confusion", "local", "server"),
    "opd": ("confusion", "local", "distance"),
}


class Server(NamedTuple):
    net: Tree  # Θ
    acc: Array  # []  ACC(Θ) on the server's validation rows


class Own(NamedTuple):
    """What ONE client keeps beside its model."""

    acc: Array  # []  acc(resident) on its own validation rows
    joined: Array  # []  bool: it has taken part, so its resident model is its own


def observation_size(state: str, classes: int) -> int:
    """Numbers in an observation.

    >>> [observation_size(state, 10) for state in STATES]
    [103, 3, 2, 102, 102]
    """
    return sum(classes**2 if part == "confusion" else 1 for part in STATES[state])


def gaps(env: Env, a: Tree, b: Tree) -> tuple[Array, Array]:
    """(‖Φ_a − Φ_b‖², ‖Ψ_a − Ψ_b‖²) over the parameters of two nets; the head is
    `model.head_group`."""
    head = env.model.head_group
    apart = subtract(a["params"], b["params"])
    return square_norm({g: d for g, d in apart.items() if g != head}), square_norm(apart[head])


def observe(env: Env, server: Server, client: Client, state: str, scaling: str) -> Array:
    """S_k [observation_size]; scaling 'raw' leaves confusion and distance in their own units."""
    normalised = scaling == "normalised"
    conf = client.confusion.conf
    distance = jnp.sqrt(sum(gaps(env, client.resident, server.net)))
    if normalised:
        conf = conf / conf.sum(1, keepdims=True)
        norm = jnp.sqrt(square_norm(server.net["params"]))
        distance = distance / jnp.where(norm > 0, norm, 1)
    parts = dict(
        confusion=conf.reshape(-1),
        local=client.own.acc[None],
        server=server.acc[None],
        distance=distance[None],
    )
    return jnp.concatenate([parts[name].astype(env.dtype) for name in STATES[state]])


def candidate_losses(env: Env, server: Server, client: Client, ctx: Ctx, takes: Array) -> Array:
    """[A] mean validation loss of the net that each of the takes [A, G] would start from."""

    def loss(take: Array) -> Array:
        net = blend(env, take, server.net, client.resident)
        if env.bn_local:
            net = {**net, "batch_stats": client.batch_stats}
        return mean_loss(env, net, env.fed.rows["val"][ctx.id], env.fed.size["val"][ctx.id])

    return lax.map(loss, takes)
