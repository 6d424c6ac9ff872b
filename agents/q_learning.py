"""What DQN and the bandit share: one value per action, ε-greedy actions, a Huber loss."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents.node import Real, field
from agents.replay_agent import Experience, ReplayAgent
from agents.types import Array, Info


class Learner(NamedTuple):
    online: Any  # S → A values
    target: Any  # a copy taken every `target_every` steps; None without bootstrap
    optimiser: Any
    steps: Array  # [] int32, gradient steps taken
    units: Units  # of the networks' outputs


class Units(NamedTuple):
    """A network's output q stands for centre + scale · q."""

    centre: Array  # []
    scale: Array  # []


def in_units(params: Any, old: Units, new: Units) -> Any:
    """The same network with its outputs in new units: the last layer is rescaled (PopArt)."""
    last = f"Dense_{len(params['params']) - 1}"
    layer = params["params"][last]
    turned = {
        "kernel": layer["kernel"] * (old.scale / new.scale),
        "bias": (layer["bias"] * old.scale + old.centre - new.centre) / new.scale,
    }
    return {"params": {**params["params"], last: turned}}


class QAgent(ReplayAgent):
    """An ε-greedy agent with ε = `epsilon(rounds)`; it bootstraps if it has `gamma` and
    `target_every`.

    Targets are learned around their mean and, where they spread by more than 1, in units of their
    spread: the network starts at 0, and both the loss and the gradient are cut at 1, so that it
    would take long to reach rewards around −20.
    """

    delta: Real = field(1.0, ge=1e-12, le=1e9, kw_only=True)
    gamma: ClassVar[Any] = None
    target_every: ClassVar[Any] = None

    def epsilon(self, rounds: Array) -> Array:
        raise NotImplementedError

    @property
    def bootstraps(self) -> bool:
        return self.target_every is not None

    @property
    def network(self) -> tuple:
        """(init, apply) of Q."""
        return nets.mlp(self.hidden, self.num_actions, self.dtype)

    def start(self, key: Array) -> Learner:
        online = self.network[0](key, jnp.zeros(self.observation_size, self.dtype))
        target = jax.tree.map(jnp.copy, online) if self.bootstraps else None
        units = Units(self.number(0), self.number(1))
        return Learner(online, target, self.rule().init(online), jnp.zeros((), jnp.int32), units)

    def policy(self, learner: Learner, x: Array, usable: Array, rounds: Array) -> Array:
        return nets.epsilon_greedy(
            self.network[1](learner.online, x), usable, self.number(self.epsilon(rounds))
        )

    def choose(
        self, learner: Learner, x: Array, usable: Array, rounds: Array, key: Array
    ) -> tuple[Array, Info]:
        value = (
            learner.units.centre
            + learner.units.scale
            * nets.mask_logits(self.network[1](learner.online, x), usable).max()
        )
        return schedule.sample(
            nets.categorical(probs=self.policy(learner, x, usable, rounds)), value, usable, key
        )

    def goal(self, learner: Learner, rows: Experience) -> Array:
        """y [batch], in the units of the rewards."""
        if not self.bootstraps:
            return rows.reward
        apply = self.network[1]
        chooses, judges = (
            apply(params, rows.next_observation) for params in (learner.online, learner.target)
        )
        chooses = nets.mask_logits(chooses, rows.next_available)
        judges = learner.units.centre + learner.units.scale * judges
        targets = jax.vmap(losses.double_q_target, (0, 0, 0, 0, None))
        return targets(rows.reward, rows.done, chooses, judges, self.number(self.gamma))

    def measured(self, learner: Learner, rows: Experience) -> Learner:
        goals = jax.vmap(lambda batch: self.goal(learner, batch))(rows)
        old, new = learner.units, Units(goals.mean(), jnp.maximum(goals.std(), 1))
        sound = jnp.isfinite(new.centre) & jnp.isfinite(new.scale)
        new = jax.tree.map(lambda now, before: jnp.where(sound, now, before), new, old)
        # before the first step the networks know nothing that would have to be kept: they start at
        # the mean
        old = jax.tree.map(lambda now, before: jnp.where(learner.steps > 0, before, now), new, old)
        turn = lambda params: in_units(params, old, new)
        target = turn(learner.target) if self.bootstraps else None
        return learner._replace(online=turn(learner.online), target=target, units=new)

    def step(self, learner: Learner, rows: Experience) -> tuple[Learner, schedule.Losses]:
        delta, units = self.number(self.delta), learner.units
        goal = (self.goal(learner, rows) - units.centre) / units.scale

        def loss(online: Any) -> tuple[Array, Array]:
            q = self.network[1](online, rows.observation)  # [batch, A]
            taken = jnp.take_along_axis(q, rows.action[:, None], -1)[:, 0]
            return (
                optax.losses.huber_loss(taken, goal, delta=delta).mean(),
                jnp.abs(taken - goal).mean(),
            )

        (value, error), gradient = jax.value_and_grad(loss, has_aux=True)(learner.online)
        online, state = nets.descend(self.rule(), learner.online, gradient, learner.optimiser)
        steps = learner.steps + 1
        target = (
            optax.periodic_update(online, learner.target, steps, self.target_every)
            if self.bootstraps
            else None
        )
        return Learner(online, target, state, steps, units), {
            "q": value,
            "value_error": error * units.scale,
        }

    def report(
        self, learner: Learner, rows: Experience, mask: Array, rounds: Array
    ) -> schedule.Losses:
        live = diagnostics.live_units(learner.online, rows.observation, mask)
        return {"epsilon": self.number(self.epsilon(rounds)), "live_critic": live}
