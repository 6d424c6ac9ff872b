"""Trust-region policy optimisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg

from agents import actor_critic, losses, nets, schedule
from agents.actor_critic import Learner, OnPolicyAgent, Params
from agents.node import Real, field
from agents.types import Array, Transition


def fisher_vector_product(kl: Callable[[Array], Array], params: Array, vector: Array) -> Array:
    """F v with F the Hessian of `kl` at `params` [P]: the Fisher matrix if kl(p) = KL(π_params ‖
    π_p).

    >>> kl = lambda p: 0.5 * (jnp.array([2.0, 3.0]) * p**2).sum()
    >>> print(fisher_vector_product(kl, jnp.zeros(2), jnp.ones(2)))
    [2. 3.]
    """
    return jax.jvp(jax.grad(kl), (params,), (vector,))[1]


def trust_region_step(
    objective: Callable[[Array], Array],
    kl: Callable[[Array], Array],
    params: Array,
    *,
    max_kl: Any,
    damping: Any,
    iterations: int,
    backtracks: int,
    shrink: Any,
) -> Array:
    """Parameters [P] after a natural-gradient step: the objective rose and kl ≤ max_kl, or nothing
    moved.

    x = (F + damping)⁻¹ g     step = √(2 max_kl / xᵀ(F + damping)x) · x, shrunk until both
                              conditions hold
    """
    before, gradient = jax.value_and_grad(objective)(params)

    def product(v: Array) -> Array:
        return fisher_vector_product(kl, params, v) + damping * v

    direction, _ = cg(product, gradient, maxiter=iterations)
    curvature = direction @ product(direction)
    full = jnp.sqrt(2 * max_kl / jnp.where(curvature > 0, curvature, 1)) * direction

    def accepted(candidate: Array) -> Array:
        # comparisons with NaN are False, so a step that is not finite is never accepted
        return (kl(candidate) <= max_kl) & (objective(candidate) > before)

    def searching(carry: tuple[Array, Array, Array]) -> Array:
        tries, _, found = carry
        return ~found & (tries < backtracks)

    def shorten(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, _, _ = carry
        candidate = params + full * shrink ** (tries + 1).astype(params.dtype)
        return tries + 1, candidate, accepted(candidate)

    first = params + full
    start = (jnp.zeros((), jnp.int32), first, accepted(first))
    _, candidate, found = jax.lax.while_loop(searching, shorten, start)
    return jnp.where(found & (curvature > 0), candidate, params)


class TRPO(OnPolicyAgent):
    """A natural-gradient step inside a KL ball, once per round on the round's transitions.

        maximise mean ρ Â   subject to   mean KL(π_old ‖ π) ≤ max_kl

    Conjugate gradient on Fisher-vector products gives the direction, a backtracking line search its
    length (see `trust_region_step`). The value network takes `value_steps` Adam steps on the
    targets of A2C; `lr` and `max_grad_norm` concern only the value network.

    >>> agent = TRPO(observation_size=2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> 0 <= int(action) < 3
    True
    """

    name = "trpo"
    cg_iterations: int = field(10, kw_only=True)
    backtracks: int = field(10, kw_only=True)
    value_steps: int = field(5, kw_only=True)
    max_kl: Real = field(0.01, ge=1e-12, le=1e6, kw_only=True)
    damping: Real = field(0.1, ge=1e-12, le=1e6, kw_only=True)
    shrink: Real = field(0.8, ge=0, le=1, kw_only=True)

    def start_optimiser(self, params: Params) -> Any:
        return self.rule.init(params.value)

    @property
    def region(self) -> dict[str, Any]:
        """How a step is bounded, see `trust_region_step`."""
        numbers = {
            name: self.number(getattr(self, name)) for name in ("max_kl", "damping", "shrink")
        }
        return numbers | dict(iterations=self.cg_iterations, backtracks=self.backtracks)

    def learn(
        self, learner: Learner, batch: Transition, target: Array, advantage: Array
    ) -> tuple[Learner, schedule.Losses]:
        both, rule = self.networks, self.rule
        start, unravel = ravel_pytree(learner.params.policy)
        policy_at = lambda flat: both.policy(unravel(flat), batch.observation, batch.info.available)
        old = policy_at(start)
        old_log_probability = old.log_prob(batch.action)

        def objective(flat: Array) -> Array:
            log_probability = policy_at(flat).log_prob(batch.action)
            gains = jax.vmap(losses.surrogate)(log_probability, old_log_probability, advantage)
            return losses.masked_mean(gains, batch.mask)

        def kl(flat: Array) -> Array:
            return losses.masked_mean(old.kl_divergence(policy_at(flat)), batch.mask)

        def value_step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], schedule.Losses]:
            params, state = carry
            value, gradient = jax.value_and_grad(
                lambda p: actor_critic.value_loss(both, p, batch, target)
            )(params)
            return nets.descend(rule, params, gradient, state), {"value": value}

        flat = trust_region_step(objective, kl, start, **self.region)
        value_carry = learner.params.value, learner.optimiser
        (value_params, state), values = schedule.many_steps(
            value_step, value_carry, None, self.value_steps
        )
        values |= {"policy": objective(start) - objective(flat), "kl": kl(flat)}
        return Learner(Params(unravel(flat), value_params), state), values
