"""Deep deterministic policy gradient, for continuous actions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents.node import Real, field
from agents.replay_agent import Experience, ReplayAgent
from agents.types import Array, Info

ACTIONS = ("simplex", "box")


class Learner(NamedTuple):
    actor: Any  # S → A
    critic: Any  # S + A → 1
    target_actor: Any
    target_critic: Any
    actor_optimiser: Any
    critic_optimiser: Any
    steps: Array  # [] int32, gradient steps so far


class DDPG(ReplayAgent):
    """A deterministic actor μ trained through a critic.

        y = r                                              (bootstrap=False: one-step episodes)
        y = r + γ (1 − done) Q̄(S', μ̄(S'))                  (bootstrap=True)
        L_Q = mean (Q(S,a) − y)²         L_μ = −mean Q(S, μ(S))     Q̄, μ̄ ← (1 − τ) Q̄, μ̄ + τ Q, μ

    actions="simplex": μ is a softmax; exploration adds N(0, noise²), clips at 0 and renormalises.
    An unavailable entry has weight 0. `tanh_logits` squashes the softmax's inputs into [−1, 1].
    actions="box": μ is a tanh; noise is added and clipped to [−1, 1]; availability is ignored.

    What keeps a softmax actor off the corners, where it has no gradient: `critic_steps` gradient
    steps are the critic's alone before the actor follows it; `action_scale` multiplies the actions
    that the critic reads, which are lost beside a wide observation otherwise; `logit_penalty` ·
    mean (actor's outputs)² is added to L_μ. All off unless given.

    During the first `random_rounds` rounds actions are random (normalised uniform draws, or uniform
    in the box) and nothing is learned; later, every `update_every` rounds, `gradient_steps` steps
    are taken once `batch` transitions are stored. The default capacity holds every transition of
    the longest published run (11,000) at a fifth of the memory of the published 100,000 rows;
    without bootstrap the next observations are not stored at all.

    >>> agent = DDPG(observation_size=2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> print(action.shape, round(float(action.sum()), 4))
    (3,) 1.0
    """

    name = "ddpg"
    continuous = True
    actions: str = field("simplex", choices=ACTIONS, kw_only=True)
    bootstrap: bool = field(False, kw_only=True)
    hidden: tuple[int, ...] = field((256, 256), kw_only=True)
    capacity: int = field(20_000, kw_only=True)
    batch: int = field(32, kw_only=True)
    gradient_steps: int = field(5, kw_only=True)
    update_every: int = field(1, kw_only=True)
    random_rounds: int = field(0, ge=0, le=1e9, kw_only=True)
    tanh_logits: bool = field(False, kw_only=True)
    critic_steps: int = field(0, ge=0, le=1e9, kw_only=True)
    action_scale: Real = field(1.0, ge=0, le=1e9, kw_only=True)
    logit_penalty: Real = field(0.0, ge=0, le=1e9, kw_only=True)
    critic_lr: Real | None = field(None, ge=1e-12, le=1e6, help="None: lr", kw_only=True)
    gamma: Real = field(0.99, ge=0, le=1, kw_only=True)
    tau: Real = field(0.04, ge=0, le=1, kw_only=True)
    noise: Real = field(0.03, ge=0, le=1e9, kw_only=True)
    normalise: bool = field(False, kw_only=True)

    @property
    def bootstraps(self) -> bool:
        return self.bootstrap

    @property
    def actor(self) -> tuple:
        """(init, apply) of the network S → A."""
        return nets.mlp(self.hidden, self.num_actions, self.dtype)

    @property
    def critic(self) -> tuple:
        """(init, apply) of the network S + A → 1."""
        return nets.mlp(self.hidden, 1, self.dtype)

    def mu(self, params: Any, observation: Array, available: Array) -> Array:
        """The noise-free action [..., A]."""
        raw = self.actor[1](params, observation)
        if self.actions == "box":
            return jnp.where(jnp.isfinite(raw), jnp.tanh(raw), 0)
        return jax.nn.softmax(
            nets.mask_logits(jnp.tanh(raw) if self.tanh_logits else raw, available)
        )

    def had_a_choice(self, available: Array) -> Array:
        return (
            jnp.ones(available.shape[:-1], bool)
            if self.actions == "box"
            else super().had_a_choice(available)
        )

    def pair(self, observation: Array, action: Array) -> Array:
        return jnp.concatenate([observation, self.number(self.action_scale) * action], -1)

    def value(self, params: Any, observation: Array, action: Array) -> Array:
        return self.critic[1](params, self.pair(observation, action))[..., 0]

    def start(self, key: Array) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        actor = self.actor[0](actor_key, jnp.zeros(self.observation_size, self.dtype))
        critic = self.critic[0](
            critic_key, jnp.zeros(self.observation_size + self.num_actions, self.dtype)
        )
        twins = jax.tree.map(jnp.copy, (actor, critic))
        states = self.rule().init(actor), self.rule(self.critic_lr).init(critic)
        return Learner(actor, critic, twins[0], twins[1], *states, jnp.int32(0))

    def choose(
        self, learner: Learner, x: Array, usable: Array, rounds: Array, key: Array
    ) -> tuple[Array, Info]:
        wanted = self.mu(learner.actor, x, usable)
        noise_key, uniform_key = jax.random.split(key)
        shaken = wanted + self.number(self.noise) * jax.random.normal(
            noise_key, wanted.shape, self.dtype
        )
        drawn = jax.random.uniform(uniform_key, wanted.shape, self.dtype)
        if self.actions == "simplex":
            explored, blind = (
                on_simplex(shaken * usable, wanted),
                on_simplex(drawn * usable, wanted),
            )
        else:
            explored, blind = jnp.clip(shaken, -1, 1), 2 * drawn - 1
        action = jnp.where(rounds < self.random_rounds, blind, explored)
        return action, Info(
            jnp.zeros((), self.dtype), self.value(learner.critic, x, wanted), wanted, usable
        )

    def target(self, learner: Learner, rows: Experience) -> Array:
        """y [batch]."""
        if not self.bootstrap:
            return rows.reward
        next_action = self.mu(learner.target_actor, rows.next_observation, rows.next_available)
        next_value = self.value(learner.target_critic, rows.next_observation, next_action)
        return jax.vmap(losses.td_target, (0, 0, 0, None))(
            rows.reward, rows.done, next_value, self.number(self.gamma)
        )

    def step(self, learner: Learner, rows: Experience) -> tuple[Learner, dict[str, Array]]:
        target = self.target(learner, rows)

        def critic_loss(critic: Any) -> tuple[Array, Array]:
            error = self.value(critic, rows.observation, rows.action) - target
            return (error**2).mean(), jnp.abs(error).mean()

        (critic_value, error), gradient = jax.value_and_grad(critic_loss, has_aux=True)(
            learner.critic
        )
        rule = self.rule(self.critic_lr)
        critic, critic_state = nets.descend(
            rule, learner.critic, gradient, learner.critic_optimiser
        )

        def actor_loss(actor: Any) -> tuple[Array, Array]:
            worth = self.value(
                critic, rows.observation, self.mu(actor, rows.observation, rows.available)
            ).mean()
            penalty = (
                self.number(self.logit_penalty)
                * jnp.square(self.actor[1](actor, rows.observation)).mean()
            )
            return penalty - worth, -worth

        gradient, actor_value = jax.grad(actor_loss, has_aux=True)(learner.actor)
        moved = nets.descend(self.rule(), learner.actor, gradient, learner.actor_optimiser)
        ready = learner.steps >= self.critic_steps
        actor, actor_state = jax.tree.map(
            lambda new, old: jnp.where(ready, new, old),
            moved,
            (learner.actor, learner.actor_optimiser),
        )
        old = (learner.target_actor, learner.target_critic)
        twins = optax.incremental_update((actor, critic), old, self.number(self.tau))
        learner = Learner(
            actor, critic, twins[0], twins[1], actor_state, critic_state, learner.steps + 1
        )
        return learner, {"critic": critic_value, "actor": actor_value, "value_error": error}

    def policy(self, learner: Learner, x: Array, usable: Array, rounds: Array) -> Array:
        return self.mu(learner.actor, x, usable)

    def report(
        self, learner: Learner, rows: Experience, mask: Array, rounds: Array
    ) -> schedule.Losses:
        pairs = self.pair(rows.observation, rows.action)
        return {
            "live_policy": diagnostics.live_units(learner.actor, rows.observation, mask),
            "live_critic": diagnostics.live_units(learner.critic, pairs, mask),
        }

    def due(self, rounds: Array) -> Array:
        return (rounds > self.random_rounds) & (rounds % self.update_every == 0)


def on_simplex(weights: Array, fallback: Array) -> Array:
    """Clipped at 0 and renormalised; `fallback` if nothing positive is left."""
    weights = jnp.maximum(weights, 0)
    total = weights.sum()
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), fallback)
