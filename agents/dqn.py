"""Double deep Q-learning."""

from __future__ import annotations

from typing import Any, NamedTuple

import distrax
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


class Learner(NamedTuple):
    online: Any  # S → A values
    target: Any  # a copy taken every `target_every` steps
    optimiser: Any
    steps: Array  # [] int32, gradient steps taken


class DQNState(NamedTuple):
    learner: Learner
    replay: Replay
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


def dqn(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64,),
    capacity: int = 10_000,
    batch: int = 64,
    gradient_steps: int = 10,
    target_every: int = 50,
    lr: Any = 0.05,
    max_grad_norm: Any = 1.0,
    gamma: Any = 0.99,
    epsilon_start: Any = 1.0,
    epsilon_end: Any = 0.1,
    horizon: Any = 105,
    delta: Any = 1.0,
    normalise: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """ε-greedy value learning with the double-DQN target.

        y = r + γ (1 − done) Q̄(S', argmax_a Q(S',a))         L = mean Huber_δ(Q(S,a) − y)
        ε falls linearly from `epsilon_start` to `epsilon_end` over `horizon` rounds (calls of `update`)

    Q̄ is copied from Q every `target_every` gradient steps; the replay schedule is that of SAC.
    Static: hidden, capacity, batch, gradient_steps, target_every, normalise, dtype. All others may be traced.

    >>> import numpy as np
    >>> agent = dqn(observation_size=2, num_actions=3, horizon=50)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> print(np.asarray(info.policy).round(2))       # round 0: ε = 1, every action equally likely
    [0.33 0.33 0.33]
    """
    check_sizes(
        observation_size=observation_size,
        num_actions=num_actions,
        hidden=hidden,
        capacity=capacity,
        batch=batch,
        gradient_steps=gradient_steps,
        target_every=target_every,
    )
    if batch > capacity:
        raise ValueError(f"batch {batch} can never be reached by a replay of capacity {capacity}")
    check_range(0, 1, gamma=gamma, epsilon_start=epsilon_start, epsilon_end=epsilon_end)
    check_range(1e-12, 1e9, horizon=horizon, delta=delta, lr=lr, max_grad_norm=max_grad_norm)
    gamma, epsilon_start, epsilon_end, horizon, delta = as_numbers(dtype, gamma, epsilon_start, epsilon_end, horizon, delta)
    init_net, apply = nets.mlp(hidden, num_actions, dtype)
    optimiser = nets.adam(lr, max_grad_norm, dtype)

    def epsilon_at(rounds: Array) -> Array:
        return epsilon_start + (epsilon_end - epsilon_start) * jnp.minimum(rounds / horizon, 1).astype(dtype)

    def init(key: Array) -> DQNState:
        online = init_net(key, jnp.zeros(observation_size, dtype))
        learner = Learner(online, jax.tree.map(jnp.copy, online), optimiser.init(online), jnp.zeros((), jnp.int32))
        return DQNState(
            learner,
            schedule.empty_experience(observation_size, num_actions, capacity, dtype),
            nets.no_statistics(observation_size, dtype) if normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(state: DQNState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        usable = usable_actions(available, num_actions)
        observation = schedule.see(state.statistics, observation, observation_size, dtype)
        q = nets.mask_logits(apply(state.learner.online, observation), usable)
        policy = distrax.Categorical(probs=nets.epsilon_greedy(q, usable, epsilon_at(state.rounds)))
        action, log_probability = policy.sample_and_log_prob(seed=key)
        return action, Info(log_probability, q.max(), policy.probs, usable)

    def step(learner: Learner, rows: schedule.Experience) -> tuple[Learner, dict[str, Array]]:
        next_online = apply(learner.online, rows.next_observation)
        next_target = apply(learner.target, rows.next_observation)
        target = jax.vmap(losses.double_q_target, (0, 0, 0, 0, None))(
            rows.reward, rows.done, next_online, next_target, gamma
        )

        def loss(online: Any) -> Array:
            q = apply(online, rows.observation)  # [batch, A]
            taken = jnp.take_along_axis(q, rows.action[:, None], -1)[:, 0]
            return losses.huber(taken - target, delta).mean()

        value, gradient = jax.value_and_grad(loss)(learner.online)
        online, state = nets.descend(optimiser, learner.online, gradient, learner.optimiser)
        steps = learner.steps + 1
        copied = jax.tree.map(lambda new, old: jnp.where(steps % target_every == 0, new, old), online, learner.target)
        return Learner(online, copied, state, steps), {"q": value}

    def update(state: DQNState, transitions: Transition, key: Array) -> tuple[DQNState, dict[str, Array]]:
        clean = clean_transitions(transitions, observation_size, num_actions, dtype)
        statistics = schedule.watch(state.statistics, clean)
        replay = schedule.remember(state.replay, clean)
        rows = schedule.recall(replay, statistics, key, (gradient_steps, batch))
        ready = clean.mask.any() & (replay.size >= batch)
        learner, values = schedule.many_steps_when(ready, step, state.learner, rows)
        values = {**values, "epsilon": epsilon_at(state.rounds)}
        return DQNState(learner, replay, statistics, state.rounds + 1), finite(values)

    return Agent("dqn", init, act, update)
