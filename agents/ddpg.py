"""Deep deterministic policy gradient, for continuous actions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import losses, nets, schedule
from agents.replay import Replay
from agents.types import (
    Agent,
    Array,
    Info,
    Transition,
    as_numbers,
    check_range,
    check_sizes,
    clean_transitions,
    finite,
    usable_actions,
)

ACTIONS = ("simplex", "box")


class Learner(NamedTuple):
    actor: Any  # S → A
    critic: Any  # S + A → 1
    target_actor: Any
    target_critic: Any
    actor_optimiser: Any
    critic_optimiser: Any


class DDPGState(NamedTuple):
    learner: Learner
    replay: Replay
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


def ddpg(
    observation_size: int,
    action_size: int,
    *,
    actions: str = "simplex",
    bootstrap: bool = False,
    hidden: tuple[int, ...] = (256, 256),
    capacity: int = 20_000,
    batch: int = 32,
    gradient_steps: int = 5,
    update_every: int = 1,
    random_rounds: int = 0,
    tanh_logits: bool = False,
    lr: Any = 1e-3,
    critic_lr: Any = None,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.99,
    tau: Any = 0.04,
    noise: Any = 0.03,
    normalise: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """A deterministic actor μ trained through a critic.

        y = r                                              (bootstrap=False: one-step episodes)
        y = r + γ (1 − done) Q̄(S', μ̄(S'))                  (bootstrap=True)
        L_Q = mean (Q(S,a) − y)²         L_μ = −mean Q(S, μ(S))         Q̄, μ̄ ← (1 − τ) Q̄, μ̄ + τ Q, μ

    actions="simplex": μ is a softmax; exploration adds N(0, noise²), clips at 0 and renormalises. An
    unavailable entry has weight 0. `tanh_logits` squashes the softmax's inputs into [−1, 1].
    actions="box": μ is a tanh; noise is added and clipped to [−1, 1]; availability is ignored.

    During the first `random_rounds` rounds actions are random (normalised uniform draws, or uniform in the
    box) and nothing is learned; later, every `update_every` rounds, `gradient_steps` steps are taken once
    `batch` transitions are stored. The default capacity holds every transition of the longest published run
    (11,000) at a fifth of the memory of the published 100,000 rows; without bootstrap the next observations
    are not stored at all.
    Static: the int, bool, str and tuple options and dtype. All other options may be traced.

    >>> agent = ddpg(observation_size=2, action_size=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> print(action.shape, round(float(action.sum()), 4))
    (3,) 1.0
    """
    check_sizes(
        observation_size=observation_size,
        action_size=action_size,
        hidden=hidden,
        capacity=capacity,
        batch=batch,
        gradient_steps=gradient_steps,
        update_every=update_every,
    )
    if batch > capacity:
        raise ValueError(f"batch {batch} can never be reached by a replay of capacity {capacity}")
    if actions not in ACTIONS:
        raise ValueError(f"unknown kind of actions {actions!r} (allowed: {', '.join(ACTIONS)})")
    check_range(0, 1, gamma=gamma, tau=tau)
    check_range(0, 1e9, noise=noise, random_rounds=random_rounds)
    check_range(1e-12, 1e6, lr=lr, max_grad_norm=max_grad_norm)
    critic_lr = lr if critic_lr is None else critic_lr
    gamma, tau, noise = as_numbers(dtype, gamma, tau, noise)
    init_actor, apply_actor = nets.mlp(hidden, action_size, dtype)
    init_critic, apply_critic = nets.mlp(hidden, 1, dtype)
    actor_optimiser = nets.adam(lr, max_grad_norm, dtype)
    critic_optimiser = nets.adam(critic_lr, max_grad_norm, dtype)
    simplex = actions == "simplex"

    def mu(params: Any, observation: Array, available: Array) -> Array:
        """The noise-free action [..., A]."""
        raw = apply_actor(params, observation)
        if not simplex:
            return jnp.where(jnp.isfinite(raw), jnp.tanh(raw), 0)
        return jax.nn.softmax(nets.mask_logits(jnp.tanh(raw) if tanh_logits else raw, available))

    def value(params: Any, observation: Array, action: Array) -> Array:
        return apply_critic(params, jnp.concatenate([observation, action], -1))[..., 0]

    def init(key: Array) -> DDPGState:
        actor_key, critic_key = jax.random.split(key)
        actor = init_actor(actor_key, jnp.zeros(observation_size, dtype))
        critic = init_critic(critic_key, jnp.zeros(observation_size + action_size, dtype))
        learner = Learner(
            actor,
            critic,
            jax.tree.map(jnp.copy, actor),
            jax.tree.map(jnp.copy, critic),
            actor_optimiser.init(actor),
            critic_optimiser.init(critic),
        )
        replay = schedule.empty_experience(
            observation_size, action_size, capacity, dtype, continuous=True, bootstrap=bootstrap
        )
        return DDPGState(
            learner, replay, nets.no_statistics(observation_size, dtype) if normalise else None, jnp.zeros((), jnp.int32)
        )

    def on_simplex(weights: Array, fallback: Array) -> Array:
        """Clipped at 0 and renormalised; `fallback` if nothing positive is left."""
        weights = jnp.maximum(weights, 0)
        total = weights.sum()
        return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), fallback)

    def act(state: DDPGState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        usable = usable_actions(available, action_size)
        observation = schedule.see(state.statistics, observation, observation_size, dtype)
        wanted = mu(state.learner.actor, observation, usable)
        noise_key, uniform_key = jax.random.split(key)
        shaken = wanted + noise * jax.random.normal(noise_key, wanted.shape, dtype)
        drawn = jax.random.uniform(uniform_key, wanted.shape, dtype)
        if simplex:
            explored, blind = on_simplex(shaken * usable, wanted), on_simplex(drawn * usable, wanted)
        else:
            explored, blind = jnp.clip(shaken, -1, 1), 2 * drawn - 1
        action = jnp.where(state.rounds < random_rounds, blind, explored)
        q = value(state.learner.critic, observation, wanted)
        return action, Info(jnp.zeros((), dtype), q, wanted, usable)

    def step(learner: Learner, rows: schedule.Experience) -> tuple[Learner, dict[str, Array]]:
        target = rows.reward
        if bootstrap:
            everything = jnp.ones(action_size, bool)  # what S' will allow is not known
            next_action = mu(learner.target_actor, rows.next_observation, everything)
            next_value = value(learner.target_critic, rows.next_observation, next_action)
            target = jax.vmap(losses.td_target, (0, 0, 0, None))(rows.reward, rows.done, next_value, gamma)

        def critic_loss(critic: Any) -> Array:
            return ((value(critic, rows.observation, rows.action) - target) ** 2).mean()

        critic_value, gradient = jax.value_and_grad(critic_loss)(learner.critic)
        critic, critic_state = nets.descend(critic_optimiser, learner.critic, gradient, learner.critic_optimiser)

        def actor_loss(actor: Any) -> Array:
            return -value(critic, rows.observation, mu(actor, rows.observation, rows.available)).mean()

        actor_value, gradient = jax.value_and_grad(actor_loss)(learner.actor)
        actor, actor_state = nets.descend(actor_optimiser, learner.actor, gradient, learner.actor_optimiser)
        return Learner(
            actor,
            critic,
            nets.polyak(learner.target_actor, actor, tau),
            nets.polyak(learner.target_critic, critic, tau),
            actor_state,
            critic_state,
        ), {"critic": critic_value, "actor": actor_value}

    def update(state: DDPGState, transitions: Transition, key: Array) -> tuple[DDPGState, dict[str, Array]]:
        clean = clean_transitions(transitions, observation_size, action_size, dtype, continuous=True)
        statistics = schedule.watch(state.statistics, clean)
        replay = schedule.remember(state.replay, clean)
        rows = schedule.recall(replay, statistics, key, (gradient_steps, batch))
        rounds = state.rounds + 1
        due = (rounds > random_rounds) & (rounds % update_every == 0)
        ready = clean.mask.any() & (replay.size >= batch) & due
        learner, values = schedule.many_steps_when(ready, step, state.learner, rows)
        return DDPGState(learner, replay, statistics, rounds), finite(values)

    return Agent("ddpg", init, act, update)
