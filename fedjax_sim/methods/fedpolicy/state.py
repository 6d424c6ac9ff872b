"""What FedPolicy's agent sees of ONE client: its confusion, its accuracy, the server's, how far
apart the two are; or what means the same in every federation."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from fedjax_sim.local.score import mean_loss
from fedjax_sim.methods.fedpolicy.features import FEATURES, gaps
from fedjax_sim.plans import blend
from fedjax_sim.tree import square_norm
from fedjax_sim.types import Array, Client, Ctx, Env, Tree

# which parts of the state the agent sees; the names are the ablation's. `portable`: numbers that
# mean the same for any data, model and number of clients
STATES: dict[str, tuple[str, ...]] = {
    "all": ("confusion", "local", "server", "distance"),
    "ncf": ("local", "server", "distance"),
    "ncfnla": ("server", "distance"),
    "ocmla": ("confusion", "local", "server"),
    "opd": ("confusion", "local", "distance"),
    "portable": (
        "local",
        "server",
        "backbone_distance",
        "head_distance",
        "label_entropy",
        "log_size",
        "joined",
        "relative_staleness",
        "progress",
    ),
}


# (usual value, a usual distance from it) of the parts of `portable`: what an evolved policy sees is
# about 0 in the usual case, so that no feature stands for a constant
USUAL: dict[str, tuple[float, float]] = {
    "local": (0.8, 0.25),
    "server": (0.6, 0.25),
    "backbone_distance": (0.3, 0.3),
    "head_distance": (0.3, 0.3),
    "label_entropy": (0.45, 0.3),
    "log_size": (0.0, 0.7),
    "joined": (1.0, 1.0),
    "relative_staleness": (0.7, 0.7),
    "progress": (0.6, 0.25),
}


class Server(NamedTuple):
    net: Tree  # Θ
    acc: Array  # []  ACC(Θ) on the server's validation rows


class Own(NamedTuple):
    """What ONE client keeps beside its model."""

    acc: Array  # []  acc(resident) on its own validation rows
    last: Array  # []  int32: the round in which it last took part, from 0; −1: never

    @property
    def joined(self) -> Array:
        """[] bool: it has taken part, so its resident model is its own."""
        return self.last >= 0


def observation_size(state: str, classes: int) -> int:
    """Numbers in an observation.

    >>> [observation_size(state, 10) for state in STATES]
    [103, 3, 2, 102, 102, 9]
    """
    return sum(classes**2 if part == "confusion" else 1 for part in STATES[state])


def observe(env: Env, server: Server, client: Client, ctx: Ctx, state: str, scaling: str) -> Array:
    """S_k [observation_size]; scaling 'raw' leaves confusion and distance in their own units,
    'centred' counts from what is usual (`portable` alone)."""
    normalised = scaling != "raw"
    parts = {
        name: FEATURES[name](env, server, client, ctx) for name in STATES[state] if name in FEATURES
    }
    conf = client.confusion.conf if "confusion" in STATES[state] else jnp.zeros((1, 1))
    distance = jnp.sqrt(sum(gaps(env, client.resident, server.net)))
    if normalised:
        conf = conf / conf.sum(1, keepdims=True)
        norm = jnp.sqrt(square_norm(server.net["params"]))
        distance = distance / jnp.where(norm > 0, norm, 1)
    parts |= dict(confusion=conf, local=client.own.acc, server=server.acc, distance=distance)
    seen = jnp.concatenate([jnp.ravel(parts[name]).astype(env.dtype) for name in STATES[state]])
    if scaling != "centred":
        return seen
    centre, far = jnp.asarray([USUAL[name] for name in STATES[state]], env.dtype).T
    return jnp.clip((seen - centre) / far, -3, 3)


def candidate_losses(env: Env, server: Server, client: Client, ctx: Ctx, takes: Array) -> Array:
    """[A] mean validation loss of the net that each of the takes [A, G] would start from."""

    def loss(take: Array) -> Array:
        net = blend(env, take, server.net, client.resident)
        if env.bn_local:
            net = {**net, "batch_stats": client.batch_stats}
        return mean_loss(env, net, env.fed.rows["val"][ctx.id], env.fed.size["val"][ctx.id])

    return lax.map(loss, takes)
