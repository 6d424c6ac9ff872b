"""The records `Agent`, `Transition` and `Info`, and the checks that every agent makes of its
input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp

from agents.node import Node, field

Array = jax.Array


class Info(NamedTuple):
    """What `act` returns beside the action of ONE observation; stacked to [B, ...] inside a
    `Transition`."""

    log_probability: Array  # []   log π(a|s) of the action taken (0 for continuous actions)
    value: Array  # []   the agent's estimate for this observation (V, max Q, or Q(s, μ(s)))
    policy: Array  # [A]  action probabilities; the noise-free action if actions are continuous
    available: Array  # [A]  bool, the actions that could be chosen


class Transition(NamedTuple):
    """A batch of transitions: every leaf has a leading axis [B]."""

    observation: Array  # [B, S]
    action: Array  # [B] int32 (discrete) or [B, A] float (continuous)
    reward: Array  # [B]
    next_observation: Array  # [B, S]
    done: Array  # [B] bool or float; 1 = nothing follows, so nothing is bootstrapped
    mask: Array  # [B] bool; False = this row (a dropped client) teaches nothing
    info: Any = None  # Info with leaves [B, ...]; None = every action was available
    next_available: Any = None  # [B, A] bool, what the next observation allows; None = every action
    actor: Any = None  # [B] int32, whose transition it is, from 0; only `delayed` asks


class Agent(Node):
    """A learning policy: hyper-parameters as fields, three pure functions; everything that changes
    is in its state.

    init:   key -> state (a typed pytree)
    act:    (state, observation [S], key, available=None) -> (action, Info), for ONE observation:
            vmap it.
            `available` [A] bool forbids actions. Forbidding all of them forbids none.
    update: (state, Transition, key) -> (state, losses), the work of one whole round. `losses` (and
    diagnostics:
            live units, entropy, sensitivity, value error) always has the same keys and is always
            finite. Rows that are masked, not finite, carry an impossible action, or were no choice
            (a single action was available) are ignored; if no row is left, nothing changes but the
            round counter (and ε, which follows it). A wrong shape raises an AssertionError when the
            function is traced.

    An agent is made with its hyper-parameters and `sized` when what it sees and decides is known;
    `agents.make` does both.
    """

    observation_size: int = field(0, repr=False)  # S
    num_actions: int = field(0, repr=False)  # A, or the width of a continuous action
    dtype: Any = field(jnp.float32, repr=False, kw_only=True)

    def sized(
        self: Self, observation_size: int, num_actions: int, dtype: Any = jnp.float32
    ) -> Self:
        """The same agent for observations [S] and A actions."""
        check_sizes(observation_size=observation_size, num_actions=num_actions)
        if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
            raise ValueError(f"dtype {jnp.dtype(dtype).name} needs jax_enable_x64")
        return dataclasses.replace(
            self, observation_size=observation_size, num_actions=num_actions, dtype=dtype
        )

    def check(self) -> None:
        check_sizes(
            **{name: value for name in SIZES if (value := getattr(self, name, None)) is not None}
        )

    def number(self, value: Any) -> Array:
        """A hyper-parameter in the agent's dtype, so that the state never changes its dtype."""
        return jnp.asarray(value, self.dtype)

    def learnable(self, batch: Transition) -> Transition:
        """The batch as `clean_transitions` leaves it; what was no choice has the mask False."""
        sizes = self.observation_size, self.num_actions, self.dtype
        clean = clean_transitions(batch, *sizes, continuous=getattr(self, "continuous", False))
        return clean._replace(mask=clean.mask & self.had_a_choice(clean.info.available))

    def had_a_choice(self, available: Array) -> Array:
        """[B] of available [B, A]. What follows a forced action says nothing about choosing, and
        may be unlike all else."""
        return available.sum(-1) > 1

    def init(self, key: Array) -> Any:
        raise NotImplementedError

    def act(
        self, state: Any, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        raise NotImplementedError

    def update(
        self, state: Any, transitions: Transition, key: Array
    ) -> tuple[Any, dict[str, Array]]:
        raise NotImplementedError


# fields that must be positive whole numbers
SIZES = (
    *("hidden", "capacity", "batch", "gradient_steps", "target_every", "update_every"),
    *("rounds", "cohort", "epochs", "cg_iterations", "backtracks", "value_steps"),
)


def check_sizes(**sizes: Any) -> None:
    """Static sizes must be positive whole numbers (or tuples of them)."""
    for name, value in sizes.items():
        for size in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{name} must be a positive whole number, or a tuple of them, got {value!r}"
                )


def usable_actions(available: Array | None, num_actions: int) -> Array:
    """The availability mask [A] of ONE observation; None or an all-False mask means every
    action."""
    if available is None:
        return jnp.ones(num_actions, bool)
    available = jnp.asarray(available, bool)
    chex.assert_shape(available, (num_actions,))
    return available | ~available.any()


