"""What the on-policy agents (A2C, PPO, TRPO) share: two networks, how they act, and the frame of an
update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents import replay as ring
from agents.node import Real, field
from agents.types import Agent, Array, Info, Transition, blank, finite, usable_actions

# the largest weight of a row: no single action of an older policy may dominate
MOST_IMPORTANCE = 10.0


class Params(NamedTuple):
    policy: Any  # S → A logits
    value: Any  # S → 1


class Learner(NamedTuple):
    params: Params
    optimiser: Any


class OnPolicyState(NamedTuple):
    learner: Learner
    # (row, its round) of the earlier rounds; None if only the newest round is used
    memory: ring.Replay | None
    statistics: nets.Statistics | None
    advantages: losses.Moments  # what they are standardised by
    rounds: Array  # [] int32, calls of update


class Networks(NamedTuple):
    """Pure functions of parameters and observations; the observations may have leading axes."""

    init: Callable[[Array], Params]
    # (params, [..., S], available [..., A])
    policy: Callable[[Any, Array, Array], nets.Categorical]
    value: Callable[[Any, Array], Array]  # (params, [..., S]) -> [...]


def networks(
    observation_size: int, num_actions: int, hidden: tuple[int, ...], dtype: Any
) -> Networks:
    init_policy, apply_policy = nets.mlp(hidden, num_actions, dtype)
    init_value, apply_value = nets.mlp(hidden, 1, dtype)

    def init(key: Array) -> Params:
        policy_key, value_key = jax.random.split(key)
        example = jnp.zeros(observation_size, dtype)
        return Params(init_policy(policy_key, example), init_value(value_key, example))

    def policy(params: Any, x: Array, available: Array) -> nets.Categorical:
        return nets.categorical(logits=nets.mask_logits(apply_policy(params, x), available))

    return Networks(init, policy, lambda params, x: apply_value(params, x)[..., 0])


def targets_and_errors(
    nets_: Networks, value_params: Any, batch: Transition, gamma: Array
) -> tuple[Array, Array]:
    """y = r + γ (1 − done) V(S') and y − V(S), the advantages before they are standardised: [B], no
    gradients.

    Each transition is a one-step sample: consecutive transitions of one actor may be many rounds
    apart.
    """
    next_value = nets_.value(value_params, batch.next_observation)
    target = jax.vmap(losses.td_target, (0, 0, 0, None))(
        batch.reward, batch.done, next_value, gamma
    )
    return target, losses.stop(target - nets_.value(value_params, batch.observation))


def value_loss(nets_: Networks, value_params: Any, batch: Transition, target: Array) -> Array:
    """mean (V(S) − y)² over the unmasked rows."""
    return losses.masked_mean(
        (nets_.value(value_params, batch.observation) - target) ** 2, batch.mask
    )


class OnPolicyAgent(Agent):
    """An agent that learns, once per round, from the transitions of the last `rounds` rounds.

    A subclass says `learn` and `start_optimiser`. `cohort` is the largest batch of one round: it
    sizes the memory of earlier rounds. Advantages are standardised with statistics over rounds:
    those of one round would remove what its rewards have in common. Observations are normalised as
    they were when the actions were chosen, and watched afterwards: with other numbers it would be
    another policy that learns. Rows of an older policy (`delayed`) count π(a|S) / π_old(a|S), if
    their `info` says by what chance they were chosen.
    """

    hidden: tuple[int, ...] = field((64,), kw_only=True)
    optimizer: str = field("adam", choices=tuple(nets.RULES), kw_only=True)
    lr: Real = field(1e-3, ge=1e-12, le=1e6, kw_only=True)
    max_grad_norm: Real = field(1.0, ge=1e-12, le=1e6, kw_only=True)
    gamma: Real = field(0.9, ge=0, le=1, kw_only=True)
    advantage_decay: Real = field(0.95, ge=0, le=1, kw_only=True)
    normalise: bool = field(True, kw_only=True)
    rounds: ClassVar[int] = 1
    cohort: ClassVar[int] = 1
    corrects: ClassVar[bool] = False  # whether its loss has the ratio of the policies in it already

    def learn(
        self, learner: Learner, batch: Transition, target: Array, advantage: Array
    ) -> tuple[Learner, schedule.Losses]:
        """The learner after batch [B], its targets [B] and advantages [B]; batch.mask says how much
        each row counts."""
        raise NotImplementedError

    def start_optimiser(self, params: Params) -> Any:
        return self.rule.init(params)

    @property
    def networks(self) -> Networks:
        return networks(self.observation_size, self.num_actions, self.hidden, self.dtype)

    @property
    def rule(self) -> optax.GradientTransformation:
        return nets.optimiser(self.optimizer, self.lr, self.max_grad_norm, self.dtype)

    @property
    def remembered(self) -> int:
        """Rows of earlier rounds."""
        return self.cohort * (self.rounds - 1)

    def init(self, key: Array) -> OnPolicyState:
        params, size = self.networks.init(key), self.observation_size
        row = (blank(size, self.num_actions, self.dtype), jnp.zeros((), jnp.int32))
        return OnPolicyState(
            Learner(params, self.start_optimiser(params)),
            ring.empty(row, self.remembered) if self.remembered else None,
            nets.no_statistics(size, self.dtype) if self.normalise else None,
            losses.no_moments(self.dtype),
            jnp.zeros((), jnp.int32),
        )

    def act(
        self, state: OnPolicyState, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        usable = usable_actions(available, self.num_actions)
        x = schedule.network_input(state.statistics, observation, self.observation_size, self.dtype)
        params, both = state.learner.params, self.networks
        return schedule.sample(
            both.policy(params.policy, x, usable), both.value(params.value, x), usable, key
        )

    def update(
        self, state: OnPolicyState, transitions: Transition, key: Array
    ) -> tuple[OnPolicyState, schedule.Losses]:
        fresh = self.learnable(transitions)
        batch, memory = fresh, state.memory
        if (
            memory is not None
        ):  # the fresh rows [B], then the remembered ones, of which only the recent are unmasked
            old, since = memory.rows
            recent = (jnp.arange(self.remembered) < memory.size) & (
                state.rounds - since < self.rounds
            )
            batch = jax.tree.map(
                lambda new, kept: jnp.concatenate([new, kept]), fresh, old._replace(mask=recent)
            )
            memory = ring.add(memory, (fresh, jnp.full(fresh.mask.shape, state.rounds)), fresh.mask)
        batch = schedule.scaled(batch, state.statistics)
        target, error = targets_and_errors(
            self.networks, state.learner.params.value, batch, self.number(self.gamma)
        )
        decay = self.number(self.advantage_decay)
        advantages = losses.follow(state.advantages, error[: len(fresh.mask)], fresh.mask, decay)
        advantage = losses.standardise(error, state.advantages, advantages)
        counts = batch.mask.astype(self.dtype)
        if transitions.info is not None and not self.corrects:
            counts = counts * self.importance(state.learner.params, batch)
        go = lambda old: self.learn(old, batch._replace(mask=counts), target, advantage)
        learner, values = schedule.when(fresh.mask.any(), go, state.learner)
        values |= {"value_error": losses.masked_mean(jnp.abs(error), batch.mask)} | self.report(
            learner.params, batch
        )
        statistics = schedule.update_statistics(state.statistics, fresh)
        return OnPolicyState(learner, memory, statistics, advantages, state.rounds + 1), finite(
            values
        )

    def importance(self, params: Params, batch: Transition) -> Array:
        """[B] π(a|S) / π_old(a|S); 1 for what the policy chose as it is."""
        policy = self.networks.policy(params.policy, batch.observation, batch.info.available)
        ahead = policy.log_prob(batch.action) - batch.info.log_probability
        return losses.stop(jnp.exp(jnp.minimum(ahead, jnp.log(self.number(MOST_IMPORTANCE)))))

    def report(self, params: Params, batch: Transition) -> schedule.Losses:
        x, usable, mask = batch.observation, batch.info.available, batch.mask
        chosen, free = (
            self.networks.policy(params.policy, x, a).probs for a in (usable, jnp.ones_like(usable))
        )
        return {
            "live_policy": diagnostics.live_units(params.policy, x, mask),
            "live_critic": diagnostics.live_units(params.value, x, mask),
            "entropy": diagnostics.entropy(chosen, usable, mask),
            "sensitivity": diagnostics.sensitivity(free, mask),
        }


class GradientAgent(OnPolicyAgent):
    """`epochs` steps on policy loss + value_weight · value loss − entropy_weight · H (A2C, PPO)."""

    value_weight: Real = field(0.5, ge=0, le=1e6, kw_only=True)
    entropy_weight: Real = field(0.01, ge=0, le=1e6, kw_only=True)
    epochs: ClassVar[int] = 1

    def policy_loss(self, new: Array, old: Array, advantage: Array) -> Array:
        """Of ONE row: new log π(a|S), old log π_old(a|S), advantage Â."""
        raise NotImplementedError

    def learn(
        self, learner: Learner, batch: Transition, target: Array, advantage: Array
    ) -> tuple[Learner, schedule.Losses]:
        both, rule = self.networks, self.rule

        def loss(params: Params) -> tuple[Array, schedule.Losses]:
            policy = both.policy(params.policy, batch.observation, batch.info.available)
            each = jax.vmap(self.policy_loss)(
                policy.log_prob(batch.action), batch.info.log_probability, advantage
            )
            values = {
                "policy": losses.masked_mean(each, batch.mask),
                "value": value_loss(both, params.value, batch, target),
            }
            entropy = losses.masked_mean(policy.entropy(), batch.mask)
            total = values["policy"] + self.number(self.value_weight) * values["value"]
            return total - self.number(self.entropy_weight) * entropy, values

        def epoch(learner: Learner, _: None) -> tuple[Learner, schedule.Losses]:
            (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(learner.params)
            return Learner(*nets.descend(rule, learner.params, gradient, learner.optimiser)), values

        return schedule.many_steps(epoch, learner, None, self.epochs)
