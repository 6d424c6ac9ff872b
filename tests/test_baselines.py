"""The personalised baselines: what they reduce to, what they must not touch, and that their defaults learn.

Their numbers are compared with PyTorch's in `test_baselines_reference.py`, their promises in `test_contract.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import BATCH, CLASSES, SIZES, M, N, arrays, assert_close, close, same_bits, simulation, start

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.round import contexts, make_data
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.local.mmd import mmd_rbf
from fedjax_sim.local.optim import Sgd, schedule
from fedjax_sim.methods import make_method
from fedjax_sim.plans import overlay, part

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


# ---- reductions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "personal"),
    [
        ("apfl", {"alpha": 0.0, "learn_alpha": False}, lambda own: own.net),
        ("fedphp", {"lam": 0.0, "mu": 0.0}, lambda own: own),
    ],
)
def test_without_its_mixture_is_fedavg(name, options, personal):
    """Uploads and the global model are FedAvg's, and the personal model is what the client trained."""
    want, ids, uploads = after_rounds(simulation("fedavg"))
    got, same, mine = after_rounds(simulation(name, **options))
    assert np.array_equal(ids, same)
    assert_close(uploads, mine, 1e-6)
    assert_close(want.server.net, got.server.net, 1e-6)
    assert_close(rows(personal(got.clients.own), ids), uploads, 1e-6)


def test_apfl_learns_its_weight():
    """The default: α leaves 1 for some participants, stays in [0, 1], and the personal model is not the global branch."""
    state, ids, uploads = after_rounds(simulation("apfl"))
    alpha = np.asarray(state.clients.own.alpha)
    assert ((alpha >= 0) & (alpha <= 1)).all() and (alpha[ids] < 1).any()  # it may also be clipped at 1
    assert not close(rows(state.clients.own.net, ids), uploads, 1e-4)


def test_fedper_trains_as_the_backbone_redistribution():
    """Size weights: the same backbone on the server, the same heads on the clients; only the head stays at home."""
    want, _, _ = after_rounds(simulation("backbone", weights="size", first="any"))
    got, _, _ = after_rounds(simulation("fedper"))
    body = lambda net: {name: sub for name, sub in net["params"].items() if name != HEAD}
    assert_close(body(want.server.net), body(got.server.net), 1e-6)
    assert_close(want.clients.resident["params"][HEAD], got.clients.own["params"][HEAD], 1e-6)
    assert set(got.clients.own["params"]) == {HEAD}  # nothing else is stored
    first = start(simulation("fedper"))[0].server.net["params"][HEAD]
    assert same_bits(first, got.server.net["params"][HEAD])


def test_fedrep_without_its_order_is_fedper():
    want, _, _ = after_rounds(simulation("fedper"))
    got, _, _ = after_rounds(simulation("fedrep", head_epochs=0.0, freeze_head=False))
    assert same_bits((want.server, want.clients.own), (got.server, got.clients.own))


def test_fedbabu_never_touches_the_head_before_fine_tuning():
    sim = simulation("fedbabu")
    first, data = start(sim)
    state, _, uploads = after_rounds(sim)
    head, body = (lambda net: part(net, (HEAD,))), (lambda net: part(net, ("fc1",)))
    assert same_bits(head(first.server.net), head(state.server.net))
    assert same_bits(jax.tree.map(lambda a: jnp.stack([a] * M), head(first.server.net)), head(uploads))
    assert not close(body(first.server.net), body(state.server.net), 1e-3)
    assert not jax.tree.leaves(state.clients.own)

    ctx = jax.tree.map(lambda a: a[0], contexts(sim.stages, sim.env, jax.random.key(0), jnp.array([2]), state.t))
    tuned = sim.method.personal(sim.open(data), state.server, state.clients, ctx)
    assert not close(head(tuned), head(state.server.net), 1e-3) and not close(body(tuned), body(state.server.net), 1e-3)


def test_pfedme_without_a_pull_is_plain_sgd():
    """λ = 0, K = 1: θ is a plain descent from Θ, and nothing ever moves Θ."""
    sim = simulation("pfedme", lam=0.0, inner_steps=1, lr_personal=0.03, decay_personal=0.02)
    state, ids, _ = after_rounds(sim)
    assert_close(start(sim)[0].server, state.server, 1e-6)  # an average of equal models
    plain = variant(simulation("fedavg"), lr=0.03, optimizer=Sgd(0.0, 0.02))
    first, data = start(plain)
    _, _, same, uploads = plain.examine(first._replace(t=jnp.int32(1)), data)  # the second round, from Θ⁰
    assert np.array_equal(ids, same)
    assert_close(rows(state.clients.own, ids), uploads, 1e-6)


def test_fedrod_personal_heads_do_not_reach_the_generic_branch():
    """Other residual heads: the same uploads to the last bit, other personal scores."""
    sim = simulation("fedrod")
    state, data = start(sim)
    noise = jax.tree.map(lambda a: a + np.random.default_rng(0).standard_normal(a.shape).astype(a.dtype), state.clients.own)
    other = state._replace(clients=state.clients._replace(own=noise))
    after, _, ids, uploads = sim.examine(state, data)
    after2, _, _, uploads2 = sim.examine(other, data)
    assert same_bits(uploads, uploads2) and same_bits(after.server, after2.server)
    ids = np.asarray(ids)
    moved = [np.abs(a - b).max() for a, b in zip(*(arrays(rows(s.clients.own, ids)) for s in (state, after)), strict=True)]
    assert min(moved) > 1e-3
    assert not close(
        sim.evaluate(after, data)["personal"]["loss"]["total"], sim.evaluate(after2, data)["personal"]["loss"]["total"], 1e-3
    )


