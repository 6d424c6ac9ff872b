"""The tiny federation with one fixed cohort, and small helpers around it."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import numpy as np
import tiny
from tiny import M, N, federation, start

from fedjax_sim import models
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.hooks import Method
from fedjax_sim.local import local_sgd, losses, optim
from fedjax_sim.local.optim import schedule
from fedjax_sim.methods.fedprox import pull
from fedjax_sim.methods.local_only import LocalOnly
from fedjax_sim.types import Ctx, Env

HEAD = "fc"


def after_rounds(sim: Simulation, rounds: int = 2):
    """(state, ids [M] and uploads [M, …] of the last round)."""
    state, data = start(sim)
    for _ in range(rounds):
        state, _, ids, nets = sim.examine(state, data)
    return state, np.asarray(ids), nets


def rows(tree, ids):
    return jax.tree.map(lambda a: np.asarray(a)[ids], tree)


def variant(sim: Simulation, method=None, lr: float = 0.05, **env) -> Simulation:
    """The same federation with another method or another environment."""
    return simulate(
        method or sim.method,
        dataclasses.replace(sim.env, **env),
        tiny.federation(),
        Participation(M, M, tuple(range(N))),
        lr=schedule("constant", lr, 8),
        evaluations=("personal",),
    )


def engine(
    method: Method, cohort: tuple[int, ...], model: str = "mlp", chunk: int = 1, **env_options
) -> Simulation:
    """The tiny federation with one fixed cohort."""
    options = {"hidden": (5,)} if model == "mlp" else {}
    net_of = models.build(model, federation().shape, tiny.CLASSES, **options)
    net_of = method.extend(net_of)
    loss = losses.make_loss("ce", tiny.CLASSES)
    env = Env(
        net_of,
        loss,
        optim.Sgd(0.9, 5e-4),
        N,
        len(cohort),
        tiny.BATCH,
        2.0,
        2.0,
        rounds=8,
        **env_options,
    )
    who = Participation(len(cohort), len(cohort), tuple(range(N)), schedule=(cohort,))
    lr = optim.schedule("constant", 0.05, 8)
    return simulate(method, env, federation(), who, Layout(chunk), lr=lr, evaluations=())


def scattered(state, scale: float):
    """Every client holds a model of its own, `scale` apart from the others'."""
    draws = itertools.count()
    move = lambda a: a + scale * jax.random.normal(jax.random.key(next(draws)), a.shape)
    return state._replace(
        clients=state.clients._replace(resident=jax.tree.map(move, state.clients.resident))
    )


@functools.cache
def alone(cohort: tuple[int, ...], strength: float = 0.0) -> Simulation:
    """Local training, with a proximal pull to where each client starts."""
    return engine(Pulled(strength=strength), cohort)


class Pulled(LocalOnly):
    strength: float = 0.0

    def local(self, env, net, server, client, ctx):
        client, done = local_sgd(env, net, client, ctx, adjust=pull(self.strength, net["params"]))
        return client, self.upload(env, ctx, done)


def ctx_of(sim: Simulation, state, data) -> Ctx:
    """Of the first client of the cohort."""
    return jax.tree.map(lambda a: a[0], sim.plan_round(state, data).slots.ctx)
