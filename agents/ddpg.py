"""Deep deterministic policy gradient, for continuous actions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents.replay_agent import Experience, replay_agent
from agents.types import Agent, Array, Info, check_sizes, numbers

ACTIONS = ("simplex", "box")


class Learner(NamedTuple):
    actor: Any  # S → A
    critic: Any  # S + A → 1
    target_actor: Any
    target_critic: Any
    actor_optimiser: Any
    critic_optimiser: Any
    steps: Array  # [] int32, gradient steps so far


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
    critic_steps: int = 0,
    action_scale: Any = 1.0,
    logit_penalty: Any = 0.0,
    optimizer: str = "adam",
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

    What keeps a softmax actor off the corners, where it has no gradient: `critic_steps` gradient steps are the critic's
    alone before the actor follows it; `action_scale` multiplies the actions that the critic reads, which are lost beside
    a wide observation otherwise; `logit_penalty` · mean (actor's outputs)² is added to L_μ. All off unless given.

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
    check_sizes(hidden=hidden, update_every=update_every)
    if actions not in ACTIONS:
        raise ValueError(f"unknown kind of actions {actions!r} (allowed: {', '.join(ACTIONS)})")
    gamma, tau = numbers(dtype, 0, 1, gamma=gamma, tau=tau)
    noise, action_scale, logit_penalty, _, _ = numbers(
        dtype,
        0,
        1e9,
        noise=noise,
        action_scale=action_scale,
        logit_penalty=logit_penalty,
        random_rounds=random_rounds,
        critic_steps=critic_steps,
    )
    init_actor, apply_actor = nets.mlp(hidden, action_size, dtype)
    init_critic, apply_critic = nets.mlp(hidden, 1, dtype)
    actor_optimiser = nets.optimiser(optimizer, lr, max_grad_norm, dtype)
    critic_optimiser = nets.optimiser(optimizer, lr if critic_lr is None else critic_lr, max_grad_norm, dtype)
    simplex = actions == "simplex"

    def mu(params: Any, observation: Array, available: Array) -> Array:
        """The noise-free action [..., A]."""
        raw = apply_actor(params, observation)
        if not simplex:
            return jnp.where(jnp.isfinite(raw), jnp.tanh(raw), 0)
        return jax.nn.softmax(nets.mask_logits(jnp.tanh(raw) if tanh_logits else raw, available))

    def pair(observation: Array, action: Array) -> Array:
        return jnp.concatenate([observation, action_scale * action], -1)

    def value(params: Any, observation: Array, action: Array) -> Array:
        return apply_critic(params, pair(observation, action))[..., 0]

    def init(key: Array) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        actor = init_actor(actor_key, jnp.zeros(observation_size, dtype))
        critic = init_critic(critic_key, jnp.zeros(observation_size + action_size, dtype))
        twins = jax.tree.map(jnp.copy, (actor, critic))
        return Learner(
            actor, critic, twins[0], twins[1], actor_optimiser.init(actor), critic_optimiser.init(critic), jnp.int32(0)
        )

    def on_simplex(weights: Array, fallback: Array) -> Array:
        """Clipped at 0 and renormalised; `fallback` if nothing positive is left."""
        weights = jnp.maximum(weights, 0)
        total = weights.sum()
        return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), fallback)

    def choose(learner: Learner, x: Array, usable: Array, rounds: Array, key: Array) -> tuple[Array, Info]:
        wanted = mu(learner.actor, x, usable)
        noise_key, uniform_key = jax.random.split(key)
        shaken = wanted + noise * jax.random.normal(noise_key, wanted.shape, dtype)
        drawn = jax.random.uniform(uniform_key, wanted.shape, dtype)
        if simplex:
            explored, blind = on_simplex(shaken * usable, wanted), on_simplex(drawn * usable, wanted)
        else:
            explored, blind = jnp.clip(shaken, -1, 1), 2 * drawn - 1
        action = jnp.where(rounds < random_rounds, blind, explored)
        return action, Info(jnp.zeros((), dtype), value(learner.critic, x, wanted), wanted, usable)

    def step(learner: Learner, rows: Experience) -> tuple[Learner, dict[str, Array]]:
        target = rows.reward
        if bootstrap:
            next_action = mu(learner.target_actor, rows.next_observation, rows.next_available)
            next_value = value(learner.target_critic, rows.next_observation, next_action)
            target = jax.vmap(losses.td_target, (0, 0, 0, None))(rows.reward, rows.done, next_value, gamma)

        def critic_loss(critic: Any) -> tuple[Array, Array]:
            error = value(critic, rows.observation, rows.action) - target
            return (error**2).mean(), jnp.abs(error).mean()

        (critic_value, error), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learner.critic)
        critic, critic_state = nets.descend(critic_optimiser, learner.critic, gradient, learner.critic_optimiser)

        def actor_loss(actor: Any) -> tuple[Array, Array]:
            worth = value(critic, rows.observation, mu(actor, rows.observation, rows.available)).mean()
            return logit_penalty * jnp.square(apply_actor(actor, rows.observation)).mean() - worth, -worth

        gradient, actor_value = jax.grad(actor_loss, has_aux=True)(learner.actor)
        moved = nets.descend(actor_optimiser, learner.actor, gradient, learner.actor_optimiser)
        ready = learner.steps >= critic_steps
        actor, actor_state = jax.tree.map(
            lambda new, old: jnp.where(ready, new, old), moved, (learner.actor, learner.actor_optimiser)
        )
        twins = optax.incremental_update((actor, critic), (learner.target_actor, learner.target_critic), tau)
        learner = Learner(actor, critic, twins[0], twins[1], actor_state, critic_state, learner.steps + 1)
        return learner, {"critic": critic_value, "actor": actor_value, "value_error": error}

    def report(learner: Learner, rows: Experience, mask: Array, rounds: Array) -> schedule.Losses:
        pairs = pair(rows.observation, rows.action)
        return {
            "live_policy": diagnostics.live_units(learner.actor, rows.observation, mask),
            "live_critic": diagnostics.live_units(learner.critic, pairs, mask),
        }

    def due(rounds: Array) -> Array:
        return (rounds > random_rounds) & (rounds % update_every == 0)

    memory: dict[str, Any] = dict(capacity=capacity, batch=batch, gradient_steps=gradient_steps, normalise=normalise)
    policy = lambda learner, x, usable, rounds: mu(learner.actor, x, usable)
    functions: dict[str, Any] = dict(init=init, choose=choose, step=step, policy=policy, report=report, due=due)
    kind: dict[str, Any] = dict(continuous=True, bootstrap=bootstrap, dtype=dtype)
    return replay_agent("ddpg", observation_size, action_size, **functions, **memory, **kind)
