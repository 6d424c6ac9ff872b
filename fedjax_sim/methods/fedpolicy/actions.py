"""What a controller may decide: the action spaces of FedPolicy, as takes and sends per parameter
group.

blocks      a ∈ {full, backbone, head}                               3 discrete actions, the paper's
layerwise   a ∈ the non-empty subsets of the G parameter groups         2^G − 1 discrete actions
mix         a ∈ [−1, 1]^G, take = (a + 1)/2                    init_g = θ_k,g + take_g (Θ_g − θ_k,g)
exchange      a ∈ {full, backbone, head}²            9 discrete actions: what is taken, what is sent
exchange_mix  a ∈ [−1, 1]^4, (a + 1)/2: take Φ, take Ψ, send Φ, send Ψ   sends weigh in the average

In the first three everything is sent. The last is of the same size for every model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.types import Array, Ctx, Env

BLOCKS = ("full", "backbone", "head")
MOST_GROUPS = 6  # 63 subsets; more actions than that would hardly be tried once in a run


class Actions(NamedTuple):
    """An action space. `size` actions, or `size` numbers per action if continuous."""

    name: str
    continuous: bool
    size: Callable  # (env) -> int
    # (env, action) -> [G]                                                            ONE client
    take: Callable
    # (env, action) -> [G], weights from 0 to 1                                        ONE client
    send: Callable
    log: Callable  # (env, actions [M, …], active [M], ctx [M]) -> dict of round diagnostics
    takes: int = 0  # how many numbers of a continuous action say what is taken; 0: all


def block_masks(env: Env) -> Array:
    """[3, G]: the groups sent down for full, backbone, head. The head is `model.head_group`."""
    groups = env.num_groups
    if groups < 2:
        raise UserError(
            f"model '{env.model.name}' has one parameter group, so there is no backbone and head to"
            " tell apart; allowed: a model with at least 2 groups"
        )
    head = jnp.array([name == env.model.head_group for name in env.model.groups])
    return jnp.stack([jnp.ones(groups), 1.0 - head, 1.0 * head])


def everything(env: Env, action: Array) -> Array:
    """[G] what is sent where the action does not say."""
    return jnp.ones(env.num_groups)


def normalised_entropy(counts: Array) -> Array:
    """H / log A of counts [A]: 0 if one action takes all, 1 if all are equally frequent.

    >>> [
    ...     abs(round(float(normalised_entropy(jnp.array(c))), 3))
    ...     for c in ([9, 0, 0], [5, 5, 0], [2, 2, 2], [0, 0, 0])
    ... ]
    [0.0, 0.631, 1.0, 0.0]
    """
    share = counts / jnp.maximum(counts.sum(), 1)
    return -jnp.where(
        share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0
    ).sum() / jnp.log(counts.shape[0])


def _counts(actions: Array, active: Array, size: int) -> Array:
    return jnp.zeros(size, jnp.int32).at[actions].add(active.astype(jnp.int32))


def _blocks() -> Actions:
    def log(env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        counts = _counts(actions, active, len(BLOCKS))
        return {f"action_{name}": counts[i] for i, name in enumerate(BLOCKS)} | {
            "action_entropy": normalised_entropy(counts)
        }

    return Actions(
        "blocks",
        False,
        lambda env: len(BLOCKS),
        lambda env, action: block_masks(env)[action],
        everything,
        log,
    )


def subset_masks(groups: int) -> Array:
    """[2^G − 1, G]: row a holds the binary digits of a + 1, the first group first.

    >>> subset_masks(2).astype(int).tolist()
    [[1, 0], [0, 1], [1, 1]]
    """
    index = jnp.arange(1, 2**groups)
    return (index[:, None] >> jnp.arange(groups) & 1).astype(float)


def _layerwise() -> Actions:
    def size(env: Env) -> int:
        if env.num_groups > MOST_GROUPS:
            raise UserError(
                f"fedpolicy.actions=layerwise has 2^G-1 actions and model '{env.model.name}' has"
                f" {env.num_groups} parameter groups; allowed: up to {MOST_GROUPS} groups (or"
                " actions=mix)"
            )
        return 2**env.num_groups - 1

    def log(env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        counts = _counts(actions, active, size(env))
        return {
            "action_full": counts[-1],
            "action_partial": counts.sum() - counts[-1],
            "action_entropy": normalised_entropy(counts),
        }

    return Actions(
        "layerwise",
        False,
        size,
        lambda env, action: subset_masks(env.num_groups)[action],
        everything,
        log,
    )


def _mix() -> Actions:
    def take(env: Env, action: Array) -> Array:
        return (jnp.clip(action, -1, 1) + 1) / 2

    def log(env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        shares = jax.vmap(lambda a: take(env, a))(actions)  # [M, G]
        mean = jnp.where(active[:, None], shares, 0).sum(0) / jnp.maximum(active.sum(), 1)
        return {f"mix_{name}": mean[g] for g, name in enumerate(env.model.groups)}

    return Actions("mix", True, lambda env: env.num_groups, take, everything, log)


def _exchange() -> Actions:
    def log(env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        counts = _counts(actions, active, len(BLOCKS) ** 2)
        pairs = counts.reshape(len(BLOCKS), len(BLOCKS))
        return (
            {f"action_{name}": pairs[i].sum() for i, name in enumerate(BLOCKS)}
            | {f"sent_{name}": pairs[:, i].sum() for i, name in enumerate(BLOCKS)}
            | {"action_entropy": normalised_entropy(counts)}
        )

    return Actions(
        "exchange",
        False,
        lambda env: len(BLOCKS) ** 2,
        lambda env, action: block_masks(env)[action // len(BLOCKS)],
        lambda env, action: block_masks(env)[action % len(BLOCKS)],
        log,
    )


PARTS = ("take_backbone", "take_head", "send_backbone", "send_head")  # of exchange_mix


def _exchange_mix() -> Actions:
    def weights(action: Array) -> Array:
        return (jnp.clip(action, -1, 1) + 1) / 2

    def per_group(env: Env, pair: Array) -> Array:
        """[G] from what holds for the backbone and for the head."""
        backbone, head = block_masks(env)[1:]
        return pair[0] * backbone + pair[1] * head

    def log(env: Env, actions: Array, active: Array, ctx: Ctx) -> dict[str, Array]:
        total = jnp.where(active[:, None], weights(actions), 0).sum(0)
        return dict(zip(PARTS, total / jnp.maximum(active.sum(), 1), strict=True))

    return Actions(
        "exchange_mix",
        True,
        lambda env: len(PARTS),
        lambda env, action: per_group(env, weights(action)[:2]),
        lambda env, action: per_group(env, weights(action)[2:]),
        log,
        2,
    )


ACTIONS: dict[str, Callable[[], Actions]] = {
    "blocks": _blocks,
    "layerwise": _layerwise,
    "mix": _mix,
    "exchange": _exchange,
    "exchange_mix": _exchange_mix,
}


@functools.cache
def oracle_agent(dtype: Any) -> Any:
    """The allowed action with the lowest entry of the observation, which holds every candidate's
    validation loss."""
    from agents.types import Agent, Info, usable_actions

    class Oracle(Agent):
        name = "oracle"

        def init(self, key: Array) -> tuple:
            return ()

        def act(
            self, state: Any, observation: Array, key: Array, available: Array | None = None
        ) -> tuple[Array, Info]:
            usable = usable_actions(available, observation.shape[0])
            best = jnp.argmin(
                jnp.where(jnp.isnan(observation) | ~usable, jnp.inf, observation)
            ).astype(jnp.int32)
            # no candidate has a finite loss
            best = jnp.where(usable[best], best, jnp.argmax(usable))
            sure = jax.nn.one_hot(best, observation.shape[0], dtype=dtype)
            return best, Info(jnp.zeros((), dtype), -observation[best], sure, usable)

        def update(self, state: Any, transitions: Any, key: Array) -> tuple[Any, dict]:
            return state, {}

    return Oracle(dtype=dtype)
