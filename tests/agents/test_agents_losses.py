"""Losses against numbers worked out by hand, and gradients against finite differences of NumPy
versions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import losses, nets

LOG2 = np.log(2.0)


def test_hand_worked_numbers():
    three_to_one = jnp.log(jnp.array([0.75, 0.25]))
    close = lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-6)
    close(losses.td_target(jnp.array(1.0), jnp.array(0.0), jnp.array(4.0), 0.5), 3.0)
    close(losses.td_target(jnp.array(1.0), jnp.array(1.0), jnp.array(4.0), 0.5), 1.0)
    # the online network prefers action 1, whose target value is 10
    close(
        losses.double_q_target(
            jnp.array(1.0),
            jnp.array(0.0),
            jnp.array([0.0, 5.0, 1.0]),
            jnp.array([99.0, 10.0, 50.0]),
            0.9,
        ),
        10.0,
    )
    # ¾·4 + ¼·8 = 5, entropy of (¾, ¼) = 2 log 2 − ¾ log 3
    entropy = 2 * LOG2 - 0.75 * np.log(3)
    close(losses.soft_value(three_to_one, jnp.array([4.0, 8.0]), jnp.array(0.0)), 5.0)
    close(losses.soft_value(three_to_one, jnp.array([4.0, 8.0]), jnp.array(2.0)), 5 + 2 * entropy)
    close(
        losses.soft_policy_loss(three_to_one, jnp.array([4.0, 8.0]), jnp.array(2.0)),
        -5 - 2 * entropy,
    )
    # −log ½ · (0.4 − 0.9)
    close(losses.temperature_loss(jnp.log(0.5), jnp.array(0.9), jnp.array(0.4)), -0.5 * LOG2)
    close(losses.policy_gradient_loss(jnp.array(-2.0), jnp.array(3.0)), 6.0)
    close(losses.surrogate(jnp.log(0.6), jnp.log(0.3), jnp.array(-2.0)), -4.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # unchanged policy
        (1.5, 2.0, -2.4),  # good action, already more likely: cut at 1.2
        (1.5, -2.0, 3.0),  # bad action made more likely: not cut, the gradient must bring it back
        (0.5, 2.0, -1.0),  # good action made less likely: not cut
        (0.5, -2.0, 1.6),  # bad action, already less likely: cut at 0.8
    ],
)
def test_clipped_surrogate_table(ratio, advantage, expected):
    got = losses.clipped_surrogate_loss(jnp.log(ratio), jnp.array(0.0), jnp.array(advantage), 0.2)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_masked_reductions():
    x, mask = jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])
    np.testing.assert_allclose(losses.masked_mean(x, mask), 2.0)
    assert losses.masked_mean(x, jnp.zeros(3, bool)) == 0


def test_advantages_are_standardised_over_rounds():
    """Round one: (1, 3) around 0, root mean square √5. Round two: (4, 6) around the mean 2 of round
    one."""
    every, half = jnp.ones(2, bool), jnp.array(0.5)
    close = lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-5)
    start, one, two = losses.no_moments(jnp.float32), jnp.array([1.0, 3.0]), jnp.array([4.0, 6.0])
    first = losses.follow(start, one, every, half)
    close(losses.standardise(one, start, first), np.array([1, 3]) / np.sqrt(5))
    second = losses.follow(first, two, every, half)
    # squares (½·½·5 + ½·10) over the weight ½·½ + ½ = ¾
    close(losses.standardise(two, first, second), np.array([2, 4]) / np.sqrt((1.25 + 5) / 0.75))
    close(losses.middle(second), (0.5 * 0.5 * 2 + 0.5 * 5) / 0.75)
    # nothing valid, or an overflow: as before; equal advantages do not explode
    assert losses.follow(second, two, ~every, half) == second
    assert losses.follow(second, jnp.array([3e38, 0.0]), every, half) == second
    equal = jnp.full(2, 7.0)
    close(losses.standardise(equal, start, losses.follow(start, equal, every, half)), [1, 1])


# NumPy versions, written from the equations; `x` is what the gradient is taken with respect to
def _log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


_q, _adv, _old = (
    np.array([0.3, -1.2, 2.0]),
    np.array([1.5, -0.7, 0.2]),
    np.array([-1.0, -1.3, -0.9]),
)


def _np_soft_policy(x):
    log_p = _log_softmax(x)
    return (np.exp(log_p) * (0.4 * log_p - _q)).sum()


def _np_clipped(x):
    ratio = np.exp(x - _old)
    return -np.minimum(ratio * _adv, np.clip(ratio, 0.8, 1.2) * _adv).sum()


CASES = {
    "soft policy": (
        np.array([0.1, -0.4, 0.9]),
        _np_soft_policy,
        lambda x: losses.soft_policy_loss(x, jnp.asarray(_q), jnp.asarray(0.4)),
    ),
    "temperature": (
        np.array([-0.7]),
        lambda x: -(x * (0.5 - 0.9)).sum(),
        lambda x: losses.temperature_loss(x[0], jnp.asarray(0.9), jnp.asarray(0.5)),
    ),
    "policy gradient": (
        np.array([-1.0, -0.5, -2.0]),
        lambda x: -(x * _adv).sum(),
        lambda x: jax.vmap(losses.policy_gradient_loss)(x, jnp.asarray(_adv)).sum(),
    ),
    "surrogate": (
        np.array([-1.1, -1.0, -0.4]),
        lambda x: (np.exp(x - _old) * _adv).sum(),
        lambda x: jax.vmap(losses.surrogate)(x, jnp.asarray(_old), jnp.asarray(_adv)).sum(),
    ),
    "clipped surrogate": (
        np.array([-1.05, -1.9, -0.4]),
        _np_clipped,
        lambda x: jax.vmap(losses.clipped_surrogate_loss, (0, 0, 0, None))(
            x, jnp.asarray(_old), jnp.asarray(_adv), 0.2
        ).sum(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name):
    point, numpy_loss, jax_loss = CASES[name]
    step = 1e-6
    slopes = [
        (numpy_loss(point + step * e) - numpy_loss(point - step * e)) / (2 * step)
        for e in np.eye(len(point))
    ]
    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(jax_loss)(jnp.asarray(point))
        assert gradient.dtype == jnp.float64
    np.testing.assert_allclose(value, numpy_loss(point), rtol=1e-12)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-8)


def test_what_is_held_fixed_has_no_gradient():
    zero = lambda f, x: np.testing.assert_array_equal(jax.grad(f)(x), np.zeros_like(x))
    zero(lambda q: losses.soft_policy_loss(jnp.zeros(2), q, jnp.array(0.3)), jnp.array([1.0, 2.0]))
    zero(lambda h: losses.temperature_loss(jnp.array(0.1), h, jnp.array(0.3)), jnp.array(0.7))
    zero(lambda v: losses.td_target(jnp.array(0.1), jnp.array(0.0), v, 0.9), jnp.array(0.7))
    zero(lambda a: losses.policy_gradient_loss(jnp.array(-1.0), a), jnp.array(0.7))
    zero(lambda o: losses.surrogate(jnp.array(-1.0), o, jnp.array(1.0)), jnp.array(-1.2))


def test_exact_expectations_equal_monte_carlo():
    """SAC sums over actions; sampling them instead gives the same value and the same policy
    gradient."""
    rng = np.random.default_rng(0)
    logits, q, alpha = np.array([0.2, -0.6, 1.0]), np.array([1.0, 3.0, -0.5]), 0.3
    p = np.exp(logits) / np.exp(logits).sum()
    actions = rng.choice(3, 400_000, p=p)
    per_sample = q[actions] - alpha * np.log(p[actions])
    exact = losses.soft_value(jnp.asarray(logits), jnp.asarray(q), jnp.asarray(alpha))
    error = 4 * per_sample.std() / np.sqrt(len(actions))
    assert abs(exact - per_sample.mean()) < error
    # score-function estimate of ∇ E_a[α log π(a) − Q(a)] with respect to the logits
    score = np.eye(3)[actions] - p
    estimate = -per_sample[:, None] * score
    gradient = jax.grad(losses.soft_policy_loss)(
        jnp.asarray(logits), jnp.asarray(q), jnp.asarray(alpha)
    )
    assert (abs(gradient - estimate.mean(0)) < 4 * estimate.std(0) / np.sqrt(len(actions))).all()


def test_wrong_shapes_are_rejected():
    with pytest.raises(AssertionError):
        losses.soft_value(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.array(0.1))
    with pytest.raises(AssertionError):
        losses.double_q_target(jnp.zeros(()), jnp.zeros(()), jnp.zeros(3), jnp.zeros(4), 0.9)


def test_running_statistics_equal_numpy():
    rng = np.random.default_rng(2)
    statistics, kept = nets.no_statistics(3, jnp.float32), []
    # nothing seen yet
    np.testing.assert_array_equal(nets.normalise(statistics, jnp.ones(3)), np.ones(3))
    for size in (4, 1, 7):
        x, mask = rng.normal(3, 2, (size, 3)).astype(np.float32), rng.random(size) < 0.7
        statistics = nets.observe(statistics, jnp.asarray(x), jnp.asarray(mask))
        kept.append(x[mask])
    kept = np.concatenate(kept)
    np.testing.assert_allclose(statistics.mean, kept.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics.spread, kept.var(0) * len(kept), rtol=1e-4)
    x = rng.normal(3, 2, 3).astype(np.float32)
    np.testing.assert_allclose(
        nets.normalise(statistics, x), (x - kept.mean(0)) / kept.std(0), rtol=1e-4
    )


def test_epsilon_greedy_probabilities():
    values, available = jnp.array([1.0, 9.0, 3.0, 2.0]), jnp.array([True, False, True, True])
    np.testing.assert_allclose(
        nets.epsilon_greedy(values, available, 0.3), [0.1, 0.0, 0.8, 0.1], rtol=1e-6
    )


def test_network_starts_near_zero():
    init, apply = nets.mlp((64,), 3, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (200, 103))
    out = apply(init(jax.random.key(0), x[0]), x)
    assert 0 < np.abs(out).max() < 0.1  # LeCun × 0.01: a near-uniform policy
