"""Neural contextual bandit."""

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
    q: Any  # S → A values
    optimiser: Any


class QBanditState(NamedTuple):
    learner: Learner
    replay: Replay
    statistics: nets.Statistics | None
    rounds: Array  # [] int32, calls of update


def q_bandit(
    observation_size: int,
    num_actions: int,
    *,
    hidden: tuple[int, ...] = (64, 64),
    capacity: int = 1_000,
    batch: int = 32,
    gradient_steps: int = 10,
    lr: Any = 1e-3,
    max_grad_norm: Any = 1.0,
    epsilon_start: Any = 1.0,
    epsilon_end: Any = 0.05,
    epsilon_decay: Any = 0.97,
    delta: Any = 1.0,
    normalise: bool = False,
    dtype: Any = jnp.float32,
) -> Agent:
    """ε-greedy regression of the immediate reward: no bootstrap, no discount.

        L = mean Huber_δ(Q(s,a) − r)           ε_t = max(epsilon_end, epsilon_start · epsilon_decay^t)

    A joint discrete action is one flat index, see `agents.join_action` and `agents.split_action`.
    Static: hidden, capacity, batch, gradient_steps, normalise, dtype. All other options may be traced.

    >>> agent = q_bandit(observation_size=13, num_actions=6 * 6)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(13), jax.random.key(1))
    >>> info.policy.shape
    (36,)
    """
    check_sizes(
        observation_size=observation_size,
        num_actions=num_actions,
        hidden=hidden,
        capacity=capacity,
        batch=batch,
        gradient_steps=gradient_steps,
    )
    if batch > capacity:
        raise ValueError(f"batch {batch} can never be reached by a replay of capacity {capacity}")
    check_range(0, 1, epsilon_start=epsilon_start, epsilon_end=epsilon_end, epsilon_decay=epsilon_decay)
    check_range(1e-12, 1e9, delta=delta, lr=lr, max_grad_norm=max_grad_norm)
    epsilon_start, epsilon_end, epsilon_decay, delta = as_numbers(dtype, epsilon_start, epsilon_end, epsilon_decay, delta)
    init_net, apply = nets.mlp(hidden, num_actions, dtype)
    optimiser = nets.adam(lr, max_grad_norm, dtype)

    def epsilon_at(rounds: Array) -> Array:
        return jnp.maximum(epsilon_end, epsilon_start * epsilon_decay ** rounds.astype(dtype))

    def init(key: Array) -> QBanditState:
        q = init_net(key, jnp.zeros(observation_size, dtype))
        replay = schedule.empty_experience(observation_size, num_actions, capacity, dtype, bootstrap=False)
        return QBanditState(
            Learner(q, optimiser.init(q)),
            replay,
            nets.no_statistics(observation_size, dtype) if normalise else None,
            jnp.zeros((), jnp.int32),
        )

    def act(state: QBanditState, observation: Array, key: Array, available: Array | None = None) -> tuple[Array, Info]:
        usable = usable_actions(available, num_actions)
        observation = schedule.see(state.statistics, observation, observation_size, dtype)
        q = nets.mask_logits(apply(state.learner.q, observation), usable)
        policy = distrax.Categorical(probs=nets.epsilon_greedy(q, usable, epsilon_at(state.rounds)))
        action, log_probability = policy.sample_and_log_prob(seed=key)
        return action, Info(log_probability, q.max(), policy.probs, usable)

    def step(learner: Learner, rows: schedule.Experience) -> tuple[Learner, dict[str, Array]]:
        def loss(q_params: Any) -> Array:
            q = apply(q_params, rows.observation)  # [batch, A]
            taken = jnp.take_along_axis(q, rows.action[:, None], -1)[:, 0]
            return losses.huber(taken - rows.reward, delta).mean()

        value, gradient = jax.value_and_grad(loss)(learner.q)
        return Learner(*nets.descend(optimiser, learner.q, gradient, learner.optimiser)), {"q": value}

    def update(state: QBanditState, transitions: Transition, key: Array) -> tuple[QBanditState, dict[str, Array]]:
        clean = clean_transitions(transitions, observation_size, num_actions, dtype)
        statistics = schedule.watch(state.statistics, clean)
        replay = schedule.remember(state.replay, clean)
        rows = schedule.recall(replay, statistics, key, (gradient_steps, batch))
        ready = clean.mask.any() & (replay.size >= batch)
        learner, values = schedule.many_steps_when(ready, step, state.learner, rows)
        values = {**values, "epsilon": epsilon_at(state.rounds)}
        return QBanditState(learner, replay, statistics, state.rounds + 1), finite(values)

    return Agent("q_bandit", init, act, update)
