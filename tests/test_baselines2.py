"""FedAMP, FedFomo, FedPAC, FedALA, FedAS, pFedFDA and FedCP: what they reduce to, their solvers, their default options."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.optimize import minimize
from tiny import N, assert_close, federation, same_bits, start

from fedjax_sim import models
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.hooks import Method
from fedjax_sim.local import descend, losses, optim
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedfomo import hold_out
from fedjax_sim.methods.fedpac import mixing
from fedjax_sim.methods.fedprox import pull
from fedjax_sim.methods.local_only import LocalOnly
from fedjax_sim.methods.simplex import project, simplex_qp
from fedjax_sim.types import Ctx, Env

SEVEN = ("fedamp", "fedfomo", "fedpac", "fedala", "fedas", "pfedfda", "fedcp")


def engine(method: Method, cohort: tuple[int, ...], model: str = "mlp", chunk: int = 1, **env_options) -> Simulation:
    """The tiny federation with one fixed cohort."""
    options = {"hidden": (5,)} if model == "mlp" else {}
    net_of = models.build(model, federation().shape, tiny.CLASSES, **options)
    net_of = method.extend(net_of)
    loss = losses.make_loss("ce", tiny.CLASSES)
    env = Env(net_of, loss, optim.Sgd(0.9, 5e-4), N, len(cohort), tiny.BATCH, 2.0, 2.0, rounds=8, **env_options)
    who = Participation(len(cohort), len(cohort), tuple(range(N)), schedule=(cohort,))
    lr = optim.schedule("constant", 0.05, 8)
    return simulate(method, env, federation(), who, Layout(chunk), lr=lr, evaluations=())


def scattered(state, scale: float):
    """Every client holds a model of its own, `scale` apart from the others'."""
    draws = itertools.count()
    move = lambda a: a + scale * jax.random.normal(jax.random.key(next(draws)), a.shape)
    return state._replace(clients=state.clients._replace(resident=jax.tree.map(move, state.clients.resident)))


@functools.cache
def alone(cohort: tuple[int, ...], strength: float = 0.0) -> Simulation:
    """Local training, with a proximal pull to where each client starts."""
    return engine(Pulled(strength=strength), cohort)


class Pulled(LocalOnly):
    strength: float = 0.0

    def local(self, env, net, server, client, ctx):
        client, done = descend(env, net, client, ctx, adjust=pull(self.strength, net["params"]))
        return client, self.upload(env, ctx, done)


# ---- the quadratic program ----------------------------------------------------------------------------------------
def slsqp(matrix: np.ndarray) -> np.ndarray:
    size = len(matrix)
    scale = np.abs(matrix).max()
    found = minimize(
        lambda a: a @ matrix @ a / scale,
        np.full(size, 1 / size),
        jac=lambda a: 2 * matrix @ a / scale,
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(size)},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return found.x


def programs() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    made = []
    for size, rank, spread in ((2, 2, 1.0), (5, 3, 0.1), (10, 4, 1e-3), (10, 30, 1e-6), (20, 8, 0.05)):
        points = rng.normal(size=(size, rank))
        apart = points[0] - points
        made.append(np.diag(spread * rng.uniform(0.5, 2, size)) + apart @ apart.T)
    return [*made, 1e6 * made[1], 1e-7 * made[2]]


@pytest.mark.parametrize("which", range(7))
def test_simplex_program_against_slsqp(which):
    matrix = programs()[which]
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(simplex_qp)(matrix, np.ones(len(matrix), bool)))
    want = slsqp(matrix)
    assert got.min() >= 0 and abs(got.sum() - 1) < 1e-12
    assert got @ matrix @ got <= want @ matrix @ want * (1 + 1e-9)
    np.testing.assert_allclose(got, want, atol=2e-4)  # as far as SLSQP goes
    slope = matrix @ got  # optimality: equal slopes where there is weight, none lower elsewhere
    assert np.all(slope >= got @ slope - 1e-9 * np.abs(matrix).max())


