"""Soft actor-critic for discrete actions."""

from __future__ import annotations

from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents.replay_agent import Experience, replay_agent
from agents.types import Agent, Array, Info, check_sizes, numbers

LOG_ALPHA_BOUNDS = (-10.0, 5.0)  # a policy that cannot reach its entropy target must not drive α to infinity


class Learner(NamedTuple):
    policy: Any  # S → A logits
    critics: Any  # two networks S → A, stacked on axis 0
    targets: Any  # their slowly following copies
    log_alpha: Array  # []
    policy_optimiser: Any
    critic_optimiser: Any
    alpha_optimiser: Any


def sac(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    capacity: int = 10_000,
    batch: int = 64,
    gradient_steps: int = 10,
    optimizer: str = "adam",
    lr: Any = 1e-3,
    alpha_lr: Any = None,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.9,
    tau: Any = 0.005,
    alpha: Any = 0.01,
    entropy_ratio: Any = 0.5,
    normalise: bool = True,
    dtype: Any = jnp.float32,
) -> Agent:
    """Maximum-entropy actor-critic; with discrete actions every expectation is an exact sum.

        V̄(S') = Σ_a π(a|S') [min_i Q̄_i(S',a) − α log π(a|S')]       y = r + γ (1 − done) V̄(S')
        L_Q = Σ_i mean (Q_i(S,a) − y)²                              Q̄ ← (1 − τ) Q̄ + τ Q
        L_π = mean Σ_a π(a|S) [α log π(a|S) − min_i Q_i(S,a)]
        L_α = −log α · mean (H̄ − H(π(·|S))),  H̄ = entropy_ratio · log A    (A: the available actions)

    Once `batch` transitions are stored, every round takes `gradient_steps` steps. Actions are sampled from π.
    Static: hidden, capacity, batch, gradient_steps, optimizer, normalise, dtype. All other options may be traced.

    >>> agent = sac(observation_size=2, num_actions=3)
    >>> state = agent.init(jax.random.key(0))
    >>> action, info = agent.act(state, jnp.zeros(2), jax.random.key(1))
    >>> info.policy.shape
    (3,)
    """
    check_sizes(hidden=hidden)
    gamma, tau, entropy_ratio = numbers(dtype, 0, 1, gamma=gamma, tau=tau, entropy_ratio=entropy_ratio)
    (alpha,) = numbers(dtype, 1e-12, 1e6, alpha=alpha)
    init_net, apply = nets.mlp(hidden, num_actions, dtype)
    optimiser = nets.optimiser(optimizer, lr, max_grad_norm, dtype)
    alpha_optimiser = nets.optimiser(optimizer, lr if alpha_lr is None else alpha_lr, max_grad_norm, dtype)
    apply_twins = jax.vmap(apply, in_axes=(0, None))  # (params, [..., S]) -> [2, ..., A]

    def init(key: Array) -> Learner:
        policy_key, critic_key = jax.random.split(key)
        example = jnp.zeros(observation_size, dtype)
        policy = init_net(policy_key, example)
        critics = jax.vmap(init_net, in_axes=(0, None))(jax.random.split(critic_key), example)
        states = optimiser.init(policy), optimiser.init(critics), alpha_optimiser.init(jnp.log(alpha))
        return Learner(policy, critics, jax.tree.map(jnp.copy, critics), jnp.log(alpha), *states)

    def choose(learner: Learner, x: Array, usable: Array, rounds: Array, key: Array) -> tuple[Array, Info]:
        logits = nets.mask_logits(apply(learner.policy, x), usable)
        value = losses.soft_value(logits, apply_twins(learner.critics, x).min(0), jnp.exp(learner.log_alpha))
        return schedule.sample(distrax.Categorical(logits=logits), value, usable, key)

    def step(learner: Learner, rows: Experience) -> tuple[Learner, dict[str, Array]]:
        alpha_now = jnp.exp(learner.log_alpha)
        next_logits = nets.mask_logits(apply(learner.policy, rows.next_observation), rows.next_available)
        next_q = apply_twins(learner.targets, rows.next_observation).min(0)  # [batch, A]
        next_value = jax.vmap(losses.soft_value, (0, 0, None))(next_logits, next_q, alpha_now)
        target = jax.vmap(losses.td_target, (0, 0, 0, None))(rows.reward, rows.done, next_value, gamma)

        def critic_loss(critics: Any) -> tuple[Array, Array]:
            q = apply_twins(critics, rows.observation)  # [2, batch, A]
            taken = jnp.take_along_axis(q, rows.action[None, :, None], -1)[..., 0]
            return ((taken - target) ** 2).mean(-1).sum(), jnp.abs(taken - target).mean()

        (critic_value, error), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learner.critics)
        critics, critic_optimiser = nets.descend(optimiser, learner.critics, gradient, learner.critic_optimiser)
        q = apply_twins(critics, rows.observation).min(0)

        def policy_loss(policy: Any) -> tuple[Array, Array]:
            logits = nets.mask_logits(apply(policy, rows.observation), rows.available)
            each = jax.vmap(losses.soft_policy_loss, (0, 0, None))(logits, q, alpha_now)
            return each.mean(), distrax.Categorical(logits=logits).entropy()

        (policy_value, entropy), gradient = jax.value_and_grad(policy_loss, has_aux=True)(learner.policy)
        policy, policy_optimiser = nets.descend(optimiser, learner.policy, gradient, learner.policy_optimiser)
        wanted = entropy_ratio * jnp.log(rows.available.sum(-1).astype(dtype))  # [batch]

        def alpha_loss(log_alpha: Array) -> Array:
            return jax.vmap(losses.temperature_loss, (None, 0, 0))(log_alpha, entropy, wanted).mean()

        alpha_value, gradient = jax.value_and_grad(alpha_loss)(learner.log_alpha)
        log_alpha, alpha_state = nets.descend(alpha_optimiser, learner.log_alpha, gradient, learner.alpha_optimiser)
        learner = Learner(
            policy,
            critics,
            optax.incremental_update(critics, learner.targets, tau),
            jnp.clip(log_alpha, *LOG_ALPHA_BOUNDS),
            policy_optimiser,
            critic_optimiser,
            alpha_state,
        )
        values = {"critic": critic_value, "policy": policy_value, "temperature_loss": alpha_value}
        return learner, values | {"value_error": error}

    def policy(learner: Learner, x: Array, usable: Array, rounds: Array) -> Array:
        return jax.nn.softmax(nets.mask_logits(apply(learner.policy, x), usable))

    def report(learner: Learner, rows: Experience, mask: Array, rounds: Array) -> schedule.Losses:
        critics = jax.vmap(diagnostics.live_units, (0, None, None))(learner.critics, rows.observation, mask)
        return {
            "temperature": jnp.exp(learner.log_alpha),
            "live_policy": diagnostics.live_units(learner.policy, rows.observation, mask),
            "live_critic": critics.min(),
        }

    memory: dict[str, Any] = dict(capacity=capacity, batch=batch, gradient_steps=gradient_steps, normalise=normalise)
    functions: dict[str, Any] = dict(init=init, choose=choose, step=step, policy=policy, report=report)
    return replay_agent("sac", observation_size, num_actions, **functions, **memory, dtype=dtype)
