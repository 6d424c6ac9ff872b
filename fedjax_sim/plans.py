"""Plans and what they do to nets: full and masked plans, partial means, blending by masks, mixing
of peers, byte counting.

All of it is algebra over the ordered, named parameter groups of a model.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from fedjax_sim.errors import UserError
from fedjax_sim.types import Array, Client, Cohort, Env, Plan, Scalar, Tree

# the papers' accounting: float32 on the wire, whatever precision the run computes in
BITS_PER_PARAMETER = 32


class Wire(NamedTuple):
    """Bits on the wire per participant: of each parameter group, and of what travels beside the
    model."""

    down: tuple[int, ...]  # [G]
    up: tuple[int, ...]  # [G]
    beside_down: int = 0
    beside_up: int = 0


def last_groups(env: Env, layers: int) -> tuple[str, ...]:
    """The last `layers` groups of the network, the head with them; something must be left to
    share."""
    model = env.model
    network = model.groups[: model.groups.index(model.head_group) + 1]
    if not 0 <= layers < len(network):
        raise UserError(
            f"{layers} parameter groups cannot stay private where model '{model.name}' has"
            f" {len(network)}; allowed: 0 to {len(network) - 1}"
        )
    return network[len(network) - layers :]


def body_groups(env: Env, layers: int = 1) -> tuple[str, ...]:
    """All other groups: the backbone."""
    own = last_groups(env, layers)
    return tuple(name for name in env.model.groups if name not in own)


def merge(env: Env, cohort: Cohort, keep: Tree) -> Tree:
    """The cohort's mean, group by group; a group that nobody sent keeps its old value."""
    return jax.tree.map(
        lambda g, new, old: jnp.where(cohort.weight[g] > 0, new, old),
        env.group_of(keep),
        cohort.mean,
        keep,
    )


def blend(env: Env, take: Float[Array, " groups"], new: Tree, old: Tree) -> Tree:
    """Redistribution by masks for ONE client: group g from `new` where take[g] = 1, else from
    `old`.

    A value of `take` between 0 and 1 interpolates: old + take·(new − old).
    """

    def one(g: int, a: Array, b: Array) -> Array:
        return jnp.where(take[g] >= 1, a, jnp.where(take[g] <= 0, b, b + take[g] * (a - b)))

    return jax.tree.map(one, env.group_of(new), new, old)


def part(net: Tree, names: tuple[str, ...]) -> Tree:
    """The named groups of a net, running statistics with them: what a client keeps of it.

    >>> part({"params": {"conv": 1, "fc": 2}, "batch_stats": {"conv": 3}}, ("fc",))
    {'params': {'fc': 2}, 'batch_stats': {}}
    """
    return {
        kind: {name: sub for name, sub in groups.items() if name in names}
        for kind, groups in net.items()
    }


def overlay(net: Tree, own: Tree) -> Tree:
    """A net with the groups of `own`, which is a `part` of another one, in the place of its own.

    >>> overlay(
    ...     {"params": {"conv": 1, "fc": 2}, "batch_stats": {}},
    ...     {"params": {"fc": 5}, "batch_stats": {}},
    ... )["params"]
    {'conv': 1, 'fc': 5}
    """
    return {kind: {**groups, **own[kind]} for kind, groups in net.items()}


def mix(env: Env, weights: Float[Array, "groups peers_and_own"], peers: Tree, own: Tree) -> Tree:
    """Redistribution by weights for ONE client: group g is Σ_j weights[g, j]·peers_j + weights[g,
    K]·own.

    weights: [G, K+1], as in `Plan.weights`; peers: nets [K, …], e.g. `env.peers.resident`; one of
    them is read at a time.
    """
    groups = env.group_of(own)
    start = jax.tree.map(lambda g, a: weights[g, -1].astype(a.dtype) * a, groups, own)

    def add(j: Array, total: Tree) -> Tree:
        return jax.tree.map(
            lambda g, a, b: a + weights[g, j].astype(a.dtype) * b[j], groups, total, peers
        )

    return jax.lax.fori_loop(0, weights.shape[1] - 1, add, start)


def full_plan(env: Env, epochs: Scalar | float) -> Plan:
    """Everything down, everything up."""
    ones = jnp.ones(env.num_groups)
    return Plan(ones, ones, jnp.asarray(epochs, env.dtype))


def masked_plan(
    env: Env, epochs: Scalar | float, take: tuple[str, ...], send: tuple[str, ...]
) -> Plan:
    """Only the named groups down and up."""
    mask = lambda names: jnp.array([float(g in names) for g in env.model.groups])
    return Plan(mask(take), mask(send), jnp.asarray(epochs, env.dtype))


def floats_on_wire(floats: tuple[int, ...], extra: tuple[int, int] = (0, 0)) -> Wire:
    """Whole groups of so many parameters, and `extra` floats beside them (down, up).

    >>> floats_on_wire((10, 2), (0, 1))
    Wire(down=(320, 64), up=(320, 64), beside_down=0, beside_up=32)
    """
    groups = tuple(BITS_PER_PARAMETER * n for n in floats)
    return Wire(groups, groups, BITS_PER_PARAMETER * extra[0], BITS_PER_PARAMETER * extra[1])


def payload_bytes(
    taken: Shaped[np.ndarray, "rounds groups"],
    sent: Shaped[np.ndarray, "rounds groups"],
    wire: Wire,
    down: Shaped[np.ndarray, " rounds"],
    up: Shaped[np.ndarray, " rounds"],
) -> tuple[Int[np.ndarray, " rounds"], Int[np.ndarray, " rounds"]]:
    """Bytes down and up per round, in 64 bit on the host.

    taken, sent: [T, G] how many clients took / sent each group; down, up: [T] how many clients
    received / reported.
    """
    bits = lambda groups, per_group, clients, beside: (
        groups.astype(np.int64) @ np.asarray(per_group, np.int64)
        + clients.astype(np.int64) * beside
    )
    received, reported = (
        bits(taken, wire.down, down, wire.beside_down),
        bits(sent, wire.up, up, wire.beside_up),
    )
    return -(-received // 8), -(-reported // 8)


def with_own_statistics(env: Env, net: Tree, client: Client) -> Tree:
    """A net with the client's BatchNorm statistics where these never leave it (bn_stats="local"),
    else as it is."""
    return {**net, "batch_stats": client.batch_stats} if env.bn_local else net
