"""Trains an agent on gymnax's CartPole-v1: an environment that has nothing to do with federated
learning.

python -m agents.examples.cartpole [--agents ppo dqn] [--seeds 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnax
import jax
import jax.numpy as jnp

import agents

# 4 numbers observed, 2 actions, reward 1 per step, at most 500 steps
ENV, PARAMS = gymnax.make("CartPole-v1")
# name: (rounds, parallel environments, environment steps per round, what differs from the agent's
# defaults)
REPLAY = {"capacity": 20_000, "gradient_steps": 1, "hidden": (64, 64), "max_grad_norm": 10.0}
ON_POLICY = {"hidden": (64, 64), "max_grad_norm": 10.0, "gamma": 0.98}
DQN = {
    "lr": 5e-4,
    "gamma": 0.95,
    "target_every": 200,
    "horizon": 8_000,
    "capacity": 100_000,
    "normalise": False,
}
SETTINGS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "dqn": (16_000, 8, 1, REPLAY | DQN),
    "sac": (12_000, 8, 1, REPLAY | {"gamma": 0.98, "tau": 0.02}),
    "ppo": (800, 32, 8, ON_POLICY | {"lr": 2e-3, "cohort": 256}),
    "a2c": (6_000, 32, 1, ON_POLICY),
    "trpo": (400, 32, 16, ON_POLICY | {"lr": 3e-3, "value_steps": 10}),
}


def play(agent: agents.Agent, state: Any, world: Any, key: jax.Array, greedy: bool = False) -> Any:
    """One step of every parallel environment: the new world, the transitions, and which episodes
    ended."""
    inside, seen = world
    act_keys, step_keys = (jax.random.split(k, len(seen)) for k in jax.random.split(key))
    action, info = jax.vmap(agent.act, (None, 0, 0))(state, seen, act_keys)
    action = info.policy.argmax(-1) if greedy else action
    following, inside, reward, done, cut, extra = jax.vmap(ENV.step, (0, 0, 0, None))(
        step_keys, inside, action, PARAMS
    )
    # `following` is already the next episode
    last, mask = (extra["final_observation"], jnp.ones(len(seen), bool))
    return (inside, following), (
        agents.Transition(seen, action, reward, last, done, mask, info),
        done | cut,
    )


def reset(key: jax.Array, count: int) -> Any:
    seen, inside = jax.vmap(ENV.reset, (0, None))(jax.random.split(key, count), PARAMS)
    return inside, seen


def train(agent: agents.Agent, key: jax.Array, rounds: int, count: int, steps: int) -> Any:
    """The agent's state after `rounds` updates, each on `steps` steps of `count` environments."""

    def one_round(carry: Any, key: jax.Array) -> Any:
        state, world = carry
        play_key, learn_key = jax.random.split(key)
        world, (batch, _) = jax.lax.scan(
            lambda w, k: play(agent, state, w, k), world, jax.random.split(play_key, steps)
        )
        flat = jax.tree.map(lambda x: x.reshape(steps * count, *x.shape[2:]), batch)
        return (agent.update(state, flat, learn_key)[0], world), None

    init_key, world_key, key = jax.random.split(key, 3)
    start = agent.init(init_key), reset(world_key, count)
    return jax.lax.scan(one_round, start, jax.random.split(key, rounds))[0][0]


def score(agent: agents.Agent, state: Any, key: jax.Array, episodes: int = 64) -> jax.Array:
    """The mean return of the greedy policy over the first episode of each of `episodes`
    environments."""

    def step(carry: Any, key: jax.Array) -> Any:
        world, alive, total = carry
        world, (batch, ended) = play(agent, state, world, key, greedy=True)
        return (world, alive & ~ended, total + alive * batch.reward), None

    start = reset(key, episodes), jnp.ones(episodes, bool), jnp.zeros(episodes)
    return jax.lax.scan(step, start, jax.random.split(key, 500))[0][2].mean()


def scores(name: str, seeds: int = 3, seed: int = 0) -> jax.Array:
    """The score of `seeds` independently trained agents, in one compiled program."""
    rounds, count, steps, options = SETTINGS[name]
    agent = agents.make(name, 4, 2, **options)

    def run(key: jax.Array) -> jax.Array:
        return score(agent, train(agent, key, rounds, count, steps), jax.random.fold_in(key, 1))

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(seed), seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--agents", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="where the seeds are split from")
    arguments = parser.parse_args()
    for name in arguments.agents:
        start = time.perf_counter()
        returns = jax.block_until_ready(scores(name, arguments.seeds, arguments.seed))
        rounds, count, steps, _ = SETTINGS[name]
        print(
            f"{name:5s} mean return {float(returns.mean()):6.1f}  per seed"
            f" {[round(float(r), 1) for r in returns]}  ({rounds * count * steps:,} steps per seed,"
            f" {time.perf_counter() - start:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
