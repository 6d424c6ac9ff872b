"""Runs of the counterfactual oracle on the federations of `benchmarks.headroom`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.headroom_runs import (
    AXES,
    Compiled,
    Scale,
    Variant,
    curves,
    data_of,
    each_variant,
    first_states,
    with_rate,
)
from benchmarks.oracle import branches, oracle_round
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.records import Data
from fedjax_sim.types import State

HORIZON = 6
LOGGED = ("round", "taken", "sent", "down", "up")


@functools.cache
def oracle_program(program: Compiled, rounds: int, every: int) -> Any:
    """(states, data, weights [L]) -> states, logs, scores of all variants."""
    sim = program.sim

    def variant(state: State, data: Data, weight: Any) -> Any:
        def one(state: State, _: Any) -> tuple:
            state, log = oracle_round(sim, state, data, weight)
            return state, {k: log[k] for k in LOGGED}

        def block(state: State, _: Any) -> tuple:
            state, logs = lax.scan(one, state, None, every)
            score = sim.evaluate.__wrapped__(state, data)  # type: ignore[attr-defined]
            return state, (logs, {**score, "round": state.t})

        state, (logs, scores) = lax.scan(block, state, None, rounds // every)
        return state, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), logs), scores

    return jax.jit(jax.vmap(variant, (AXES, None, 0), (AXES, 0, 0)))


def oracle_curves(
    scale: Scale,
    program: Compiled,
    fed: Federation,
    seed: int,
    rate: float,
    end: float,
    weights: tuple[float, ...],
) -> list[dict[str, Any]]:
    """The curves of the oracle for every w of its objective."""
    sim = program.sim
    data = with_rate(data_of(sim, fed), jnp.float32(rate), jnp.float32(end))
    states = first_states(sim, data, [Variant("")] * len(weights), seed)
    run = oracle_program(program, scale.rounds, scale.every)
    done = jax.device_get(run(states, data, jnp.array(weights, jnp.float32)))
    return [curves(scale, sim, *one) for one in each_variant(*done)]


@functools.cache
def branch_program(program: Compiled) -> Any:
    sim = program.sim
    steps = jax.jit(lambda s, d, n: lax.fori_loop(0, n, lambda _, s: sim.round(s, d)[0], s))
    return steps, jax.jit(lambda s, d: branches(sim, s, d, HORIZON))


def branch_gains(
    scale: Scale,
    program: Compiled,
    fed: Federation,
    seed: int,
    rate: float,
    end: float,
    shares: tuple[float, ...],
) -> list[list[float]]:
    """[len(shares), HORIZON] points of global accuracy by one round of the oracle, so many rounds
    later, from States of `full`."""
    sim = program.sim
    data = with_rate(data_of(sim, fed), jnp.float32(rate), jnp.float32(end))
    wide = first_states(sim, data, [Variant("")], seed)
    state = State(wide.t, wide.key, *jax.tree.map(lambda a: a[0], tuple(wide[2:])))
    steps, ask = branch_program(program)
    found = []
    for share in shares:
        state = steps(state, data, round(share * scale.rounds) - int(state.t))
        found.append((100 * np.asarray(ask(state, data))).tolist())
    return found
