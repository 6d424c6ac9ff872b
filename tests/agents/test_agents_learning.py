"""What agents learn at their shipped defaults, within the budget of federated control: 10
transitions a round."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
from agents.sac import LOG_ALPHA_BOUNDS

S, A, ROWS, ROUNDS, PLANNED, SEEDS = 8, 3, 10, 300, 105, 3
LEARNERS = ("sac", "dqn", "a2c", "ppo", "trpo")


def play(agent, rounds, key):
    """Rewards [rounds] and diagnostics of a contextual bandit: 0.1 for the action of the largest
    entry, else 0."""

    def one_round(state, key):
        see, choose, learn = jax.random.split(key, 3)
        x, following = jax.random.normal(see, (2, ROWS, S))
        action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(choose, ROWS))
        reward = 0.1 * (action == x[:, :A].argmax(-1))
        batch = agents.Transition(
            x, action, reward, following, jnp.zeros(ROWS), jnp.ones(ROWS, bool), info
        )
        state, values = agent.update(state, batch, learn)
        return state, (reward.mean(), values)

    return jax.lax.scan(
        one_round, agent.init(key), jax.random.split(jax.random.fold_in(key, 1), rounds)
    )[1]


@functools.cache
def played(name):
    agent = agents.make(name, S, A)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(functools.partial(play, agent, ROUNDS)))(keys))


@pytest.mark.parametrize("name", LEARNERS)
def test_defaults_beat_random_within_the_planned_rounds(name):
    """A random policy earns a third of 0.1 (600 draws: standard error 0.002); 0.04 is more than
    three errors above."""
    rewards, values = played(name)
    last = rewards[:, PLANNED - 20 : PLANNED].mean()
    print(name, last, {key: value[:, PLANNED].mean().round(4) for key, value in values.items()})
    assert last > (0.04 if name == "a2c" else 0.055)  # A2C takes a single step per round
    # different contexts get different policies
    assert values["sensitivity"][:, PLANNED].mean() > 0.05


@pytest.mark.parametrize("name", LEARNERS)
def test_networks_stay_alive_at_defaults(name):
    _, values = played(name)
    for key in ("live_critic", "live_policy"):
        if key in values:
            assert (values[key][:, -1] > 0.8).all(), key


def test_the_temperature_stays_inside_its_bounds():
    _, values = played("sac")
    log_alpha = np.log(values["temperature"])
    assert (log_alpha > LOG_ALPHA_BOUNDS[0] + 3).all() and (
        log_alpha < LOG_ALPHA_BOUNDS[1] - 3
    ).all()
    assert np.ptp(log_alpha) > 0.1  # it does move


@pytest.mark.parametrize("sure", [False, True])
def test_the_temperature_moves_towards_the_wanted_entropy(sure):
    """A nearly uniform policy is too random: α falls. A policy that always takes action 0 is not
    random enough: α grows, at the pace of the learning rate however small α is."""
    agent = agents.make("sac", S, A, batch=8, capacity=32, gradient_steps=4, alpha=1e-3)
    state = agent.init(jax.random.key(0))
    if sure:
        policy = jax.tree.map(jnp.copy, state.learner.policy)
        policy["params"]["Dense_1"]["bias"] = jnp.array([20.0, 0.0, 0.0])
        state = state._replace(learner=state.learner._replace(policy=policy))
    x = jax.random.normal(jax.random.key(1), (8, S))
    batch = agents.Transition(
        x, jnp.zeros(8, int), jnp.zeros(8), x, jnp.zeros(8), jnp.ones(8, bool)
    )
    after, _ = jax.jit(agent.update)(state, batch, jax.random.key(2))
    moved = float(after.learner.log_alpha - state.learner.log_alpha)
    np.testing.assert_allclose(moved, 4e-3 if sure else -4e-3, rtol=1e-2)  # four Adam steps of 1e-3


@pytest.mark.parametrize("name", ["a2c", "ppo", "trpo"])
def test_a_reward_common_to_a_round_changes_the_policy(name):
    """Standardising over one round would remove it; over the rounds, a good round makes its actions
    more likely."""
    agent = agents.make(name, S, A)
    act, update = jax.jit(jax.vmap(agent.act, (None, 0, 0))), jax.jit(agent.update)
    state = agent.init(jax.random.key(0))
    for t in range(2):  # in the first round and later
        x, following = jax.random.normal(jax.random.key(t), (2, ROWS, S))
        action, info = act(state, x, jax.random.split(jax.random.key(9), ROWS))
        own = 0.1 * jax.random.normal(jax.random.key(t + 5), (ROWS,))
        batch = agents.Transition(
            x, action, own, following, jnp.zeros(ROWS), jnp.ones(ROWS, bool), info
        )
        likely = {}
        for common in (-0.5, 0.5):
            after, _ = update(state, batch._replace(reward=own + common), jax.random.key(3))
            policy = act(after, x, jax.random.split(jax.random.key(9), ROWS))[1].policy
            likely[common] = float(np.log(policy[jnp.arange(ROWS), action]).mean())
        assert likely[0.5] > float(info.log_probability.mean()) > likely[-0.5]
        state, _ = update(state, batch, jax.random.key(4))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_literal_rate_of_the_paper_is_selectable(optimizer):
    """0.05 by either optimiser; an SGD step is the rate times the clipped gradient, an Adam step
    the rate itself."""
    agent = agents.make(
        "a2c", S, A, optimizer=optimizer, lr=0.05, gamma=0.99, normalise=False, max_grad_norm=1e-3
    )
    state = agent.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (ROWS, S))
    action, info = jax.vmap(agent.act, (None, 0, 0))(
        state, x, jax.random.split(jax.random.key(2), ROWS)
    )
    batch = agents.Transition(x, action, x[:, 0], x, jnp.ones(ROWS), jnp.ones(ROWS, bool), info)
    after, _ = jax.jit(agent.update)(state, batch, jax.random.key(3))
    moves = jax.tree.map(lambda a, b: a - b, after.learner.params, state.learner.params)
    largest = max(float(jnp.abs(m).max()) for m in jax.tree.leaves(moves))
    length = np.sqrt(sum(float((m**2).sum()) for m in jax.tree.leaves(moves)))
    if optimizer == "adam":
        np.testing.assert_allclose(largest, 0.05, rtol=1e-2)
    else:
        np.testing.assert_allclose(length, 0.05 * 1e-3, rtol=1e-2)
