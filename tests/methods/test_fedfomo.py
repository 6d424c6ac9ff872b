"""fedfomo: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from fixed_cohort import alone, engine, scattered
from tiny import N, assert_close, federation, start

from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedfomo import hold_out
from fedjax_sim.types import Ctx


def uploaded(state):
    return state._replace(server=state.server._replace(uploaded=jnp.ones(N, bool)))


def test_fedfomo_without_gain_keeps_its_own():
    """Others' models are noise with enormous losses: local training; affinities only sink, its own
    stays."""
    cohort = (1, 2, 4)
    sim, base = engine(make_method("fedfomo", models=4), cohort), alone(cohort)
    spoil = lambda a: jnp.where(
        jnp.isin(jnp.arange(N), jnp.array(cohort)).reshape(-1, *[1] * (a.ndim - 1)), a, 50 * a + 9
    )
    (state, data), (other, same) = start(sim), start(base)
    worse = lambda s: s._replace(
        clients=s.clients._replace(resident=jax.tree.map(spoil, scattered(s, 0.5).clients.resident))
    )
    # everybody prefers its own and the three spoilt models
    affinity = jnp.eye(N) + jnp.where(jnp.isin(jnp.arange(N), jnp.array(cohort)), -1.0, 0.5) * (
        1 - jnp.eye(N)
    )
    state = uploaded(worse(state))
    state = state._replace(server=state.server._replace(affinity=affinity))
    after = sim.examine(state, data)[0]
    assert_close(after.clients.resident, base.examine(worse(other), same)[0].clients.resident, 1e-6)
    change = np.asarray(after.server.affinity - affinity)
    assert (change <= 0).all() and not change.diagonal().any()
    assert ((change < 0).sum(1) == np.where(np.isin(np.arange(N), cohort), 3, 0)).all()


def test_fedfomo_candidates_do_not_depend_on_how_rows_are_held():
    """M·models < N rows in the order of the cohort, or all N: the same work of the clients that are
    in both cohorts."""
    few, many = (
        engine(make_method("fedfomo", models=2), (4, 1)),
        engine(make_method("fedfomo", models=2), (4, 1, 0)),
    )
    affinity = jax.random.normal(jax.random.key(3), (N, N))
    ends = []
    for sim in (few, many):
        state, data = start(sim)
        state = uploaded(scattered(state, 0.5))
        state = state._replace(server=state.server._replace(affinity=affinity))
        assert len(
            sim.method.peer_ids(sim.open(data), state.server, jnp.arange(sim.env.cohort))
        ) == (4 if sim is few else N)
        ends.append(sim.examine(state, data)[0])
    both = lambda s: jax.tree.map(lambda a: a[jnp.array([4, 1])], (s.clients, s.server.affinity))
    assert_close(both(ends[0]), both(ends[1]), 1e-6)
    # something was weighed
    assert not tiny.close(both(ends[0])[1], affinity[jnp.array([4, 1])], 1e-6)


def test_fedfomo_holds_out_where_nothing_is():
    sim = engine(make_method("fedfomo"), (2,))
    env = sim.open(sim.data)
    ctx = Ctx(jnp.int32(2), jax.random.key(0), jnp.int32(0), jnp.float32(1), jnp.float32(0.1))
    same, rows, n = hold_out(env, ctx)
    assert same is env and rows[: int(n)].tolist() == federation().client_rows(2, "val").tolist()
    bare = dataclasses.replace(
        env.fed, rows={"train": env.fed.rows["train"]}, size={"train": env.fed.size["train"]}
    )
    kept, rows, n = hold_out(dataclasses.replace(env, fed=bare), ctx)
    assert (int(n), int(kept.fed.size["train"][2])) == (2, 12)  # a fifth of 14
    assert rows[:2].tolist() == federation().client_rows(2)[12:].tolist()
    assert int(kept.fed.size["train"][3]) == 1  # a single example is trained on
