"""One table, every registered method: what each of them promises. Two small compiled programs per method serve all.

`examine` is one round that also returns every upload; `run` is several rounds with evaluations. Seeds, data and the
chance of dropout are arguments, so no property costs a further compilation.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import M, N, same_bits, simulation, start

from fedjax_sim.methods import METHODS

ALL = sorted(METHODS)
# floats on the wire per participant, as the method's docstring says: functions of |w|, |phi|, |psi|, classes, width
WIRE = {
    "scaffold": lambda w, phi, psi, c, d: (2 * w, 2 * w),
    "local": lambda w, phi, psi, c, d: (0, 0),
    "backbone": lambda w, phi, psi, c, d: (phi, w),
    "head": lambda w, phi, psi, c, d: (psi, w),
    "ccvr": lambda w, phi, psi, c, d: (w, w + c * (2 * d + 1)),
    "fedca": lambda w, phi, psi, c, d: (w, w + c),
    "fedfa": lambda w, phi, psi, c, d: (w + 2 * 192, w + 2 * 192),  # 32 + 32 + 64 + 64 channels of cnn6
}
MODEL = {"fedfa": "cnn6"}  # those that need feature maps
OPTIONS = {"fedpolicy": {"agent.batch": 4}}  # small enough that the agent learns within these few rounds
DECIDES = {"random", "fedpolicy"}  # the block sent down differs from client to client


# one worker compiles all of a method's programs
@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ALL])
def sim(request):
    return simulation(request.param, model=MODEL.get(request.param, "mlp"), **OPTIONS.get(request.param, {}))


def scrambled(data, client: int, value=None):
    """The same data with other images (or `value`) in the training rows of one client."""
    fed = data.fed
    rows = fed.client_rows(client)
    x = np.array(fed.x)
    x[rows] = np.random.default_rng(1).standard_normal(x[rows].shape) if value is None else value
    return data._replace(fed=dataclasses.replace(fed, x=x))


def test_runs_and_keeps_shapes(sim):
    state, data = start(sim)
    shapes = [(a.shape, a.dtype) for a in jax.tree.leaves(state)]
    after, log, ids, nets = sim.examine(state, data)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(after)] == shapes
    assert all(np.isfinite(a).all() for a in tiny.arrays((after, log, nets)) if a.dtype.kind == "f")
    assert int(after.t) == 1 and len(set(np.asarray(ids).tolist())) == M
    assert int(log["steps_executed"]) >= int(log["steps_needed"]) > 0


def test_seed_decides_everything(sim):
    (state, data), (other, _) = start(sim), start(sim, seed=1)
    once, again = sim.examine(state, data), sim.examine(start(sim)[0], data)
    assert same_bits(once, again)
    assert not same_bits(once[3], sim.examine(other, data)[3])


def test_clients_are_isolated(sim):
    """Other images on one client change no other client's upload in that round."""
    state, data = start(sim)
    _, _, ids, nets = sim.examine(state, data)
    victim = int(ids[0])
    _, _, ids2, nets2 = sim.examine(state, scrambled(data, victim))
    assert np.array_equal(ids, ids2)
    own = lambda tree, slot: jax.tree.map(lambda a: a[slot], tree)
    assert not same_bits(own(nets, 0), own(nets2, 0))
    for slot in range(1, M):
        assert same_bits(own(nets, slot), own(nets2, slot))


def test_silence_changes_nothing(sim):
    """A round in which nobody reports leaves the server, the clients and the agent alone."""
    state, data = start(sim)
    state = sim.examine(state, data)[0]  # from a state that has moved
    after, log, _, _ = sim.examine(state, data._replace(dropout=np.float32(1.0)))
    assert int(log["dropped"]) == M and int(log["up"]) == 0
    assert same_bits((state.server, state.clients, state.agent), (after.server, after.clients, after.agent))


def test_diverged_client_is_counted_and_weighs_nothing(sim):
    state, data = start(sim)
    _, _, ids, nets = sim.examine(state, data)
    victim = int(ids[0])
    after, log, _, nets2 = sim.examine(state, scrambled(data, victim, np.nan))
    assert int(log["diverged"]) == 1 and int(log["diverged_id"]) == victim
    assert all(np.isfinite(a).all() for a in tiny.arrays((after, nets2)) if a.dtype.kind == "f")
    mine = lambda s: jax.tree.map(lambda a: a[victim], s.clients)
    assert same_bits(mine(state), mine(after))
    assert same_bits(jax.tree.map(lambda a: a[1:], nets), jax.tree.map(lambda a: a[1:], nets2))


