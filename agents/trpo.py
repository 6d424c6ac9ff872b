"""Trust-region policy optimisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from agents import actor_critic, losses, nets, schedule
from agents.types import Agent, Array, Info, Transition, as_numbers, check_range, check_sizes, clean_transitions, finite


class Learner(NamedTuple):
    params: actor_critic.Params
    value_optimiser: Any


class TRPOState(NamedTuple):
    learner: Learner
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


def fisher_vector_product(kl: Callable[[Array], Array], params: Array, vector: Array) -> Array:
    """F v with F the Hessian of `kl` at `params` [P]: the Fisher matrix if kl(p) = KL(π_params ‖ π_p).

    >>> kl = lambda p: 0.5 * (jnp.array([2.0, 3.0]) * p**2).sum()
    >>> print(fisher_vector_product(kl, jnp.zeros(2), jnp.ones(2)))
    [2. 3.]
    """
    return jax.jvp(jax.grad(kl), (params,), (vector,))[1]


def conjugate_gradient(product: Callable[[Array], Array], rhs: Array, iterations: int) -> Array:
    """Solves product(x) = rhs for a symmetric positive definite product, in a fixed number of iterations.

    >>> x = conjugate_gradient(lambda x: jnp.array([2.0, 4.0]) * x, jnp.array([2.0, 2.0]), iterations=2)
    >>> [round(float(entry), 3) for entry in x]
    [1.0, 0.5]
    """

    def body(carry: Any, _: None) -> tuple[Any, None]:
        x, residual, direction, square = carry
        image = product(direction)
        curvature = direction @ image
        length = jnp.where(curvature > 0, square / jnp.where(curvature > 0, curvature, 1), 0)
        x, residual = x + length * direction, residual - length * image
        new_square = residual @ residual
        turn = jnp.where(square > 0, new_square / jnp.where(square > 0, square, 1), 0)
        return (x, residual, residual + turn * direction, new_square), None

    start = (jnp.zeros_like(rhs), rhs, rhs, rhs @ rhs)
    return jax.lax.scan(body, start, None, length=iterations)[0][0]


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
    """Parameters [P] after a natural-gradient step: the objective rose and kl ≤ max_kl, or nothing moved.

    x = (F + damping)⁻¹ g     step = √(2 max_kl / xᵀ(F + damping)x) · x, shrunk until both conditions hold
    """
    before, gradient = jax.value_and_grad(objective)(params)

    def product(v: Array) -> Array:
        return fisher_vector_product(kl, params, v) + damping * v

    direction = conjugate_gradient(product, gradient, iterations)
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


def trpo(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    cg_iterations: int = 10,
    backtracks: int = 10,
    value_steps: int = 5,
    max_kl: Any = 0.01,
    damping: Any = 0.1,
    shrink: Any = 0.8,
    lr: Any = 0.05,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.99,
    normalise: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """A natural-gradient step inside a KL ball, once per round on the round's transitions.

        maximise mean ρ Â   subject to   mean KL(π_old ‖ π) ≤ max_kl

    Conjugate gradient on Fisher-vector products gives the direction, a backtracking line search its length
    (see `trust_region_step`). The value network takes `value_steps` Adam steps on the targets of A2C; `lr`
    and `max_grad_norm` concern only the value network.
    Static: hidden, cg_iterations, backtracks, value_steps, normalise, dtype. All other options may be traced.

    >>> agent = trpo(observation_size=2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> 0 <= int(action) < 3
    True
    """
    check_sizes(
        observation_size=observation_size,
        num_actions=num_actions,
        hidden=hidden,
        cg_iterations=cg_iterations,
        backtracks=backtracks,
        value_steps=value_steps,
    )
    check_range(0, 1, gamma=gamma, shrink=shrink)
    check_range(1e-12, 1e6, max_kl=max_kl, damping=damping, lr=lr, max_grad_norm=max_grad_norm)
    gamma, max_kl, damping, shrink = as_numbers(dtype, gamma, max_kl, damping, shrink)
    networks = actor_critic.networks(observation_size, num_actions, hidden, dtype)
    optimiser = nets.adam(lr, max_grad_norm, dtype)

    def init(key: Array) -> TRPOState:
        params = networks.init(key)
        return TRPOState(
            Learner(params, optimiser.init(params.value)),
            nets.no_statistics(observation_size, dtype) if normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(state: TRPOState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        return actor_critic.act(
            networks,
            state.learner.params,
            state.statistics,
            observation,
            key,
            available,
            observation_size,
            num_actions,
            dtype,
        )

    def learn(learner: Learner, batch: actor_critic.OnPolicyBatch) -> tuple[Learner, dict[str, Array]]:
        target, advantage = actor_critic.targets_and_advantages(networks, learner.params.value, batch, gamma)
        start, unravel = ravel_pytree(learner.params.policy)
        old_log_probability, entropy, old_policy = actor_critic.evaluate(networks, learner.params.policy, batch)

        def objective(flat: Array) -> Array:
            log_probability, _, _ = actor_critic.evaluate(networks, unravel(flat), batch)
            return losses.masked_mean(
                jax.vmap(losses.surrogate)(log_probability, old_log_probability, advantage), batch.mask
            )

        def kl(flat: Array) -> Array:
            _, _, policy = actor_critic.evaluate(networks, unravel(flat), batch)
            return losses.masked_mean(old_policy.kl_divergence(policy), batch.mask)

        flat = trust_region_step(
            objective,
            kl,
            start,
            max_kl=max_kl,
            damping=damping,
            iterations=cg_iterations,
            backtracks=backtracks,
            shrink=shrink,
        )

        def value_step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], Array]:
            params, state = carry
            value, gradient = jax.value_and_grad(lambda p: actor_critic.value_loss(networks, p, batch, target))(params)
            return nets.descend(optimiser, params, gradient, state), value

        (value_params, state), values = jax.lax.scan(
            value_step, (learner.params.value, learner.value_optimiser), None, length=value_steps
        )
        learner = Learner(actor_critic.Params(unravel(flat), value_params), state)
        return learner, {
            "policy": objective(start) - objective(flat),
            "value": values.mean(),
            "kl": kl(flat),
            "entropy": losses.masked_mean(entropy, batch.mask),
        }

    def update(state: TRPOState, transitions: Transition, key: Array) -> tuple[TRPOState, dict[str, Array]]:
        clean = clean_transitions(transitions, observation_size, num_actions, dtype)
        statistics = schedule.watch(state.statistics, clean)
        batch = actor_critic.scaled(actor_critic.flatten(clean), statistics)
        learner, values = schedule.when(clean.mask.any(), lambda old: learn(old, batch), state.learner)
        return TRPOState(learner, statistics, state.rounds + 1), finite(values)

    return Agent("trpo", init, act, update)
