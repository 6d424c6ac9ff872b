"""The encoder of pFedRLLA: projections without the ambiguity of signs, a loss that falls, groups
that separate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim.methods.pfedrlla import encoder as module
from fedjax_sim.methods.pfedrlla import mhae, pca, project
from fedjax_sim.methods.pfedrlla.encoder import (
    DECAY,
    RATE,
    Mhae,
    features,
    follow,
    make_frame,
    placed,
)

SIDE, WIDE = 8, 24


def some_weights(seed: int = 0, shape=(12, 16)) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * np.linspace(0.5, 2, shape[1])  # singular values apart


def by_svd(weights: np.ndarray, side: int) -> np.ndarray:
    """The definition: left singular vectors of the centred matrix, the entry of largest size
    positive."""
    matrix = weights.T.reshape(side, -1)  # outputs first, as PyTorch stores a layer
    left, sizes, _ = np.linalg.svd(matrix - matrix.mean(0), full_matrices=True)
    left = left * np.sign(left[np.abs(left).argmax(0), np.arange(side)])
    return np.where(np.arange(side) < (sizes > 1e-2 * sizes[0]).sum(), left, 0)


def test_projection_is_the_svds():
    weights = some_weights()
    np.testing.assert_allclose(
        project(jnp.asarray(weights, jnp.float32), SIDE), by_svd(weights, SIDE), atol=2e-4
    )


def test_projection_knows_no_sign_and_no_scale(monkeypatch):
    """A solver that returns every vector with the other sign gives the same F; neither the scale
    nor −A changes it."""
    weights = jnp.asarray(some_weights(1), jnp.float32)
    want = project(weights, SIDE)
    np.testing.assert_allclose(project(3 * weights, SIDE), want, atol=1e-4)
    np.testing.assert_allclose(project(-weights, SIDE), want, atol=1e-4)
    plain = jnp.linalg.eigh
    flips = jnp.where(jnp.arange(SIDE) % 2 == 0, -1.0, 1.0)
    monkeypatch.setattr(jnp.linalg, "eigh", lambda g: (plain(g)[0], plain(g)[1] * flips))
    assert np.array_equal(np.asarray(project(weights, SIDE)), np.asarray(want))


@pytest.mark.parametrize("shape", [(12, 16), (60, 16), (12, 10)], ids=["tall", "wide", "uneven"])
def test_shared_basis_is_the_svds(shape, monkeypatch):
    """Of 3 nets, through either Gram matrix: F_k = A_k V with NumPy's right singular vectors; no
    sign of the solver's."""
    nets = np.stack([some_weights(seed, shape) for seed in range(3)])
    stack = np.stack([w.T.reshape(SIDE, -1) for w in nets])
    stack = stack - stack.mean(1, keepdims=True)
    right = np.linalg.svd(stack.reshape(3 * SIDE, -1), full_matrices=False)[2][:SIDE].T  # [M, side]
    right = right * np.sign(right[np.abs(right).argmax(0), np.arange(SIDE)])
    params = {"fc": {"kernel": jnp.asarray(nets, jnp.float32)}}
    frame, seen = make_frame(params, ("fc",), SIDE)
    np.testing.assert_allclose(frame.basis[0], right, atol=5e-4)
    np.testing.assert_allclose(seen[:, 0], (stack @ right).reshape(3, -1), atol=5e-3)
    one = {"fc": {"kernel": params["fc"]["kernel"][1]}}
    np.testing.assert_allclose(features(one, ("fc",), SIDE, frame), seen[1], atol=1e-4)
    plain = jnp.linalg.eigh
    monkeypatch.setattr(jnp.linalg, "eigh", lambda g: (plain(g)[0], -plain(g)[1]))
    np.testing.assert_array_equal(make_frame(params, ("fc",), SIDE)[0].basis[0], frame.basis[0])


