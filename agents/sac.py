"""Soft actor-critic for discrete actions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents.node import Real, field
from agents.replay_agent import Experience, ReplayAgent
from agents.types import Array, Info

# a policy that cannot reach its entropy target must not drive α to infinity
LOG_ALPHA_BOUNDS = (-10.0, 5.0)


class Learner(NamedTuple):
    policy: Any  # S → A logits
    critics: Any  # two networks S → A, stacked on axis 0
    targets: Any  # their slowly following copies
    log_alpha: Array  # []
    policy_optimiser: Any
    critic_optimiser: Any
    alpha_optimiser: Any


class SAC(ReplayAgent):
    """Maximum-entropy actor-critic; with discrete actions every expectation is an exact sum.

        V̄(S') = Σ_a π(a|S') [min_i Q̄_i(S',a) − α log π(a|S')]       y = r + γ (1 − done) V̄(S')
        L_Q = Σ_i mean (Q_i(S,a) − y)²                              Q̄ ← (1 − τ) Q̄ + τ Q
        L_π = mean Σ_a π(a|S) [α log π(a|S) − min_i Q_i(S,a)]
        L_α = −log α · mean (H̄ − H(π(·|S))),   H̄ = entropy_ratio · log |available actions|

    Once `batch` transitions are stored, every round takes `gradient_steps` steps. Actions are
    sampled from π.

    >>> agent = SAC(observation_size=2, num_actions=3)
    >>> state = agent.init(jax.random.key(0))
    >>> action, info = agent.act(state, jnp.zeros(2), jax.random.key(1))
    >>> info.policy.shape
    (3,)
    """

    name = "sac"
    alpha_lr: Real | None = field(
        None, ge=1e-12, le=1e6, help="of the temperature; None: lr", kw_only=True
    )
    gamma: Real = field(0.9, ge=0, le=1, kw_only=True)
    tau: Real = field(0.005, ge=0, le=1, kw_only=True)
    alpha: Real = field(0.01, ge=1e-12, le=1e6, kw_only=True)
    entropy_ratio: Real = field(0.5, ge=0, le=1, kw_only=True)

    @property
    def network(self) -> tuple:
        """(init, apply) of the policy, and of each critic."""
        return nets.mlp(self.hidden, self.num_actions, self.dtype)

    def twins(self, params: Any, x: Array) -> Array:
        """Values [2, ..., A] of both critics."""
        return jax.vmap(self.network[1], in_axes=(0, None))(params, x)

    def logits(self, params: Any, x: Array, usable: Array) -> Array:
        return nets.mask_logits(self.network[1](params, x), usable)

    def start(self, key: Array) -> Learner:
        policy_key, critic_key = jax.random.split(key)
        example, init_net = jnp.zeros(self.observation_size, self.dtype), self.network[0]
        policy = init_net(policy_key, example)
        critics = jax.vmap(init_net, in_axes=(0, None))(jax.random.split(critic_key), example)
        start = jnp.log(self.number(self.alpha))
        states = (
            self.rule().init(policy),
            self.rule().init(critics),
            self.rule(self.alpha_lr).init(start),
        )
        return Learner(policy, critics, jax.tree.map(jnp.copy, critics), start, *states)

    def choose(
        self, learner: Learner, x: Array, usable: Array, rounds: Array, key: Array
    ) -> tuple[Array, Info]:
        logits = self.logits(learner.policy, x, usable)
        value = losses.soft_value(
            logits, self.twins(learner.critics, x).min(0), jnp.exp(learner.log_alpha)
        )
        return schedule.sample(nets.categorical(logits=logits), value, usable, key)

    def target(self, learner: Learner, rows: Experience) -> Array:
        """y [batch]."""
        next_logits = self.logits(learner.policy, rows.next_observation, rows.next_available)
        next_q = self.twins(learner.targets, rows.next_observation).min(0)  # [batch, A]
        next_value = jax.vmap(losses.soft_value, (0, 0, None))(
            next_logits, next_q, jnp.exp(learner.log_alpha)
        )
        return jax.vmap(losses.td_target, (0, 0, 0, None))(
            rows.reward, rows.done, next_value, self.number(self.gamma)
        )

    def step(self, learner: Learner, rows: Experience) -> tuple[Learner, dict[str, Array]]:
        alpha_now, rule, target = (
            jnp.exp(learner.log_alpha),
            self.rule(),
            self.target(learner, rows),
        )

        def critic_loss(critics: Any) -> tuple[Array, Array]:
            q = self.twins(critics, rows.observation)  # [2, batch, A]
            taken = jnp.take_along_axis(q, rows.action[None, :, None], -1)[..., 0]
            return ((taken - target) ** 2).mean(-1).sum(), jnp.abs(taken - target).mean()

        (critic_value, error), gradient = jax.value_and_grad(critic_loss, has_aux=True)(
            learner.critics
        )
        critics, critic_optimiser = nets.descend(
            rule, learner.critics, gradient, learner.critic_optimiser
        )
        q = self.twins(critics, rows.observation).min(0)

        def policy_loss(policy: Any) -> tuple[Array, Array]:
            logits = self.logits(policy, rows.observation, rows.available)
            each = jax.vmap(losses.soft_policy_loss, (0, 0, None))(logits, q, alpha_now)
            return each.mean(), nets.categorical(logits=logits).entropy()

        (policy_value, entropy), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
            learner.policy
        )
        policy, policy_optimiser = nets.descend(
            rule, learner.policy, gradient, learner.policy_optimiser
        )
        # [batch]
        wanted = self.number(self.entropy_ratio) * jnp.log(
            rows.available.sum(-1).astype(self.dtype)
        )

        def alpha_loss(log_alpha: Array) -> Array:
            return jax.vmap(losses.temperature_loss, (None, 0, 0))(
                log_alpha, entropy, wanted
            ).mean()

        alpha_value, gradient = jax.value_and_grad(alpha_loss)(learner.log_alpha)
        slow = self.rule(self.alpha_lr)
        log_alpha, alpha_state = nets.descend(
            slow, learner.log_alpha, gradient, learner.alpha_optimiser
        )
        learner = Learner(
            policy,
            critics,
            optax.incremental_update(critics, learner.targets, self.number(self.tau)),
            jnp.clip(log_alpha, *LOG_ALPHA_BOUNDS),
            policy_optimiser,
            critic_optimiser,
            alpha_state,
        )
        values = {"critic": critic_value, "policy": policy_value, "temperature_loss": alpha_value}
        return learner, values | {"value_error": error}

    def policy(self, learner: Learner, x: Array, usable: Array, rounds: Array) -> Array:
        return jax.nn.softmax(self.logits(learner.policy, x, usable))

    def report(
        self, learner: Learner, rows: Experience, mask: Array, rounds: Array
    ) -> schedule.Losses:
        critics = jax.vmap(diagnostics.live_units, (0, None, None))(
            learner.critics, rows.observation, mask
        )
        return {
            "temperature": jnp.exp(learner.log_alpha),
            "live_policy": diagnostics.live_units(learner.policy, rows.observation, mask),
            "live_critic": critics.min(),
        }
