"""Who takes part in a round, who fails to report, who is slow. Everything is a function of (seed,
round) alone."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Int

from fedjax_sim.errors import UserError
from fedjax_sim.types import Array, Count, Key, Scalar

MANY = 1024  # clients from which a small cohort is drawn without shuffling them all


@dataclasses.dataclass(frozen=True)
class Participation:
    """low..high clients of the `seen` ones each round; dropout: chance to fail; slow: (chance,
    least work)."""

    low: int
    high: int
    seen: tuple[int, ...]  # clients that may be sampled (the others are kept for evaluation)
    dropout: float = 0.0
    # a straggler manages a uniform share in [least, 1) of its epochs
    slow: tuple[float, float] = (0.0, 1.0)
    schedule: tuple[
        tuple[int, ...], ...
    ] = ()  # fixed cohorts (an availability trace), taken in turn, instead of draws

    def sample(
        self, key: Key, t: Count | int
    ) -> tuple[Int[Array, " participants"], Bool[Array, " participants"]]:
        """(ids, takes part): uniform without replacement; the size is uniform in
        {low..high}."""
        if self.schedule:
            ids = jnp.asarray(np.asarray(self.schedule, np.int32))[t % len(self.schedule)]
            return ids, jnp.ones(ids.shape, bool)
        who, size = jax.random.split(key)
        seen = jnp.asarray(np.asarray(self.seen, np.int32))
        if len(self.seen) >= MANY and self.high * 8 <= len(self.seen):
            ids = seen[sample_distinct(who, self.high, len(self.seen))]
        else:
            ids = jax.random.permutation(who, seen)[: self.high]
        number = jax.random.randint(size, (), self.low, self.high + 1, jnp.int32)
        return ids, jnp.arange(self.high) < number

    def eligible(self, clients: int) -> Bool[Array, " clients"]:
        """May take part."""
        return jnp.zeros(clients, bool).at[jnp.asarray(np.asarray(self.seen, np.int32))].set(True)

    def reports(
        self, key: Key, ids: Int[Array, " participants"], dropout: Scalar | None = None
    ) -> Bool[Array, " participants"]:
        """Whether it does not fail in this round. Keyed by client, not by place in the cohort."""
        draw = jax.vmap(
            lambda i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32)
        )(ids)
        return draw >= (self.dropout if dropout is None else dropout)

    def share_of_work(
        self, key: Key, ids: Int[Array, " participants"]
    ) -> Float[Array, " participants"]:
        """In (0, 1]: the share of its local epochs that each client manages."""
        chance, least = self.slow
        if chance <= 0:
            return jnp.ones(ids.shape)
        draw = jax.vmap(
            lambda i: jax.random.uniform(jax.random.fold_in(key, i), (2,), jnp.float32)
        )(ids)
        return jnp.where(draw[:, 0] < chance, least + (1 - least) * draw[:, 1], 1.0)


class Padded(NamedTuple):
    """`number` of the first `clients` clients each round, both of them arrays []: for a federation
    that is padded with clients who never take part. Everybody reports.

    The draws are those of `Participation` for that many clients (fewer than MANY).

    >>> plain = Participation(3, 3, tuple(range(7))).sample(jax.random.key(1), 0)[0]
    >>> padded = Padded(jnp.int32(7), jnp.int32(3), places=20, high=5).sample(jax.random.key(1), 0)
    >>> padded[0][:3].tolist() == plain.tolist(), padded[1].tolist()
    (True, [True, True, True, False, False])
    """

    clients: Count
    number: Count
    places: int  # clients, the padding with them
    high: int  # the most participants of any federation
    dropout: float = 0.0
    slow: tuple[float, float] = (0.0, 1.0)
    schedule: tuple = ()

    def sample(
        self, key: Key, t: Count | int
    ) -> tuple[Int[Array, " participants"], Bool[Array, " participants"]]:
        """As `Participation.sample`: the padding comes last in the shuffle of everybody."""
        who, _ = jax.random.split(key)
        _, shuffle = jax.random.split(who)
        everybody = jnp.arange(self.places, dtype=jnp.int32)
        noise = jax.random.bits(shuffle, (self.places,))
        noise = jnp.where(everybody < self.clients, noise, jnp.uint32(0xFFFFFFFF))
        ids = lax.sort((noise, everybody), num_keys=1)[1][: self.high]
        return ids, jnp.arange(self.high) < self.number

    def eligible(self, clients: int) -> Bool[Array, " clients"]:
        """No padding."""
        return jnp.arange(clients) < self.clients

    def reports(
        self, key: Key, ids: Int[Array, " participants"], dropout: Scalar | None = None
    ) -> Bool[Array, " participants"]:
        """Everybody."""
        return jnp.ones(ids.shape, bool)

    def share_of_work(
        self, key: Key, ids: Int[Array, " participants"]
    ) -> Float[Array, " participants"]:
        """All of it."""
        return jnp.ones(ids.shape)


def sample_distinct(key: Key, few: int, many: int) -> Int[Array, " few"]:
    """[few] different numbers below `many`, uniformly: the first steps of a shuffle whose untouched
    places are not stored.

    >>> ids = sample_distinct(jax.random.key(0), 5, 10_000)
    >>> len(set(ids.tolist())), bool((ids < 10_000).all())
    (5, True)
    """
    step = jnp.arange(few, dtype=jnp.int32)
    # step i: places i and other[i] ≥ i change their numbers
    other = jax.random.randint(key, (few,), step, many, jnp.int32)

    def latest(place: Int[Array, " few"]) -> Int[Array, " few"]:
        """[few] the last step before step i that put something into place[i], −1 if none did."""
        return jnp.where((other == place[:, None]) & (step < step[:, None]), step, -1).max(1)

    # what step s puts into place other[s] is the number at place s, which an earlier step may have
    # put there: to the first of such a chain by doubling, not one step after another
    origin = jnp.where(latest(step) >= 0, latest(step), step)
    for _ in range(few.bit_length()):
        origin = origin[origin]
    before = latest(other)
    return jnp.where(before >= 0, origin[before], other)


def cohort_size(
    asked: float | tuple[float, float] | str, clients: int, seen: int
) -> tuple[int, int]:
    """A fraction, a number of clients, a pair of either, or text n/N -> (low, high) participants
    among `seen` clients.

    Numbers up to 1 are fractions, so 1 is everybody; larger ones count clients.

    >>> cohort_size(0.1, 100, 100), cohort_size((0.5, 1), 20, 20), cohort_size("10/50", 50, 50)
    ((10, 10), (10, 20), (10, 10))
    >>> cohort_size(10, 100, 100), cohort_size((5, 20), 100, 100), cohort_size(1, 100, 100)
    ((10, 10), (5, 20), (100, 100))
    """
    if isinstance(asked, str):
        n, total = (_part(part, asked) for part in asked.split("/", 1))
        if total != clients:
            raise UserError(
                f"participation '{asked}' is of {total:g} clients, but there are {clients}; use"
                f" n/{clients}"
            )
        if not 1 <= n <= seen or n != int(n):
            raise UserError(
                f"participation '{asked}' asks for {n:g} clients per round; allowed: 1 to {seen}"
            )
        return int(n), int(n)
    parts = (asked,) if isinstance(asked, int | float) else tuple(asked)
    fraction = lambda r: max(1, math.ceil(r * seen - 1e-9))
    allowed = [0 < r <= 1 or (1 < r <= seen and r == int(r)) for r in parts]
    ends = [fraction(r) if r <= 1 else int(r) for r in parts] if all(allowed) else []
    if not all(allowed) or ends != sorted(ends):
        raise UserError(
            f"participation '{':'.join(f'{r:g}' for r in parts)}' is not allowed: use a fraction in"
            f" (0, 1], a number of clients from 2 to {seen}, a range low:high of two such numbers,"
            f" or n/{clients}"
        )
    return ends[0], ends[-1]


def _part(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"participation '{whole}' cannot be read: '{text}' is not a number; use n/N such as"
            " 10/50"
        ) from None


def unseen_clients(amount: float, clients: int, data_seed: int) -> tuple[int, ...]:
    """Clients kept out of training: a fraction (< 1) or a number (>= 1), drawn with the data
    seed."""
    if amount >= 1 and amount != int(amount):
        raise UserError(
            f"unseen {amount:g} is not allowed; use a fraction below 1 or a whole number of clients"
        )
    number = math.ceil(amount * clients - 1e-9) if amount < 1 else int(amount)
    if amount < 0 or number >= clients:
        raise UserError(
            f"unseen {amount:g} leaves no client to train; allowed: 0 to {clients - 1} of {clients}"
        )
    rng = np.random.default_rng([data_seed, 0x5EE])
    return tuple(sorted(rng.choice(clients, number, replace=False).tolist()))