def test_frame_centres_and_follows():
    """What the encoder reads has mean 0 over clients and the size of singular vectors; a round
    renews a tenth of it."""
    params = {
        "fc": {
            "kernel": jnp.asarray(np.stack([some_weights(seed) for seed in range(5)]), jnp.float32)
        }
    }
    frame, seen = make_frame(params, ("fc",), SIDE)
    read = np.asarray(placed(frame, seen))
    np.testing.assert_allclose(read.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(np.square(read).mean(), 1 / SIDE, rtol=1e-4)
    use = jnp.array([True, True, False, False, False])
    moved = follow(frame, seen.at[2:].set(jnp.nan), use)
    np.testing.assert_allclose(moved.centre, 0.9 * frame.centre + 0.1 * seen[:2].mean(0), atol=1e-5)
    want = 0.9 * frame.spread + 0.1 * jnp.square(seen[:2] - moved.centre).mean((0, 2))
    np.testing.assert_allclose(moved.spread, want, rtol=1e-5)
    assert same(frame, follow(frame, seen, jnp.zeros(5, bool)))
    equal = make_frame(
        jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), params), ("fc",), SIDE
    )
    assert (np.abs(np.asarray(placed(*equal))) < 1e-2).all()  # before anybody has trained


def test_sizes_that_do_not_fit_are_filled_up():
    """15 weights on a side of 8: two columns with a zero in the last place; directions without
    weight are 0."""
    weights = some_weights(2, (5, 3))
    matrix = np.append(weights.T.reshape(-1), 0).reshape(SIDE, 2)
    found = np.asarray(project(jnp.asarray(weights, jnp.float32), SIDE))
    left = np.linalg.svd(matrix - matrix.mean(0))[0][:, :2]
    np.testing.assert_allclose(np.abs(found[:, :2]), np.abs(left), atol=1e-4)
    assert (found[:, 2:] == 0).all()


def test_features_are_the_weight_matrices_in_order():
    net = {
        g: {"kernel": jnp.asarray(some_weights(i), jnp.float32), "bias": jnp.ones(16)}
        for i, g in enumerate(("fc1", "fc"))
    }
    found = features(net, ("fc1", "fc"), SIDE)
    assert found.shape == (2, SIDE**2)
    np.testing.assert_array_equal(found[1], project(net["fc"]["kernel"], SIDE).reshape(-1))


def test_default_sizes_are_the_papers():
    functions = mhae()
    encoder = jax.eval_shape(lambda: functions.init(2))
    lstm = lambda inputs, hidden: 4 * hidden * (inputs + hidden + 1)
    want = lstm(1024, 128) + lstm(128, 128) + lstm(128, 1024) + lstm(1024, 1024)
    assert sum(a.size for a in jax.tree.leaves(encoder.params)) == want
    shape = jax.eval_shape(
        functions.embed, encoder, jax.ShapeDtypeStruct((10, 2, 1024), jnp.float32)
    ).shape
    assert shape == (10, 128)


def by_flax(params, x):
    """The loss of ONE client's features by Flax's LSTMs."""
    return jnp.square(Mhae(8, x.shape[-1]).apply(params, x) - x).mean(-1).sum()


@pytest.mark.parametrize("layers, few", [(1, 8), (2, 8), (3, 8), (3, 1)])
def test_training_is_adam_on_flaxs_gradient(layers, few, monkeypatch):
    """One step per client in use, in order; gradients as outer products of a few rows, or as matrix
    products of many."""
    monkeypatch.setattr(module, "FEW", few)
    functions, rng = mhae(4, 8), np.random.default_rng(layers)
    x, use = (
        jnp.asarray(rng.standard_normal((5, layers, 16)), jnp.float32),
        jnp.array([True, False, True, True, False]),
    )
    start = functions.init(layers)
    params, total = start.params, 0.0
    rule = optax.chain(optax.add_decayed_weights(DECAY), optax.adam(RATE))
    state, slope = rule.init(params), jax.jit(jax.value_and_grad(by_flax))
    for one in x[np.asarray(use)]:
        value, found = slope(params, one)
        change, state = rule.update(found, state, params)
        params, total = optax.apply_updates(params, change), total + value
    got = jax.jit(functions.train)(start, x, use)
    for want, have in zip(jax.tree.leaves(params), jax.tree.leaves(got.params), strict=True):
        np.testing.assert_allclose(have, want, atol=2e-5)  # of steps of 5e-3
    np.testing.assert_allclose(got.loss, total / 3, rtol=1e-5)
    np.testing.assert_allclose(functions.loss(params, x[0]), by_flax(params, x[0]), rtol=1e-5)


