"""What pFedRLLA's server and its validation scores cost beside local training, in the regime
finetune.

Processor seconds, because they count the same on a busy machine. Each piece is compiled alone and
writes its state in place as a round does; what happens every 10 rounds counts a tenth. Whole rounds
with and without an agent, in turn, are the check: their difference holds all pieces and the
engine's selection of the server's new or old state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from agents.types import Info, Transition
from benchmarks.fedpolicy import Stepper, median_ratio
from fedjax_sim.engine import layout as layouts
from fedjax_sim.methods.pfedrlla.encoder import features, mhae
from fedjax_sim.methods.pfedrlla.method import val_accuracy
from fedjax_sim.runner.prepare import Setup

REPEATS = 5
EVERY = 10  # rounds between two updates


def seconds(task: Callable[[Any], Any], start: Any) -> tuple[float, Any]:
    """(least processor seconds of state -> task(state), the last state)."""
    state, found = jax.block_until_ready(task(start)), []
    for _ in range(REPEATS):
        began = time.process_time()
        state = jax.block_until_ready(task(state))
        found.append(time.process_time() - began)
    return min(found), state


def whole_rounds(plain: Stepper, steered: Stepper, rounds: int) -> dict[str, float]:
    """In turn, between two updates: medians, and how much longer a round with an agent takes."""
    for i in range(1 + rounds):
        plain(count=i > 0)
        steered(count=i > 0)
    return dict(
        round_without=statistics.median(plain.cpu_seconds),
        round_with=statistics.median(steered.cpu_seconds),
        extra_share=median_ratio(plain.cpu_seconds, steered.cpu_seconds) - 1,
        extra_share_wall=median_ratio(plain.seconds, steered.seconds) - 1,
    )


def local_round(plain: Stepper, rounds: int) -> float:
    """Median processor seconds of a round without an agent, the first one (compilation) apart."""
    for i in range(1 + rounds):
        plain(count=i > 0)
    return statistics.median(plain.cpu_seconds)


def pieces(setup: Setup, side: int, embedding: int) -> dict[str, float]:
    """Processor seconds per round of each piece."""
    sim = setup.simulation
    state, data = layouts.place(sim.layout, setup.first_state(), sim.data)
    agent, env, m = sim.agent(), sim.open(data), sim.env.cohort
    groups, functions = sim.env.model.dense, mhae(side, embedding)
    server, clients, learner = state.server, state.clients, state.agent
    heads, use = jnp.ones((m, clients.own.features.shape[1], side**2)) / side, jnp.ones(m, bool)
    seen, weights = jnp.ones((m, embedding * (m + 1))), jnp.full((m, m + 1), 1 / (m + 1))
    usable, zero = jnp.ones((m, m + 1), bool), jnp.zeros(m)
    happened = Transition(
        seen,
        weights,
        zero,
        seen,
        zero,
        use,
        Info(zero, zero, weights, usable),
        usable,
        jnp.arange(m),
    )
    nets = jax.tree.map(lambda a: a[:m], clients.resident)
    keys = jax.random.split(jax.random.key(0), m)

    act = jax.jit(
        lambda learner, seen: jax.vmap(lambda o, k: agent.act(learner, o, k))(seen, keys)[0]
    )
    update = jax.jit(lambda learner: agent.update(learner, happened, keys[0])[0], donate_argnums=0)
    due = lambda learner: update(learner._replace(rounds=jnp.int32(EVERY - 1)))
    teach = jax.jit(lambda encoder: functions.train(encoder, heads, use), donate_argnums=0)
    embed = jax.jit(lambda encoder, x: functions.embed(encoder, x))
    project = jax.jit(
        lambda nets: lax.map(lambda n: features(n["params"], groups, side, server.frame), nets)
    )
    ctx = sim.plan_round(state, data).slots.ctx
    score = jax.jit(lambda nets: lax.map(lambda pair: val_accuracy(env, *pair), (nets, ctx)))

    acting, _ = seconds(lambda _: act(learner, seen), None)
    embedding_cost, _ = seconds(lambda _: embed(server.encoder, heads), None)
    projecting, _ = seconds(lambda _: project(nets), None)
    scoring, _ = seconds(lambda _: score(nets), None)
    replay = learner.replay._replace(size=jnp.int32(1000), cursor=jnp.int32(1000))
    idle, learner = seconds(update, learner._replace(replay=replay, rounds=jnp.int32(EVERY)))
    learning, _ = seconds(due, learner)
    training, _ = seconds(teach, server.encoder)
    return dict(
        agent=acting + idle + (learning - idle) / EVERY,
        encoder=training / EVERY
        + 4 * embedding_cost,  # prepared, observed twice, judged, aggregated: m each
        projections=projecting,
        validation=2 * scoring,
        agent_update=learning,
        encoder_training=training,
    )


def shares(found: dict[str, float], local: float) -> dict[str, float]:
    """Of local training; the paper: 0.16 s and 0.94 s of 2.37 s, without saying where projections
    are counted."""
    server = ("agent", "encoder", "projections")
    out = {f"{k}_share": found[k] / local for k in (*server, "validation")}
    return out | dict(
        local=local,
        server_share=sum(found[k] for k in server) / local,
        paper_agent_share=0.16 / 2.37,
        paper_encoder_share=0.94 / 2.37,
    )
