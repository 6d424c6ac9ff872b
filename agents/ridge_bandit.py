"""Linear bandit over a grid of actions, in closed form: it leaves the default action only for a
clear gain."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import nets, schedule
from agents.node import Real, field
from agents.types import Agent, Array, Info, Transition, clean_observation, usable_actions


class Learner(NamedTuple):
    """Sums over the rows so far, of features φ [D] and rewards r, older rows counting less."""

    gram: Array  # [D, D] Σ φ φᵀ
    moment: Array  # [D] Σ φ r
    total: Array  # []  Σ r²
    rows: Array  # []  how many


class RidgeState(NamedTuple):
    learner: Learner
    rounds: Array  # [] int32, calls of update


class RidgeBandit(Agent):
    """Ridge regression of the reward on the context and on the parts of a joint action, added up.

        Q(x, a) = w·x + Σ_i u_i[a_i] + known(a)        (w, u) = (Σ φφᵀ + ridge·I)⁻¹ Σ φ r
        a*      = argmax_a  û_a − û_ref − z σ̂ ‖φ_a − φ_ref‖_{(Σφφᵀ + ridge·I)⁻¹} + known(a)

    ref is the largest free action: free are those whose known part is 0, and a joint action is the
    larger the higher the choices of its parts. It is left only for a gain that is sure, z standard
    errors of it; so where rewards say nothing, the largest free action is taken. ε-greedy, but only
    free actions are tried: ε_t = max(epsilon_end, epsilon_start · epsilon_decay^t).

    grid: sizes of the parts of a joint action, the last one varying fastest (none: one part).
    known: the last A numbers of an observation are what of the return follows from the action, e.g.
    minus its costs; the reward then is the rest. memory: what a round leaves of the sums before it.

    >>> agent = RidgeBandit(6, 4, grid=(2, 2), known=True, epsilon_start=0.5)
    >>> costs = jnp.append(jnp.zeros(2), jnp.array([0.0, -5.0, 0.0, -5.0]))
    >>> agent.act(agent.init(jax.random.key(0)), costs, jax.random.key(1))[1].policy.tolist()
    [0.25, 0.0, 0.75, 0.0]
    """

    name = "ridge_bandit"
    grid: tuple[int, ...] = field((), kw_only=True)
    known: bool = field(False, kw_only=True)
    z: Real = field(2.0, ge=0, le=1e6, kw_only=True)
    ridge: Real = field(1.0, gt=0, le=1e6, kw_only=True)
    memory: Real = field(1.0, ge=0, le=1, kw_only=True)
    epsilon_start: Real = field(0.3, ge=0, le=1, kw_only=True)
    epsilon_end: Real = field(0.0, ge=0, le=1, kw_only=True)
    epsilon_decay: float = field(0.95, ge=0, le=1, kw_only=True)

    def check(self) -> None:
        super().check()
        if self.grid and self.num_actions and math.prod(self.grid) != self.num_actions:
            raise ValueError(
                f"grid {self.grid} has {math.prod(self.grid)} actions, not {self.num_actions}"
            )
        if self.known and 0 < self.observation_size <= self.num_actions:
            raise ValueError(
                f"the last {self.num_actions} numbers of an observation are known values; it has"
                f" {self.observation_size}"
            )

    @property
    def parts(self) -> tuple[int, ...]:
        return self.grid or (self.num_actions,)

    def choices(self) -> Array:
        """[A, parts] the choice of each part in every action."""
        each = jnp.meshgrid(*(jnp.arange(size) for size in self.parts), indexing="ij")
        return jnp.stack([one.reshape(-1) for one in each], -1)

    def coded(self) -> Array:
        """[A, Σ sizes] every action as one-hot parts."""
        choices = self.choices()
        hot = [jax.nn.one_hot(choices[:, i], size) for i, size in enumerate(self.parts)]
        return jnp.concatenate(hot, -1).astype(self.dtype)

    def split(self, x: Array) -> tuple[Array, Array]:
        """(context, known values [..., A]) of observations [..., S]."""
        if not self.known:
            return x, jnp.zeros((*x.shape[:-1], self.num_actions), self.dtype)
        return x[..., : -self.num_actions], x[..., -self.num_actions :]

    def epsilon(self, rounds: Array) -> Array:
        now = self.epsilon_start * jnp.asarray(self.epsilon_decay, self.dtype) ** rounds
        return self.number(jnp.maximum(now, self.epsilon_end))

    # ---- what is learned -------------------------------------------------------------------------
    def init(self, key: Array) -> RidgeState:
        width = self.observation_size - (self.num_actions if self.known else 0) + sum(self.parts)
        nothing = self.number(0)
        sums = Learner(
            jnp.zeros((width, width), self.dtype), jnp.zeros(width, self.dtype), nothing, nothing
        )
        return RidgeState(sums, jnp.zeros((), jnp.int32))

    def fitted(self, learner: Learner) -> tuple[Array, Array, Array]:
        """(weights [D], inverse of the ridged Gram matrix [D, D], variance of the noise)."""
        width = learner.moment.shape[0]
        inverse = jnp.linalg.inv(
            learner.gram + self.number(self.ridge) * jnp.eye(width, dtype=self.dtype)
        )
        weights = inverse @ learner.moment
        rest = learner.total - weights @ learner.moment
        noise = jnp.maximum(rest, 0) / jnp.maximum(learner.rows - width, 1)
        return weights, inverse, jnp.where(learner.rows > width, noise, jnp.inf)

    # ---- what is done ----------------------------------------------------------------------------
    def worth(self, learner: Learner, known: Array, usable: Array) -> tuple[Array, Array]:
        """([A] how much better than the largest free action each one surely is, [A] free)."""
        free = usable & (known >= 0)
        free = jnp.where(
            free.any(), free, usable & (known >= jnp.where(usable, known, -jnp.inf).max())
        )
        sizes = jnp.maximum(jnp.asarray(self.parts) - 1, 1)
        large = (self.choices() / sizes).sum(-1)
        reference = jnp.argmax(jnp.where(free, large, -1))
        weights, inverse, noise = self.fitted(learner)
        coded = self.coded()
        differ, at = coded - coded[reference], weights.shape[0] - coded.shape[1]
        spread = jnp.einsum("ad,de,ae->a", differ, inverse[at:, at:], differ)
        unsure = self.number(self.z) * jnp.sqrt(jnp.maximum(noise * spread, 0))
        gain = differ @ weights[at:] - jnp.where(spread > 0, unsure, 0)
        return jnp.where(jnp.isfinite(gain), gain, -jnp.inf) + known - known[reference], free

    def policy(self, state: RidgeState, x: Array, usable: Array) -> Array:
        """[A] probabilities for ONE observation."""
        worth, free = self.worth(state.learner, self.split(x)[1], usable)
        epsilon = self.epsilon(state.rounds)
        # of equals the largest, which is the last
        last = self.num_actions - 1 - jnp.argmax(jnp.where(usable, worth, -jnp.inf)[::-1])
        best = jax.nn.one_hot(last, self.num_actions, dtype=self.dtype)
        return (epsilon * free / free.sum() + (1 - epsilon) * best).astype(self.dtype)

    def act(
        self, state: RidgeState, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        usable = usable_actions(available, self.num_actions)
        x = clean_observation(observation, self.observation_size, self.dtype)
        chosen = nets.categorical(probs=self.policy(state, x, usable))
        return schedule.sample(chosen, self.number(0), usable, key)

    def update(
        self, state: RidgeState, transitions: Transition, key: Array
    ) -> tuple[RidgeState, dict[str, Array]]:
        clean, old = self.learnable(transitions), state.learner
        there = clean.mask.astype(self.dtype)
        features = jnp.concatenate(
            [self.split(clean.observation)[0], self.coded()[clean.action]], -1
        )
        features, reward = features * there[:, None], clean.reward * there
        before, _, _ = self.fitted(old)
        keep = jnp.where(clean.mask.any(), self.number(self.memory), 1)
        new = Learner(
            keep * old.gram + features.T @ features,
            keep * old.moment + features.T @ reward,
            keep * old.total + reward @ reward,
            keep * old.rows + there.sum(),
        )
        sound = jnp.isfinite(new.gram).all() & jnp.isfinite(new.moment).all()
        new = jax.tree.map(lambda now, then: jnp.where(sound, now, then), new, old)
        error = (jnp.abs(reward - features @ before) * there).sum() / jnp.maximum(there.sum(), 1)
        return RidgeState(new, state.rounds + 1), self.diagnostics(state, clean, error)

    def diagnostics(self, state: RidgeState, clean: Transition, error: Array) -> dict[str, Array]:
        policy = jax.vmap(lambda x, may: self.policy(state, x, may))(
            clean.observation, clean.info.available
        )
        rows = clean.mask.astype(self.dtype)
        mean = lambda values: (values * rows).sum() / jnp.maximum(rows.sum(), 1)
        entropy: Any = -jax.scipy.special.xlogy(policy, policy).sum(-1)
        return {
            "value_error": error,
            "epsilon": self.epsilon(state.rounds),
            "entropy": mean(entropy) / jnp.log(self.number(max(self.num_actions, 2))),
        }
