"""The pieces of the trust-region step against explicit linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import agents
from agents import actor_critic, nets, trpo
from agents import losses as losses_of

S, A, HIDDEN, ROWS = 3, 3, 5, 12


def forward(params, x):
    """The policy network in NumPy: softmax(relu(x W1 + b1) W2 + b2)."""
    layers = jax.tree.map(np.asarray, params["params"])
    h = np.maximum(x @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"], 0)
    z = h @ layers["Dense_1"]["kernel"] + layers["Dense_1"]["bias"]
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def test_fisher_vector_product_equals_the_explicit_fisher_matrix():
    init, apply = nets.mlp((HIDDEN,), A, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (ROWS, S))
    flat, unravel = ravel_pytree(init(jax.random.key(1), x[0]))
    # away from the uniform policy
    flat = flat + 0.5 * jax.random.normal(jax.random.key(2), flat.shape)
    log_p = lambda p: jax.nn.log_softmax(apply(unravel(p), x))
    old = log_p(flat)
    kl = lambda p: (jnp.exp(old) * (old - log_p(p))).sum(-1).mean()
    scores = np.asarray(jax.jacobian(log_p)(flat), np.float64)  # [rows, A, P]
    fisher = np.einsum("ra,rap,raq->pq", np.exp(np.asarray(old, np.float64)), scores, scores) / ROWS
    for seed in range(3):
        v = jax.random.normal(jax.random.key(10 + seed), flat.shape)
        np.testing.assert_allclose(
            trpo.fisher_vector_product(kl, flat, v), fisher @ np.asarray(v), atol=2e-5
        )


def test_step_of_a_quadratic_has_the_radius_of_the_trust_region():
    """With a linear objective and KL = ½ pᵀDp the solution is known: p = √(2δ / gᵀD⁻¹g) D⁻¹g."""
    d, g, delta = np.array([1.0, 4.0, 9.0]), np.array([1.0, -2.0, 3.0]), 0.01
    got = trpo.trust_region_step(
        lambda p: jnp.asarray(g, p.dtype) @ p,
        lambda p: 0.5 * (jnp.asarray(d, p.dtype) * p**2).sum(),
        jnp.zeros(3),
        max_kl=delta,
        damping=1e-9,
        iterations=3,
        backtracks=10,
        shrink=0.8,
    )
    expected = np.sqrt(2 * delta / (g**2 / d).sum()) * g / d
    scale = np.linalg.norm(got) / np.linalg.norm(expected)  # rounding may cost one backtrack
    assert np.isclose(scale, 1, rtol=1e-3) or np.isclose(scale, 0.8, rtol=1e-3)
    np.testing.assert_allclose(got, expected * scale, rtol=1e-3)


def test_a_step_that_leaves_the_trust_region_is_shortened():
    """Away from the start the divergence grows faster than its Hessian says, so the full step is
    too long."""
    kl = lambda p: 0.5 * (p**2).sum() + 100 * (p**4).sum()
    full = np.sqrt(2 * 0.1 / 2)  # g = (1, 1), F = 1: the step is √(2δ/gᵀg)·g
    got = trpo.trust_region_step(
        jnp.sum, kl, jnp.zeros(2), max_kl=0.1, damping=1e-9, iterations=2, backtracks=10, shrink=0.8
    )
    powers = full * 0.8 ** np.arange(11)
    allowed = [p for p in powers if 2 * (0.5 * p**2 + 100 * p**4) <= 0.1]
    assert len(allowed) < 11
    np.testing.assert_allclose(got, allowed[0], rtol=1e-4)  # the first one that fits


def test_a_step_that_only_worsens_is_not_taken():
    start = jnp.ones(2)
    pitfall = lambda p: jnp.where((p == start).all(), p.sum(), p.sum() - 100.0)  # every move loses
    got = trpo.trust_region_step(
        pitfall,
        lambda p: ((p - start) ** 2).sum(),
        start,
        max_kl=0.1,
        damping=0.1,
        iterations=5,
        backtracks=10,
        shrink=0.8,
    )
    np.testing.assert_array_equal(got, start)


@pytest.mark.parametrize("max_kl", [0.01, 0.2])
def test_update_respects_the_kl_bound_and_never_worsens_the_surrogate(max_kl):
    agent = agents.make("trpo", S, A, hidden=(HIDDEN,), max_kl=max_kl, gamma=0.99, normalise=False)
    act = jax.jit(jax.vmap(agent.act, (None, 0, 0)))
    update = jax.jit(agent.update)
    state, rng, moved = agent.init(jax.random.key(0)), np.random.default_rng(1), 0
    for round_ in range(15):
        x, following = rng.normal(size=(2, ROWS, S)).astype(np.float32)
        action, info = act(state, x, jax.random.split(jax.random.key(round_), ROWS))
        reward, done = rng.normal(size=ROWS).astype(np.float32) * 5, rng.random(ROWS) < 0.5
        batch = agents.Transition(
            x, action, jnp.asarray(reward), following, done, jnp.ones(ROWS, bool), info
        )
        new, losses = update(state, batch, jax.random.key(100))
        old_p, new_p = (
            forward(s.learner.params.policy, x).astype(np.float64) for s in (state, new)
        )
        kl = (old_p * np.log(old_p / new_p)).sum(-1).mean()
        value = lambda obs: np.asarray(
            actor_critic.networks(S, A, (HIDDEN,), jnp.float32).value(
                state.learner.params.value, obs
            )
        )
        advantage = reward + 0.99 * (1 - done) * value(following) - value(x)
        advantage = np.asarray(losses_of.standardise(advantage, state.advantages, new.advantages))
        rows = np.arange(ROWS)
        gain = ((new_p / old_p)[rows, np.asarray(action)] * advantage).mean() - advantage.mean()
        assert kl <= max_kl * 1.001 and gain >= -1e-6
        np.testing.assert_allclose(losses["kl"], kl, atol=1e-5)
        np.testing.assert_allclose(losses["policy"], -gain, atol=1e-4)
        moved += gain > 1e-4
        state = new
    assert moved >= 12  # it does take steps
