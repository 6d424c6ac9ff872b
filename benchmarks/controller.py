"""What one decision and one learning step of each agent cost.

    python -m benchmarks.controller [--agents sac dqn] [--json FILE] [--round-seconds X |
    --measure-round]

One line per agent: microseconds of one `act` for a whole cohort plus one `update` (with the replay
filled, so that every gradient step is taken), the best of several repetitions of a compiled scan
over rounds. With `--round-seconds`, the seconds one federated round takes, also the share of a
round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import agents
from agents.registry import LEARNERS, options

COHORT, STATE, ACTIONS, HIDDEN, BATCH, STEPS = 10, 103, 3, 64, 64, 10
WANTED = {"hidden": (HIDDEN,), "batch": BATCH, "gradient_steps": STEPS, "cohort": COHORT}
OPTIONS: dict[str, dict[str, Any]] = {
    name: {k: v for k, v in WANTED.items() if k in options(name)} for name in LEARNERS
}


def one_round(agent: agents.Agent, state: Any, key: jax.Array) -> Any:
    """Acts for a cohort of random observations and learns from random rewards; returns the next
    state."""
    observe_key, act_key, reward_key, update_key = jax.random.split(key, 4)
    seen, following = jax.random.normal(observe_key, (2, COHORT, STATE))
    action, info = jax.vmap(agent.act, (None, 0, 0))(state, seen, jax.random.split(act_key, COHORT))
    transitions = agents.Transition(
        seen,
        action,
        jax.random.normal(reward_key, (COHORT,)),
        following,
        jnp.zeros(COHORT),
        jnp.ones(COHORT, bool),
        info,
    )
    return agent.update(state, transitions, update_key)[0]


def controller_seconds(name: str, rounds: int = 50, repeats: int = 5) -> float:
    """Seconds of one act + update of the agent called `name`: the best of `repeats` scans over
    `rounds`."""
    agent = agents.make(name, STATE, ACTIONS, **OPTIONS[name])

    def many(state: Any, key: jax.Array) -> Any:
        keys = jax.random.split(key, rounds)
        return jax.lax.scan(lambda s, k: (one_round(agent, s, k), None), state, keys)[0]

    run = jax.jit(many, donate_argnums=0)
    # compiles, fills
    state = jax.block_until_ready(run(agent.init(jax.random.key(0)), jax.random.key(1)))
    best = float("inf")
    for repeat in range(repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(run(state, jax.random.key(2 + repeat)))
        best = min(best, time.perf_counter() - start)
    return best / rounds


def measure(names: Sequence[str] = LEARNERS, round_seconds: float | None = None) -> dict[str, Any]:
    """The table as a dictionary; `round_seconds` is what one federated round takes, if it is
    known."""
    rows = []
    for name in names:
        seconds = controller_seconds(name)
        row = {"agent": name, "microseconds": seconds * 1e6}
        if round_seconds:
            row["share_of_round"] = seconds / round_seconds
        rows.append(row)
    return {
        "benchmark": "controller",
        "setting": {
            "cohort": COHORT,
            "state": STATE,
            "actions": ACTIONS,
            "hidden": HIDDEN,
            "batch": BATCH,
            "gradient_steps": STEPS,
        },
        "machine": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "backend": jax.default_backend(),
            "cpus": os.cpu_count(),
        },
        "round_seconds": round_seconds,
        "rows": rows,
    }


def lenet5_round_seconds(rounds: int = 4) -> float:
    """Seconds of one LeNet-5 round (workload W1: 10 of 100 clients, 5 epochs) in the simulator
    here, best of `rounds`."""
    import time

    from benchmarks.peers.ours import prepare
    from benchmarks.workloads import WORKLOADS

    peer = prepare(WORKLOADS["W1"])
    seconds = []
    for index in range(rounds):
        began = time.perf_counter()
        peer.round(index)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--agents",
        nargs="+",
        choices=LEARNERS,
        default=LEARNERS,
        metavar="NAME",
        help=f"which agents, of {', '.join(LEARNERS)}",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument(
        "--round-seconds", type=float, metavar="X", help="seconds of one federated round"
    )
    parser.add_argument(
        "--measure-round", action="store_true", help="measure a LeNet-5 round (W1) here and now"
    )
    arguments = parser.parse_args()
    round_seconds = lenet5_round_seconds() if arguments.measure_round else arguments.round_seconds
    result = measure(tuple(arguments.agents), round_seconds)
    if round_seconds:
        print(
            f"one round: {round_seconds:.3f} s"
            + (" (LeNet-5, W1)" if arguments.measure_round else "")
        )
    print(
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["setting"].items())
    )
    for row in result["rows"]:
        share = f"  {row['share_of_round']:8.3%} of a round" if "share_of_round" in row else ""
        print(f"{row['agent']:9s} {row['microseconds']:9.0f} µs per act + update{share}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