def test_bytes_match_the_docstring(sim):
    state, data = start(sim)
    log = sim.examine(state, data)[1]
    floats = np.array(sim.env.group_floats(jax.eval_shape(sim.env.model.init, jax.random.key(0))))
    extra = sim.method.extra_floats(sim.env, sim.env.model.init(jax.random.key(0)))
    down = int(np.asarray(log["taken"]) @ floats) + int(log["down"]) * extra[0]
    up = int(np.asarray(log["sent"]) @ floats) + int(log["up"]) * extra[1]
    w, psi = int(floats.sum()), int(floats[-1])
    want = WIRE.get(sim.method.name, lambda w, phi, psi, c, d: (w, w))(w, w - psi, psi, tiny.CLASSES, sim.env.model.width)
    if sim.method.name in DECIDES:
        assert M * psi <= down <= M * w and up == M * want[1]
    else:
        assert (down, up) == (M * want[0], M * want[1])


def test_resume_is_exact_and_compiles_once(sim):
    """4 rounds equal 2 + 2 rounds bit for bit; the second segment compiles nothing; odd lengths neither."""
    state, data = start(sim)
    whole, logs, scores = sim.run(state, data, jnp.int32(4))
    half, logs1, _ = sim.run(start(sim)[0], data, jnp.int32(2))
    rest, logs2, scores2 = sim.run(half, data, jnp.int32(2))
    assert same_bits(whole, rest)
    for name in logs:
        assert same_bits(logs[name][:4], jnp.concatenate([logs1[name][:2], logs2[name][:2]]))
    assert same_bits(jax.tree.map(lambda a: a[1], scores), jax.tree.map(lambda a: a[0], scores2))
    sim.run(rest, data, jnp.int32(1))
    assert sim.run._cache_size() == 1


def test_test_data_only_reaches_the_scores(sim):
    """Permuting test labels changes nothing but the reported test accuracies."""
    state, data = start(sim)
    after, logs, scores = sim.run(state, data, jnp.int32(3))
    fed = data.fed
    y = np.array(fed.y)
    rows = np.concatenate([fed.held["test"], *(fed.client_rows(i, "test") for i in range(N))])
    y[rows] = (y[rows] + 1) % tiny.CLASSES
    other = data._replace(fed=dataclasses.replace(fed, y=y))
    after2, logs2, scores2 = sim.run(start(sim)[0], other, jnp.int32(3))
    assert same_bits((after, logs), (after2, logs2))
    assert not same_bits(scores, scores2)
    if "val" in scores:
        assert same_bits(scores["val"], scores2["val"])


@pytest.mark.parametrize(
    "name, options",
    [
        ("fedprox", {"mu": 0.0}),
        ("ditto", {}),
        ("fedavg_ft", {}),
        ("full", {"weights": "size"}),
        ("fedntd", {"beta": 0.0}),
        ("fedsam", {"rho": 0.0}),
        ("fedfa_freq", {"p": 0.0}),
    ],
)
def test_reduces_to_fedavg(name, options):
    """Where the paper says so: the global model equals FedAvg's."""
    base, other = simulation("fedavg"), simulation(name, **options)
    a, b = start(base), start(other)
    for _ in range(2):
        a, b = (base.examine(*a)[0], a[1]), (other.examine(*b)[0], b[1])
    model = lambda sim, s: sim.method.global_model(sim.env, s.server)
    assert tiny.close(model(base, a[0]), model(other, b[0]), 1e-6)


def test_scaffold_first_step_is_fedavg():
    """With zero control variates the first round is FedAvg with plain SGD and uniform weights."""
    scaffold, fedavg = simulation("scaffold"), simulation("fedavg", weights="uniform")
    plain = dataclasses.replace(fedavg.env, optimizer=__import__("optax").identity())
    from fedjax_sim.engine.participation import Participation
    from fedjax_sim.engine.simulation import simulate
    from fedjax_sim.local.optim import schedule

    base = simulate(
        fedavg.method, plain, tiny.federation(), Participation(M, M, tuple(range(N))), lr=schedule("constant", 0.05, 8)
    )
    assert tiny.close(base.examine(*start(base))[0].server, scaffold.examine(*start(scaffold))[0].server.net, 1e-6)
