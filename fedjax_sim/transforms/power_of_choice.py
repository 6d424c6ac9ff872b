"""Power-of-choice (Cho et al., 2020): clients with a large loss take part more often.

    d candidates are drawn without replacement, with chances n_k / Σ n;  the M of them with the
    largest loss take part

losses=last: what each reported when it last took part (rpow-d; who never has comes first).
losses=now: the mean loss of the common model on all training rows of every candidate (pow-d), which
costs d − M further downloads per round. d = M is a draw by data sizes. Wire: the method's; with
losses=now (d − M)/M models down and d/M floats up per participant.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.errors import UserError
from fedjax_sim.fields import field
from fedjax_sim.hooks import Around, Kind, Selects, Stats
from fedjax_sim.local.score import mean_loss
from fedjax_sim.plans import BITS_PER_PARAMETER, Wire
from fedjax_sim.transforms import register_transform
from fedjax_sim.transforms.base import Transform
from fedjax_sim.types import Array, Cohort, Env, Tree


class Selection(Transform, abstract=True):
    """A transform that says who takes part, and changes nothing else."""

    alters = False

    def ask(self, kind: type[Kind]) -> Kind | None:
        return self if kind is Selects else super().ask(kind)  # type: ignore[return-value]


def drawn(key: Array, chance: Array, few: int) -> Array:
    """[few] different numbers, drawn one after another with these chances [N]; 0: never before all
    others.

    >>> sorted(drawn(jax.random.key(0), jnp.array([0.0, 1.0, 1.0]), 2).tolist())
    [1, 2]
    """
    return lax.top_k(jnp.log(chance) + jax.random.gumbel(key, chance.shape), few)[1]


@register_transform("power_of_choice")
class PowerOfChoice(Selection):
    """Of some clients drawn, those with the largest loss take part."""

    candidates: int = field(0, ge=0, help="d, number of candidates (0: twice the participants)")
    losses: str = field(
        "last",
        choices=("last", "now"),
        help="losses as last reported, or computed now by every candidate",
    )

    def many(self, env: Env) -> int:
        """d."""
        if self.candidates and not env.cohort <= self.candidates <= env.population:
            raise UserError(
                f"power_of_choice.candidates={self.candidates} is not allowed; use {env.cohort}"
                f" (the participants) to {env.population}"
            )
        return self.candidates or min(2 * env.cohort, env.population)

    def begin_server(self, env: Env, net: Tree) -> Tree:
        self.many(env)
        return jnp.full(env.num_clients, jnp.inf, env.dtype)  # [N] loss

    def select(self, env: Env, server: Around, t: Array, key: Array, stats: Stats) -> Array:
        chance = jnp.where(stats.eligible, jnp.maximum(stats.size, 1), 0).astype(env.dtype)
        who = drawn(key, chance, self.many(env))  # [d]
        found = (
            server.mine[who]
            if self.losses == "last"
            else lax.map(lambda k: self.loss_of(env, server, k), who)
        )
        return who[lax.top_k(found, env.cohort)[1]]

    def loss_of(self, env: Env, server: Around, who: Array) -> Array:
        """Mean loss of the common model on ONE client's training rows."""
        net, fed = self.inner.global_model(env, server.inner), env.fed
        return mean_loss(env, net, fed.rows["train"][who], fed.size["train"][who])

    def step(self, env: Env, mine: Tree, old: Any, new: Any, cohort: Cohort) -> tuple[Tree, Any]:
        to = jnp.where(cohort.ok, cohort.ids, env.num_clients)  # out of range: not written
        return mine.at[to].set(cohort.losses.astype(mine.dtype), mode="drop"), new

    def check(self) -> None:
        super().check()
        if self.losses == "now" and not self.inner.has_global_model:
            raise UserError(
                f"power_of_choice.losses=now asks for a common model, and '{self.inner.name}' has"
                " none; use last"
            )

    def wire(self, env: Env, net: Tree) -> Wire:
        plain, more = self.inner.wire(env, net), self.many(env) - env.cohort
        if self.losses == "last":
            return plain
        down, up = (
            math.ceil(more * sum(plain.down) / env.cohort),
            math.ceil(self.many(env) * BITS_PER_PARAMETER / env.cohort),
        )
        return plain._replace(beside_down=plain.beside_down + down, beside_up=plain.beside_up + up)