def test_perfedavg_logs_the_batch_it_looked_at():
    """One full-batch epoch: the logged loss and accuracy are Θ's, as FedAvg's are."""
    one = dict(batch_size=max(SIZES), epochs=1.0, max_epochs=1.0)
    logs = [s.examine(*start(s))[1] for s in (variant(simulation(name), **one) for name in ("fedavg", "perfedavg"))]
    for name in ("train_loss", "train_accuracy"):
        np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=1e-5)
    assert max(SIZES) > BATCH


# ---- defaults ---------------------------------------------------------------------------------------------------
@functools.cache
def skewed() -> Federation:
    """The tiny federation with two of three classes per client, told apart by a pattern; same shapes, so same programs."""
    fed, rng = tiny.federation(), np.random.default_rng(5)
    y = np.array(fed.y)
    for i in range(N):
        for split in fed.rows:
            own = fed.client_rows(i, split)
            y[own] = (i + np.arange(len(own)) % 2) % CLASSES
    x = rng.standard_normal((CLASSES, *fed.shape))[y] + 0.7 * rng.standard_normal(fed.x.shape)
    return dataclasses.replace(fed, x=x.astype(np.float32), y=y)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu", "apfl", "perfedavg", "pfedme", "fedrod", "fedphp"])
def test_defaults_learn(name):
    """Ten rounds with default options: clients' own predictors lose much less than at the start, and nearly all is right."""
    sim = simulation(name)
    data = make_data(sim.stages, skewed())
    state, _ = start(sim)
    scores = lambda s: (sim.adapt if sim.method.adapts else sim.evaluate)(s, data)["personal"]
    total = lambda score, what: float(np.asarray(score[what[0]][what[1]]).sum())
    before = scores(state)
    for _ in range(10):
        state = sim.examine(state, data)[0]
    after = scores(state)
    assert total(after, ("loss", "total")) < 0.65 * total(before, ("loss", "total"))
    assert total(after, ("accuracy", "correct")) >= 0.85 * total(after, ("accuracy", "count"))


# ---- options ----------------------------------------------------------------------------------------------------
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fedrep", {"head_epochs": -1.0}, "use 0 to 1e"),
        ("fedrep", {"head_epochs": INF}, "not a finite number"),
        ("fedbabu", {"ft_epochs": NAN}, "not a finite number"),
        ("apfl", {"alpha": 1.5}, "alpha=1.5 is not allowed; use 0 to 1"),
        ("apfl", {"alpha": NAN}, "not a finite number"),
        ("perfedavg", {"alpha": "fast"}, "'fast' is not a number; allowed: a number, or lr"),
        ("perfedavg", {"beta": "nan"}, "not a finite number"),
        ("pfedme", {"lam": -1.0}, "lam=-1 is not allowed; use 0 or more"),
        ("pfedme", {"lr_personal": INF}, "not a finite number"),
        ("pfedme", {"beta": NAN}, "not a finite number"),
        ("pfedme", {"inner_steps": 0}, "inner_steps=0 is not allowed; use 1 or more"),
        ("fedphp", {"lam": 1.1}, "lam=1.1 is not allowed; use 0 to 1"),
        ("fedphp", {"mu": NAN}, "not a finite number"),
    ],
)
def test_bad_options_are_sentences(name, options, says):
    with pytest.raises(UserError, match=rf"(?=.*{name}\.{next(iter(options))}).*{says}"):
        make_method(name, **options)


@pytest.mark.parametrize("layers", [2, -1])
def test_fedper_must_share_something(layers):
    sim = simulation("fedavg")
    with pytest.raises(UserError, match=rf"^{layers} parameter groups cannot stay private.*'mlp' has 2; allowed: 0 to 1"):
        variant(sim, make_method("fedper", layers=layers)).init(0, sim.env.model.init(jax.random.key(0)))


# ---- the pieces -------------------------------------------------------------------------------------------------
def test_mmd_against_its_definition():
    """Pair by pair; padding counts nothing, in the value and in the gradient."""
    rng = np.random.default_rng(3)
    a, b = 3 * rng.standard_normal((2, 4, 5))

    def kernel(x, y):
        return sum(np.exp(-np.sum((x - y) ** 2) / (2 * width)) for width in (10, 15, 20, 50))

    want = np.mean(
        [
            [kernel(x, u) + kernel(y, v) - 2 * kernel(x, v) for u, v in zip(a, b, strict=True)]
            for x, y in zip(a, b, strict=True)
        ]
    )
    padded = [np.concatenate([f, np.full((2, 5), np.nan)]).astype(np.float32) for f in (a, b)]
    mask = np.arange(6) < 4
    value, slope = jax.value_and_grad(mmd_rbf)(*padded, mask)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    assert np.isfinite(slope[:4]).all() and (slope[4:] == 0).all() and np.abs(slope[:4]).max() > 1e-3


def test_part_and_overlay_are_inverse():
    net = {"params": {"stem": 1, "fc": 2}, "batch_stats": {"stem": 3}}
    other = {"params": {"stem": 4, "fc": 5}, "batch_stats": {"stem": 6}}
    assert overlay(net, part(other, ("stem",))) == {"params": {"stem": 4, "fc": 2}, "batch_stats": {"stem": 6}}
    assert overlay(net, part(net, ("fc",))) == net
