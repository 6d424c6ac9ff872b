"""The ridge bandit: its closed form, what it is sure of, and what it tries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents

GRID = (3, 4)
COSTS = jnp.array([[0, 0, -2, -4], [0, 0, -2, -4], [-1, -1, -3, -5]], jnp.float32).reshape(-1)
FREE = np.asarray(COSTS) == 0  # the largest of them is (1, 1): index 5


def built(**options):
    return agents.make("ridge_bandit", 2 + 12, 12, **{"grid": GRID, "known": True, **options})


def played(agent, reward_of, rounds=200, rows=8, seed=0):
    """(state, actions [rounds, rows], batches) of contexts drawn at random."""

    def one(state, key):
        see, choose, noise, learn = jax.random.split(key, 4)
        x = jnp.concatenate([jax.random.normal(see, (rows, 2)), jnp.tile(COSTS, (rows, 1))], 1)
        action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(choose, rows))
        reward = reward_of(x, action) + 0.3 * jax.random.normal(noise, (rows,))
        batch = agents.Transition(x, action, reward, x, jnp.ones(rows), jnp.ones(rows, bool), info)
        return agent.update(state, batch, learn)[0], batch

    keys = jax.random.split(jax.random.key(seed), rounds)
    return jax.jit(lambda s: jax.lax.scan(one, s, keys))(agent.init(jax.random.key(0)))


def test_weights_are_those_of_a_ridge_regression():
    agent = built(ridge=2.0)
    state, seen = played(agent, lambda x, a: x[:, 0] + 0.1 * (a % 4), rounds=30)
    x, action, reward = (
        np.asarray(a, np.float64).reshape(240, *a.shape[2:])
        for a in (seen.observation, seen.action, seen.reward)
    )
    action = action.astype(int)
    phi = np.concatenate([x[:, :2], np.eye(3)[action // 4], np.eye(4)[action % 4]], 1)
    inverse = np.linalg.inv(phi.T @ phi + 2 * np.eye(9))
    want = inverse @ phi.T @ reward
    weights, found, noise = agent.fitted(state.learner)
    np.testing.assert_allclose(weights, want, atol=2e-3)
    np.testing.assert_allclose(found, inverse, atol=1e-4)
    left = (reward**2).sum() - want @ phi.T @ reward
    np.testing.assert_allclose(noise, left / (240 - 9), rtol=1e-2)


def test_without_a_sure_gain_the_largest_free_action_is_taken():
    """Rewards that do not depend on the action: it stays at (1, 1), whatever the noise says."""
    agent = built()
    state, seen = played(agent, lambda x, a: x[:, 0], rounds=100)
    assert (np.asarray(seen.action)[-20:] == 5).mean() > 0.95
    assert int(state.rounds) == 100


def test_a_gain_that_is_sure_moves_it_and_costs_are_exact():
    """The second part's first choice is better by 1: (1, 0). A gain of 1.5 in the first part's last
    choice outweighs its cost of 1; a gain of 0.5 does not."""
    better = lambda gain: lambda x, a: (a % 4 == 0) * 1.0 + (a // 4 == 2) * gain
    state, seen = played(built(), better(0.0))
    assert (np.asarray(seen.action)[-20:] == 4).mean() > 0.95
    for gain, want in ((1.5, 8), (0.5, 4)):
        # nothing beyond the free ones is ever tried; told what it is worth, it knows
        agent = built(epsilon_start=0.0)
        transition = agents.Transition(
            *(jnp.concatenate([jnp.zeros((960, 2)), jnp.tile(COSTS, (960, 1))], 1),
              action := jnp.arange(960) % 12, better(gain)(None, action)),
            jnp.zeros((960, 14)), jnp.ones(960), jnp.ones(960, bool),
        )  # fmt: skip
        state = agent.update(agent.init(jax.random.key(0)), transition, jax.random.key(1))[0]
        x = jnp.append(jnp.zeros(2), COSTS)
        assert int(agent.act(state, x, jax.random.key(2))[0]) == want, gain


def test_it_tries_free_actions_only():
    agent = built(epsilon_start=1.0, epsilon_decay=1.0)
    _, seen = played(agent, lambda x, a: 0.0 * a, rounds=50)
    tried = np.unique(np.asarray(seen.action))
    assert set(tried) == set(np.flatnonzero(FREE))
    nothing_free = jnp.append(jnp.zeros(2), COSTS - 1)
    policy = agent.act(agent.init(jax.random.key(0)), nothing_free, jax.random.key(1))[1].policy
    assert (np.asarray(policy)[~FREE] == 0).all()  # the cheapest ones then


def test_rows_that_teach_nothing_change_nothing():
    agent = built()
    state, seen = played(agent, lambda x, a: x[:, 0], rounds=3)
    last = jax.tree.map(lambda a: a[-1], seen)
    masked = last._replace(mask=jnp.zeros(8, bool), reward=jnp.full(8, jnp.nan))
    after, losses = agent.update(state, masked, jax.random.key(0))
    for old, new in zip(state.learner, after.learner, strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(after.rounds) == 4 and all(np.isfinite(v) for v in losses.values())


def test_mistakes_are_said():
    with pytest.raises(ValueError, match=r"grid .* has 6 actions, not 12"):
        agents.make("ridge_bandit", 20, 12, grid=(2, 3))
    with pytest.raises(ValueError, match="the last 12 numbers of an observation are known values"):
        agents.make("ridge_bandit", 12, 12, known=True)