def clean_observation(observation: Array, size: int, dtype: Any) -> Array:
    """ONE observation [S] in the agent's dtype; entries that are not finite become 0."""
    observation = jnp.asarray(observation, dtype)
    chex.assert_shape(observation, (size,))
    return jnp.where(jnp.isfinite(observation), observation, 0)


def clean_transitions(
    batch: Transition, size: int, num_actions: int, dtype: Any, *, continuous: bool = False
) -> Transition:
    """Checks shapes, casts, and zeroes every row that must not teach anything (its `mask` becomes
    False).

    A row is dropped if it is masked, if its observations, reward, done flag or action are not
    finite, or if its discrete action is not in 0..A-1. The result always has a full `Info` and
    `next_available`.
    """
    rows = batch.reward.shape[0] if jnp.ndim(batch.reward) == 1 else None
    chex.assert_shape((batch.observation, batch.next_observation), (rows, size))
    chex.assert_shape((batch.reward, batch.done, batch.mask), (rows,))
    chex.assert_shape(batch.action, (rows, num_actions) if continuous else (rows,))
    action = jnp.asarray(batch.action, dtype if continuous else jnp.int32)
    valid = jnp.asarray(batch.mask, bool)
    if continuous:
        valid &= jnp.isfinite(action).all(-1)
    else:
        valid &= (action >= 0) & (action < num_actions)
    observation = jnp.asarray(batch.observation, dtype)
    next_observation = jnp.asarray(batch.next_observation, dtype)
    reward, done = jnp.asarray(batch.reward, dtype), jnp.asarray(batch.done, dtype)
    valid &= jnp.isfinite(observation).all(-1) & jnp.isfinite(next_observation).all(-1)
    valid &= jnp.isfinite(reward) & jnp.isfinite(done)

    info, valid = clean_info(batch.info, valid, num_actions, dtype)
    following = batch.next_available
    if following is None:
        following = jnp.ones((rows, num_actions), bool)
    chex.assert_shape(following, (rows, num_actions))
    return Transition(
        keep(valid, observation),
        keep(valid, action),
        keep(valid, reward),
        keep(valid, next_observation),
        keep(valid, done),
        valid,
        info,
        usable_rows(following, num_actions),
    )


def keep(valid: Array, x: Array) -> Array:
    """x [B, ...] with zeros where `valid` [B] is False."""
    return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def usable_rows(available: Array, num_actions: int) -> Array:
    """`usable_actions` of every row of available [B, A]."""
    return jax.vmap(lambda a: usable_actions(a, num_actions))(jnp.asarray(available, bool))


def clean_info(info: Info | None, valid: Array, num_actions: int, dtype: Any) -> tuple[Info, Array]:
    """(a full `Info` [B, ...], the rows [B] that are still valid with it)."""
    rows = valid.shape[0]
    if info is None:
        zeros, everything = jnp.zeros(rows, dtype), jnp.ones((rows, num_actions), bool)
        return Info(zeros, zeros, jnp.zeros((rows, num_actions), dtype), everything), valid
    chex.assert_shape((info.policy, info.available), (rows, num_actions))
    chex.assert_shape((info.log_probability, info.value), (rows,))
    valid &= jnp.isfinite(info.log_probability)
    clean = Info(
        keep(valid, jnp.asarray(info.log_probability, dtype)),
        keep(valid, jnp.asarray(info.value, dtype)),
        keep(valid, jnp.asarray(info.policy, dtype)),
        usable_rows(info.available, num_actions),
    )
    return clean, valid


def blank(size: int, num_actions: int, dtype: Any, continuous: bool = False) -> Transition:
    """ONE transition full of zeros, in the shapes and types that `clean_transitions` yields."""
    x, scalar, each = jnp.zeros(size, dtype), jnp.zeros((), dtype), jnp.zeros(num_actions, dtype)
    action = each if continuous else jnp.zeros((), jnp.int32)
    usable = jnp.zeros(num_actions, bool)
    return Transition(
        x,
        action,
        scalar,
        x,
        scalar,
        jnp.zeros((), bool),
        Info(scalar, scalar, each, usable),
        usable,
    )


def finite(losses: dict[str, Array]) -> dict[str, Array]:
    """Replaces a loss that overflowed by 0, so that a log never carries a NaN."""
    return {
        name: jnp.where(jnp.isfinite(loss), loss, jnp.zeros_like(loss))
        for name, loss in losses.items()
    }


def join_action(parts: Sequence[Array], sizes: Sequence[int]) -> Array:
    """The flat index of a joint discrete action; the last part varies fastest.

    >>> int(join_action((1, 4), sizes=(6, 6)))
    10
    """
    index = jnp.zeros((), jnp.int32)
    for part, size in zip(parts, sizes, strict=True):
        index = index * size + jnp.asarray(part, jnp.int32)
    return index


def split_action(index: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
    """The parts of a joint discrete action, the inverse of `join_action`.

    >>> [int(part) for part in split_action(10, sizes=(6, 6))]
    [1, 4]
    """
    parts = []
    index = jnp.asarray(index, jnp.int32)
    for size in reversed(sizes):
        parts.append(index % size)
        index = index // size
    return tuple(reversed(parts))