def test_simplex_program_in_degenerate_cases():
    everybody, solve = np.ones(3, bool), jax.jit(simplex_qp)
    np.testing.assert_allclose(solve(np.zeros((3, 3), np.float32), everybody), 1 / 3)  # no preference
    np.testing.assert_allclose(solve(np.eye(3, dtype=np.float32), np.array([False, True, False])), [0, 1, 0])
    twins = np.array([[2.0, 2.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 2.0]], np.float32)  # two columns are the same
    got = np.asarray(solve(twins, everybody))
    np.testing.assert_allclose([got[0] + got[1], got[2]], [0.5, 0.5], atol=1e-6)
    free = np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.5, 1.0]], np.float32)  # one costs nothing
    np.testing.assert_allclose(solve(free, everybody), [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(solve(np.ones((1, 1), np.float32), np.ones(1, bool)), [1])


def test_projection_is_the_nearest_point():
    rng = np.random.default_rng(0)
    for _ in range(20):
        point, allowed = rng.normal(size=6), rng.random(6) < 0.7
        allowed[0] = True
        got = np.asarray(project(jnp.asarray(point), jnp.asarray(allowed)))
        assert got.min() >= 0 and np.isclose(got.sum(), 1, atol=1e-6) and not got[~allowed].any()
        for corner in np.eye(6)[allowed]:  # no corner is in a direction that comes nearer
            assert (point - got) @ (corner - got) <= 1e-5


# ---- FedPAC -------------------------------------------------------------------------------------------------------
def test_fedpac_mixing():
    rng = np.random.default_rng(1)
    variance, shares = rng.uniform(0.1, 1, 4).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    ok = np.ones(4, bool)
    alpha = np.asarray(mixing(variance, shares, ok))
    np.testing.assert_allclose(alpha.sum(1), 1, atol=1e-6)
    assert ((alpha == 0) | (alpha >= 1e-3)).all()
    # nobody but one reported: its own head, whatever the others' numbers are
    one = np.arange(4) == 2
    np.testing.assert_allclose(mixing(np.where(one, variance, np.nan), shares, one)[2], one, atol=1e-6)
    # equal clients share their heads by their variances
    np.testing.assert_allclose(
        mixing(np.float32([1, 3]), np.ones((2, 6), np.float32), ok[:2]), [[0.75, 0.25]] * 2, atol=1e-6
    )
    # clients far apart keep their own
    np.testing.assert_allclose(mixing(variance, 1e3 * shares, ok), np.eye(4), atol=1e-6)
    # no solution: its own
    np.testing.assert_allclose(mixing(np.full(4, np.nan, np.float32), shares, ok), np.eye(4))


def test_fedpac_with_one_client():
    """The mixed head is the trained one, the backbone its own, the centroids its class means."""
    sim = engine(make_method("fedpac"), (2,))
    state, data = start(sim)
    after, _, _, nets = sim.examine(state, data)
    assert_close(jax.tree.map(lambda a: a[2], after.server.heads), jax.tree.map(lambda a: a[0], nets["params"]["fc"]), 1e-6)
    assert_close(after.server.net, jax.tree.map(lambda a: a[0], nets), 1e-6)
    others = [i for i in range(N) if i != 2]
    rest = lambda s: jax.tree.map(lambda a: a[np.array(others)], s.server.heads)
    assert same_bits(rest(state), rest(after))
    seen = federation().label_counts()[2] > 0
    assert np.array_equal(np.asarray(after.server.known), seen)
    rows = federation().client_rows(2)
    x, y, fc1 = federation().x[rows].reshape(len(rows), -1), federation().y[rows], nets["params"]["fc1"]
    features = np.maximum(x @ np.asarray(fc1["kernel"][0]) + np.asarray(fc1["bias"][0]), 0)
    for c in np.flatnonzero(seen):
        np.testing.assert_allclose(after.server.centroids[c], features[y == c].mean(0), atol=1e-5)


# ---- FedAMP -------------------------------------------------------------------------------------------------------
def test_fedamp_far_apart_is_local_training_with_a_pull_to_itself():
    cohort, options = (0, 2, 5), dict(lam=0.2, alpha=0.5, sigma=0.1)
    sim, base = engine(make_method("fedamp", **options), cohort), alone(cohort, 0.4)
    uploaded = lambda s: s._replace(server=s.server._replace(last=s.server.last + 1))
    (state, data), (other, same) = start(sim), start(base)
    far = sim.examine(uploaded(scattered(state, 3.0)), data)[0]
    assert_close(far.clients.resident, base.examine(scattered(other, 3.0), same)[0].clients.resident, 1e-6)
    near = sim.examine(uploaded(scattered(state, 0.02)), data)[0]
    want = base.examine(scattered(other, 0.02), same)[0]
    assert not tiny.close(near.clients.resident, want.clients.resident, 1e-4)  # they do attract each other when close
    strangers = sim.examine(scattered(state, 0.02), data)[0]  # but not before they have uploaded
    assert_close(strangers.clients.resident, want.clients.resident, 1e-6)


def test_fedamp_reaches_the_last_uploaders():
    """peers=2 with two uploads so far is the same as reaching everybody; with three it is not."""
    cohort, options = (0, 3), dict(lam=0.2, alpha=0.05, sigma=1.0)
    everybody = engine(make_method("fedamp", **options), cohort)
    two = engine(make_method("fedamp", peers=2, **options), cohort)
    for uploads, same in (({1: 3, 4: 2}, True), ({1: 3, 4: 2, 5: 1}, False)):
        last = jnp.zeros(N, jnp.int32).at[jnp.array(list(uploads))].set(jnp.array(list(uploads.values())))
        ends = []
        for sim in (everybody, two):
            state, data = start(sim)
            state = scattered(state, 0.1)._replace(server=state.server._replace(last=last))
            ends.append(sim.examine(state, data)[0].clients.resident)
        assert tiny.close(*ends, 1e-6) == same


# ---- FedFomo ------------------------------------------------------------------------------------------------------
def uploaded(state):
    return state._replace(server=state.server._replace(uploaded=jnp.ones(N, bool)))


def test_fedfomo_without_gain_keeps_its_own():
    """Others' models are noise with enormous losses: local training; affinities only sink, its own stays."""
    cohort = (1, 2, 4)
    sim, base = engine(make_method("fedfomo", models=4), cohort), alone(cohort)
    spoil = lambda a: jnp.where(jnp.isin(jnp.arange(N), jnp.array(cohort)).reshape(-1, *[1] * (a.ndim - 1)), a, 50 * a + 9)
    (state, data), (other, same) = start(sim), start(base)
    worse = lambda s: s._replace(
        clients=s.clients._replace(resident=jax.tree.map(spoil, scattered(s, 0.5).clients.resident))
    )
    # everybody prefers its own and the three spoilt models
    affinity = jnp.eye(N) + jnp.where(jnp.isin(jnp.arange(N), jnp.array(cohort)), -1.0, 0.5) * (1 - jnp.eye(N))
    state = uploaded(worse(state))
    state = state._replace(server=state.server._replace(affinity=affinity))
    after = sim.examine(state, data)[0]
    assert_close(after.clients.resident, base.examine(worse(other), same)[0].clients.resident, 1e-6)
    change = np.asarray(after.server.affinity - affinity)
    assert (change <= 0).all() and not change.diagonal().any()
    assert ((change < 0).sum(1) == np.where(np.isin(np.arange(N), cohort), 3, 0)).all()


def test_fedfomo_candidates_do_not_depend_on_how_rows_are_held():
    """M·models < N rows in the order of the cohort, or all N: the same work of the clients that are in both cohorts."""
    few, many = engine(make_method("fedfomo", models=2), (4, 1)), engine(make_method("fedfomo", models=2), (4, 1, 0))
    affinity = jax.random.normal(jax.random.key(3), (N, N))
    ends = []
    for sim in (few, many):
        state, data = start(sim)
        state = uploaded(scattered(state, 0.5))
        state = state._replace(server=state.server._replace(affinity=affinity))
        assert len(sim.method.peer_ids(sim.open(data), state.server, jnp.arange(sim.env.cohort))) == (4 if sim is few else N)
        ends.append(sim.examine(state, data)[0])
    both = lambda s: jax.tree.map(lambda a: a[jnp.array([4, 1])], (s.clients, s.server.affinity))
    assert_close(both(ends[0]), both(ends[1]), 1e-6)
    assert not tiny.close(both(ends[0])[1], affinity[jnp.array([4, 1])], 1e-6)  # something was weighed


def test_fedfomo_holds_out_where_nothing_is():
    sim = engine(make_method("fedfomo"), (2,))
    env = sim.open(sim.data)
    ctx = Ctx(jnp.int32(2), jax.random.key(0), jnp.int32(0), jnp.float32(1), jnp.float32(0.1))
    same, rows, n = hold_out(env, ctx)
    assert same is env and rows[: int(n)].tolist() == federation().client_rows(2, "val").tolist()
    bare = dataclasses.replace(env.fed, rows={"train": env.fed.rows["train"]}, size={"train": env.fed.size["train"]})
    kept, rows, n = hold_out(dataclasses.replace(env, fed=bare), ctx)
    assert (int(n), int(kept.fed.size["train"][2])) == (2, 12)  # a fifth of 14
    assert rows[:2].tolist() == federation().client_rows(2)[12:].tolist()
    assert int(kept.fed.size["train"][3]) == 1  # a single example is trained on


# ---- FedALA -------------------------------------------------------------------------------------------------------
def test_fedala_weights_move_within_the_box_and_only_where_asked():
    sim = engine(make_method("fedala", layers=1, lr_weights=20.0, threshold=0.0, cap=12), (0, 2, 4))
    state, data = start(sim)
    first = sim.examine(state, data)[0]
    assert same_bits(first.clients.own, state.clients.own)  # nothing to mix in round 1
    own = sim.examine(first, data)[0].clients.own
    assert set(own.weights) == {"fc"}
    kernel = np.asarray(own.weights["fc"]["kernel"])
    assert (kernel >= 0).all() and (kernel <= 1).all()
    moved = (kernel != 1).any((1, 2))
    assert np.array_equal(np.asarray(own.begun), moved) and np.array_equal(np.flatnonzero(moved), [0, 2, 4])


def test_fedala_is_tested_after_mixing_where_asked():
    """tested=start is Θ mixed anew; with η_w = 0 that is Θ."""
    sim = engine(make_method("fedala", tested="start", lr_weights=0.0), (0, 1))
    state, data = start(sim)
    state = sim.examine(state, data)[0]
    ctx = Ctx(jnp.int32(0), jax.random.key(0), state.t, jnp.float32(2), jnp.float32(0.1))
    mine = jax.tree.map(lambda a: a[0], state.clients)
    net = jax.jit(lambda s, c, d: sim.method.personal(sim.open(d), s, c, ctx))(state.server, mine, data)
    assert_close(net, state.server.net, 1e-6)
    assert not tiny.close(net, mine.resident, 1e-4)
