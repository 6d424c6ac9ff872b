"""What every learning agent promises: reproducible, resumable, vmappable, compiled once, unspoiled
by bad input.

Two programs per agent are compiled (a short training run and one update); all properties are data
driven.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents

S, A, ROWS, ROUNDS = 3, 4, 6, 8
REPLAY = {"batch": 8, "gradient_steps": 2, "capacity": 32}
OPTIONS = {
    "sac": REPLAY,
    "dqn": {**REPLAY, "target_every": 3},
    "q_bandit": REPLAY,
    "ddpg": {**REPLAY, "bootstrap": True},
    "a2c": {},
    "ppo": {"cohort": 8},
    "trpo": {},
}
every_agent = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(autouse=True)
def traced_once():
    """`train` and `update` may be traced once in a test; chex counts all agents together."""
    chex.clear_trace_counter()


def build(name, **more):
    return agents.make(name, S, A, **{"hidden": (8,), **OPTIONS[name], **more})


def random_batch(agent, state, key, rows=ROWS):
    """Acts on random observations; rewards prefer small actions, a third of the episodes end."""
    see, choose, end = jax.random.split(key, 3)
    x, following = jax.random.normal(see, (2, rows, S))
    action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(choose, rows))
    reward = x[:, 0] - (action if action.ndim == 1 else action @ jnp.arange(A, dtype=x.dtype))
    return agents.Transition(
        x,
        action,
        reward,
        following,
        jax.random.bernoulli(end, 0.3, (rows,)),
        jnp.ones(rows, bool),
        info,
    )


def training(name):
    """train(key, lr) -> (state, losses), not compiled."""

    def train(key, lr):
        agent = build(name, lr=lr)  # the learning rate is traced

        def one_round(state, key):
            batch_key, key = jax.random.split(key)
            return agent.update(state, random_batch(agent, state, batch_key), key)

        return jax.lax.scan(
            one_round, agent.init(key), jax.random.split(jax.random.fold_in(key, 1), ROUNDS)
        )

    return train


@functools.cache
def programs(name):
    """(agent, train, update, batches), the last three compiled."""
    agent = build(name)
    once = lambda fn: jax.jit(chex.assert_max_traces(fn, n=1))
    draw = functools.partial(random_batch, agent)
    return agent, once(training(name)), once(agent.update), jax.jit(draw)


@functools.cache
def situation(name):
    """A trained state and a fresh batch for it."""
    _, train, _, draw = programs(name)
    state, _ = train(jax.random.key(0), 0.01)
    return state, draw(state, jax.random.key(3))


def same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def close(left, right, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def differs(left, right):
    return any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def all_finite(tree):
    return all(np.isfinite(np.asarray(x, float)).all() for x in jax.tree.leaves(tree))


@every_agent
def test_seeds(name):
    _, train, _, _ = programs(name)
    state, losses = train(jax.random.key(0), 0.01)
    same_bits((state, losses), train(jax.random.key(0), 0.01))
    assert differs(state.learner, train(jax.random.key(1), 0.01)[0].learner)
    assert all_finite((state, losses)) and int(state.rounds) == ROUNDS


@every_agent
def test_vmapped_seeds_and_learning_rates_equal_separate_runs(name):
    _, train, _, _ = programs(name)
    keys, rates = jax.random.split(jax.random.key(4), 3), jnp.array([0.01, 0.002, 0.05])
    together = jax.jit(jax.vmap(training(name)))(keys, rates)
    for i in range(3):
        # rounding grows in TRPO's ill-conditioned linear system (in float64 the difference is below
        # 1e-8)
        close(
            jax.tree.map(lambda x: x[i], together),
            train(keys[i], rates[i]),
            1e-4 if name == "trpo" else 1e-5,
        )


@every_agent
def test_update_is_traced_once_and_keeps_types(name):
    agent, _, update, draw = programs(name)
    state = agent.init(jax.random.key(0))
    described = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for i in range(3):
        state, losses = update(state, draw(state, jax.random.key(i)), jax.random.key(i))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == described
        assert all(loss.shape == () for loss in losses.values())


@every_agent
def test_diagnostics_tell_a_living_network_from_a_dead_one(name):
    _, _, update, _ = programs(name)
    state, batch = situation(name)
    networks = {"live_critic"} if name in ("dqn", "q_bandit") else {"live_critic", "live_policy"}
    numbers = {"sensitivity", "value_error"} | networks | ({"entropy"} if name != "ddpg" else set())
    _, values = update(state, batch, jax.random.key(5))
    assert numbers <= set(values) and values["value_error"] > 0
    assert all(0 < float(values[key]) <= 1 for key in numbers - {"value_error", "sensitivity"})
    assert 0 <= float(values["sensitivity"]) <= 1
    if "live_policy" in networks:  # the greedy action of six states may well be the same
        assert float(values["sensitivity"]) > 0
    assert ("temperature" in values) == (name == "sac")

    def kill(path, x):  # every hidden unit far below zero
        hidden = "Dense_0" in jax.tree_util.keystr(path) and "bias" in jax.tree_util.keystr(path)
        return x - 1e6 if hidden and "optimiser" not in jax.tree_util.keystr(path) else x

    dead = state._replace(learner=jax.tree_util.tree_map_with_path(kill, state.learner))
    _, values = update(dead, batch, jax.random.key(5))
    assert all(float(values[key]) == 0 for key in networks)
    np.testing.assert_allclose(values["sensitivity"], 0, atol=1e-6)


@every_agent
def test_checkpoint_round_trip(name, tmp_path):
    _, _, update, _ = programs(name)
    state, batch = situation(name)
    leaves, tree = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *[np.asarray(leaf) for leaf in leaves])
    with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
        restored = tree.unflatten([jnp.asarray(file[f"arr_{i}"]) for i in range(len(leaves))])
    same_bits(update(state, batch, jax.random.key(5)), update(restored, batch, jax.random.key(5)))


@every_agent
def test_masked_rows_teach_nothing(name):
    _, _, update, _ = programs(name)
    state, batch = situation(name)
    masked = batch._replace(mask=jnp.array([True, False, True, True, False, False]))
    clean, _ = update(state, masked, jax.random.key(5))
    assert differs(clean.learner, state.learner)
    # 1. with any values in the masked rows
    garbage = lambda x: np.where(
        np.reshape(masked.mask, (-1,) + (1,) * (x.ndim - 1)), x, np.asarray(7, x.dtype)
    )
    filled = jax.tree.map(garbage, masked)._replace(mask=masked.mask)
    same_bits(clean, update(state, filled, jax.random.key(5))[0])
    # 2. a row with a NaN anywhere is a masked row
    for field in ("reward", "observation", "next_observation"):
        spoiled = np.array(getattr(batch, field))
        spoiled[1, ...], spoiled[4, ...], spoiled[5, ...] = np.nan, np.inf, -np.inf
        same_bits(clean, update(state, batch._replace(**{field: spoiled}), jax.random.key(5))[0])
    action = np.array(batch.action)
    action[[1, 4, 5]] = np.nan if name == "ddpg" else A
    same_bits(clean, update(state, batch._replace(action=action), jax.random.key(5))[0])
    # 3. wherever the masked rows stand
    order = np.array([1, 4, 0, 2, 5, 3])
    moved = jax.tree.map(lambda x: np.asarray(x)[order], masked)
    close(clean.learner, update(state, moved, jax.random.key(5))[0].learner)


@every_agent
def test_a_round_without_valid_rows_changes_only_the_round(name):
    agent, _, update, _ = programs(name)
    state, batch = situation(name)
    for learn, nothing in (
        (update, batch._replace(mask=jnp.zeros(ROWS, bool))),
        (update, batch._replace(reward=jnp.full(ROWS, jnp.nan))),
        (jax.jit(agent.update), jax.tree.map(lambda x: np.asarray(x)[:0], batch)),
    ):
        new, losses = learn(state, nothing, jax.random.key(5))
        same_bits(new._replace(rounds=state.rounds), state)
        assert int(new.rounds) == ROUNDS + 1 and all_finite(losses)


@every_agent
def test_extreme_numbers_never_make_a_nan_policy(name):
    agent, _, update, _ = programs(name)
    state, batch = situation(name)
    for huge in (
        batch._replace(reward=jnp.full(ROWS, 3e38)),
        batch._replace(observation=batch.observation * 1e37),
        batch._replace(reward=jnp.array([1e20, -1e20, 0, 1, 1e-30, -3e38])),
    ):
        new, losses = update(state, huge, jax.random.key(5))
        new, losses = update(new, batch, jax.random.key(6))
        assert all_finite((new, losses))
    strange = jnp.array([[jnp.nan, 0, jnp.inf], [3e38, -3e38, 3e38], [0, 0, 0]])
    action, info = jax.jit(jax.vmap(agent.act, (None, 0, None)))(state, strange, jax.random.key(0))
    assert all_finite((action, info.policy, info.log_probability))


@every_agent
def test_unavailable_actions_are_never_chosen(name):
    agent, _, _, _ = programs(name)
    state, batch = situation(name)
    available = jnp.array([False, True, False, True])
    act = jax.jit(jax.vmap(agent.act, (None, None, 0, None)))
    keys = jax.random.split(jax.random.key(0), 200)
    action, info = act(state, batch.observation[0], keys, available)
    if name == "ddpg":
        assert (action[:, ~available] == 0).all()
        np.testing.assert_allclose(action.sum(-1), 1, rtol=1e-5)
    else:
        assert set(np.asarray(action)) == {1, 3}
        chosen = np.asarray(info.policy)[np.arange(200), action]
        np.testing.assert_allclose(np.exp(info.log_probability), chosen, rtol=1e-4)
    assert (info.policy[:, ~available] == 0).all()
    np.testing.assert_allclose(info.policy.sum(-1), 1, rtol=1e-5)
    everything, nothing = (
        act(state, batch.observation[0], keys, jnp.full(A, yes)) for yes in (True, False)
    )
    same_bits(everything, nothing)


@every_agent
def test_wrong_shapes_are_rejected(name):
    agent, _, _, _ = programs(name)
    state, batch = situation(name)
    batch = jax.tree.map(np.asarray, batch)
    for field, wrong in (
        ("observation", batch.observation[:, :2]),
        ("reward", batch.reward[:3]),
        ("reward", batch.reward[:, None]),
        ("mask", batch.mask[:, None]),
        ("action", batch.action[:, None]),
    ):
        with pytest.raises(AssertionError):
            jax.eval_shape(agent.update, state, batch._replace(**{field: wrong}), jax.random.key(0))
    with pytest.raises(AssertionError):
        agent.act(state, jnp.zeros(S + 1), jax.random.key(0))
    with pytest.raises(AssertionError):
        agent.act(state, jnp.zeros(S), jax.random.key(0), jnp.ones(A + 1, bool))


@every_agent
def test_float64_stays_float64_and_float32_stays_float32(name):
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.float32):
            agent = build(name, dtype=dtype)
            state = jax.eval_shape(agent.init, jax.random.key(0))
            batch = jax.eval_shape(functools.partial(random_batch, agent), state, jax.random.key(0))
            new, losses = jax.eval_shape(agent.update, state, batch, jax.random.key(0))
            described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
            assert described(new) == described(state)
            dtypes = {x.dtype for x in jax.tree.leaves((new, losses))}
            assert {d for d in dtypes if jnp.issubdtype(d, jnp.floating)} == {jnp.dtype(dtype)}
    with pytest.raises(ValueError, match="jax_enable_x64"):
        build(name, dtype=jnp.float64)


@pytest.mark.parametrize("name", ["sac", "dqn", "q_bandit", "ddpg"])
def test_replay_agents_wait_for_a_full_minibatch(name):
    agent, _, update, draw = programs(name)
    start = agent.init(jax.random.key(0))
    # 6 stored, 8 needed
    first, _ = update(start, draw(start, jax.random.key(1)), jax.random.key(2))
    same_bits(first.learner, start.learner)
    assert int(first.replay.size) == ROWS
    second, _ = update(first, draw(first, jax.random.key(3)), jax.random.key(4))
    assert differs(second.learner, first.learner)
