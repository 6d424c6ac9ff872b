"""What DQN and the bandit share: one value per action, ε-greedy actions, a Huber loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import optax

from agents import diagnostics, losses, nets, schedule
from agents.replay_agent import Experience, replay_agent
from agents.types import Agent, Array, Info, check_sizes, numbers


class Learner(NamedTuple):
    online: Any  # S → A values
    target: Any  # a copy taken every `target_every` steps; None without bootstrap
    optimiser: Any
    steps: Array  # [] int32, gradient steps taken


def q_agent(
    name: str,
    observation_size: int,
    num_actions: int,
    *,
    gamma: Any,
    target_every: int | None,
    epsilon: Callable[[Array], Array],
    hidden: tuple[int, ...],
    optimizer: str,
    lr: Any,
    max_grad_norm: Any,
    delta: Any,
    dtype: Any,
    **replay: Any,
) -> Agent:
    """An ε-greedy agent with ε = epsilon(rounds); it bootstraps if it is given `gamma` and `target_every`."""
    check_sizes(hidden=hidden)
    (delta,) = numbers(dtype, 1e-12, 1e9, delta=delta)
    bootstrap = gamma is not None
    (gamma,) = numbers(dtype, 0, 1, gamma=gamma if bootstrap else 0)
    init_net, apply = nets.mlp(hidden, num_actions, dtype)
    optimiser = nets.optimiser(optimizer, lr, max_grad_norm, dtype)

    def init(key: Array) -> Learner:
        online = init_net(key, jnp.zeros(observation_size, dtype))
        target = jax.tree.map(jnp.copy, online) if bootstrap else None
        return Learner(online, target, optimiser.init(online), jnp.zeros((), jnp.int32))

    def policy(learner: Learner, x: Array, usable: Array, rounds: Array) -> Array:
        return nets.epsilon_greedy(apply(learner.online, x), usable, jnp.asarray(epsilon(rounds), dtype))

    def choose(learner: Learner, x: Array, usable: Array, rounds: Array, key: Array) -> tuple[Array, Info]:
        value = nets.mask_logits(apply(learner.online, x), usable).max()
        return schedule.sample(distrax.Categorical(probs=policy(learner, x, usable, rounds)), value, usable, key)

    def step(learner: Learner, rows: Experience) -> tuple[Learner, schedule.Losses]:
        goal = rows.reward
        if bootstrap:
            chooses, judges = (apply(params, rows.next_observation) for params in (learner.online, learner.target))
            chooses = nets.mask_logits(chooses, rows.next_available)
            goal = jax.vmap(losses.double_q_target, (0, 0, 0, 0, None))(rows.reward, rows.done, chooses, judges, gamma)

        def loss(online: Any) -> tuple[Array, Array]:
            q = apply(online, rows.observation)  # [batch, A]
            taken = jnp.take_along_axis(q, rows.action[:, None], -1)[:, 0]
            return optax.losses.huber_loss(taken, goal, delta=delta).mean(), jnp.abs(taken - goal).mean()

        (value, error), gradient = jax.value_and_grad(loss, has_aux=True)(learner.online)
        online, state = nets.descend(optimiser, learner.online, gradient, learner.optimiser)
        steps = learner.steps + 1
        target = optax.periodic_update(online, learner.target, steps, target_every) if bootstrap else None
        return Learner(online, target, state, steps), {"q": value, "value_error": error}

    def report(learner: Learner, rows: Experience, mask: Array, rounds: Array) -> schedule.Losses:
        live = diagnostics.live_units(learner.online, rows.observation, mask)
        return {"epsilon": jnp.asarray(epsilon(rounds), dtype), "live_critic": live}

    functions: dict[str, Any] = dict(init=init, choose=choose, step=step, policy=policy, report=report)
    return replay_agent(name, observation_size, num_actions, **functions, bootstrap=bootstrap, dtype=dtype, **replay)
