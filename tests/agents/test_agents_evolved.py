"""A policy that an evolution strategy found: a function of a vector of parameters, nothing more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents


def test_output_is_the_network_of_its_parameters():
    agent = agents.make("evolved", 3, 2, hidden=(4,), continuous=True, rest=0.5)
    rng = np.random.default_rng(0)
    w1, b1, w2, b2 = (rng.normal(size=s) for s in ((3, 4), (4,), (4, 2), (2,)))
    flat = np.concatenate([a.ravel() for a in (w1, b1, w2, b2)]).astype(np.float32)
    assert flat.shape == agent.init(jax.random.key(0)).parameters.shape
    seen = rng.normal(size=3)
    expected = 0.5 + np.tanh(seen @ w1 + b1) @ w2 + b2
    np.testing.assert_allclose(agent.output(jnp.asarray(flat), jnp.asarray(seen)), expected, 1e-5)
    bare = agents.make("evolved", 3, 2, hidden=(4,), continuous=True, rest=0.5, bias=False)
    assert bare.num_parameters == agent.num_parameters - 2
    less = bare.output(jnp.asarray(flat[:-2]), jnp.asarray(seen))
    np.testing.assert_allclose(less, expected - b2, 1e-5)
    state = agent.init(jax.random.key(0))._replace(parameters=jnp.asarray(flat))
    action, info = agent.act(state, jnp.asarray(seen), jax.random.key(1))
    np.testing.assert_allclose(action, np.clip(expected, -1, 1), 1e-5)
    np.testing.assert_array_equal(info.policy, action)


def test_discrete_takes_the_best_that_is_allowed_and_never_learns():
    agent = agents.make("evolved", 1, 3)
    state = agent.init(jax.random.key(0))
    best = state._replace(parameters=jnp.array([0.0, 0, 0, 1, 3, 2]))  # weights, then biases
    pick = lambda available: int(agent.act(best, jnp.ones(1), jax.random.key(0), available)[0])
    assert pick(None) == 1 and pick(jnp.array([True, False, True])) == 2
    assert agent.update(best, None, jax.random.key(0)) == (best, {})
    with pytest.raises(ValueError, match="never learns"):
        agents.make("evolved", 1, 3, frozen=False)