def test_training_needs_no_room_beside_its_state():
    """Neither a gradient nor a copy of the weights is ever written: 3.9 MB of them, and less than a
    tenth is needed."""
    functions = mhae(16, 64)
    x, use = jax.ShapeDtypeStruct((5, 2, 256), jnp.float32), jax.ShapeDtypeStruct((5,), bool)
    encoder = jax.eval_shape(lambda: functions.init(2))
    used = (
        jax.jit(functions.train, donate_argnums=0)
        .lower(encoder, x, use)
        .compile()
        .memory_analysis()
    )
    size = sum(a.size * 4 for a in jax.tree.leaves(encoder.params))
    assert used.temp_size_in_bytes < 0.1 * size, used.temp_size_in_bytes / size


@pytest.mark.parametrize(
    "side, devices, shared", [(32, 2, True), (32, 4, True), (32, 3, False), (16, 2, False)]
)
def test_what_of_an_encoder_is_shared_out(side, devices, shared):
    """The decoder's 16 matrices, 8 biases and both moments of each, where they are large and can be
    cut evenly."""
    encoder = jax.eval_shape(lambda: mhae(side).init(2))
    split = encoder.shared_out(devices)
    assert jax.tree.structure(split) == jax.tree.structure(encoder)
    chosen = [
        a.shape
        for a, yes in zip(jax.tree.leaves(encoder), jax.tree.leaves(split), strict=True)
        if yes
    ]
    assert chosen.count((1024, 1024)) == 36 * shared and chosen.count((128, 1024)) == 12 * shared
    assert chosen.count((1024,)) == 24 * shared and len(chosen) == 72 * shared


@pytest.fixture(scope="module")
def groups():
    """Heads of three groups: a common start, a direction of the group, a little of their own."""
    rng = np.random.default_rng(3)
    start, centres = rng.standard_normal((WIDE, 16)), 2 * rng.standard_normal((3, WIDE, 16))
    group = np.repeat(np.arange(3), 4)
    heads = start + centres[group] + 0.2 * rng.standard_normal((12, WIDE, 16))
    seen = jax.jit(jax.vmap(lambda h: features({"fc": {"kernel": h}}, ("fc",), SIDE)))(
        jnp.asarray(heads, jnp.float32)
    )
    return group, heads, seen


@pytest.fixture(scope="module")
def small():
    """(functions, compiled train, compiled loss over all clients, compiled embed) of one small
    autoencoder."""
    functions = mhae(SIDE, 8)
    whole = jax.jit(
        lambda params, x: jax.lax.map(lambda one: functions.loss(params, one), x).mean()
    )
    return functions, jax.jit(functions.train), whole, jax.jit(functions.embed)


def test_loss_falls_and_only_used_clients_teach(groups, small):
    _, _, seen = groups
    functions, train, whole, _ = small
    first = train(functions.init(1), seen, jnp.ones(12, bool))
    encoder = first
    for _ in range(60):
        encoder = train(encoder, seen, jnp.ones(12, bool))
    assert float(encoder.loss) < 0.5 * float(first.loss)
    assert float(whole(encoder.params, seen)) < 0.6 * float(whole(first.params, seen))
    some = jnp.arange(12) < 2
    broken = jnp.where(some[:, None, None], seen, jnp.nan)
    assert same(train(first, seen, some), train(first, broken, some))
    assert same(first, train(first, seen, jnp.zeros(12, bool)))


def same(a, b) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_embedding_is_the_sum_and_deterministic(groups, small):
    _, _, seen = groups
    functions, _, _, embed = small
    encoder = functions.init(1)
    twice = [np.asarray(embed(encoder, seen)) for _ in range(2)]
    assert np.array_equal(*twice) and twice[0].shape == (12, 8)
    np.testing.assert_allclose(embed(encoder, seen[3:4])[0], twice[0][3], atol=1e-6)


def test_pca_is_numpys(groups):
    _, heads, _ = groups
    rows = heads.reshape(12, -1)
    left, sizes, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    np.testing.assert_allclose(
        np.abs(pca(jnp.asarray(rows, jnp.float32), 3)),
        np.abs(left[:, :3] * sizes[:3]),
        atol=1e-2 * sizes[0],
    )
