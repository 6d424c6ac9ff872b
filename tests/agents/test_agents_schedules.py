"""Schedules, registry, fixed policies, and the two problems of the federated methods: simplex and
budgets."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
from agents.fixed import Fixed, Uniform
from agents.registry import options


def test_importing_the_package_is_cheap():
    code = (
        "import sys, agents; agents.DESCRIPTIONS; "
        "print([m for m in ('jax', 'optax', 'distrax', 'flax', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_registry_lists_and_builds_every_agent():
    assert (
        set(agents.NAMES)
        == set(agents.DESCRIPTIONS)
        >= {"sac", "dqn", "a2c", "ppo", "trpo", "ddpg", "q_bandit", "random"}
    )
    for name in agents.NAMES:
        assert agents.make(name, 3, 2).name == name
    defaults = options("sac")
    assert defaults["hidden"] == (64,) and defaults["tau"] == 0.005 and defaults["alpha"] == 0.01
    for name in ("sac", "dqn", "a2c", "ppo", "trpo"):
        wanted = {"optimizer": "adam", "lr": 1e-3, "gamma": 0.9, "normalise": True, "hidden": (64,)}
        assert wanted.items() <= options(name).items()
    for name in agents.LEARNERS:
        closed_form = name == "ridge_bandit"
        assert closed_form or {"optimizer", "lr"} <= set(options(name))


def test_registry_says_what_kind_an_agent_is():
    assert tuple(agents.CONTINUOUS) == ("ddpg",) and set(agents.DISCRETE) == set(agents.NAMES) - {
        "ddpg"
    }
    assert set(agents.NAMES) - set(agents.LEARNERS) == {"random", "fixed", "evolved"}
    for name in agents.NAMES:
        agent = agents.make(name, 3, 2)
        state = jax.eval_shape(agent.init, jax.random.key(0))
        action, _ = jax.eval_shape(agent.act, state, jnp.zeros(3), jax.random.key(0))
        assert (action.shape == ()) == (name in agents.DISCRETE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: agents.make("sca", 3, 2), "unknown agent 'sca'; did you mean 'sac'"),
        (lambda: agents.make("zzz", 3, 2), "allowed: a2c, ddpg"),
        (lambda: agents.make("dqn", 3, 2, gama=1), "'gama'; did you mean 'gamma'"),
        (lambda: agents.make("a2c", 0, 2), "observation_size must be a positive whole number"),
        (lambda: agents.make("a2c", 3, 2, hidden=(8, 0)), "hidden must be"),
        (lambda: agents.make("sac", 3, 2, gamma=1.5), "gamma must lie between 0 and 1"),
        (lambda: agents.make("sac", 3, 2, lr=float("nan")), "lr must lie"),
        (lambda: agents.make("dqn", 3, 2, batch=64, capacity=32), "can never be reached"),
        (lambda: agents.make("ddpg", 3, 2, actions="sphere"), "allowed: simplex, box"),
        (lambda: agents.make("fixed", 3, 2, action=2), "index from 0 to 1"),
        (
            lambda: agents.make("sac", 3, 2, optimizer="rms"),
            "unknown optimizer 'rms' (allowed: adam, sgd)",
        ),
        (lambda: agents.make("dqn", 3, 2, horizon=0), "horizon must lie between 1"),
    ],
)
def test_bad_options_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_ppo_says_what_it_needs():
    agent = agents.make("ppo", 1, 2, cohort=4)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    act = jax.vmap(agent.act, (None, 0, 0))
    x, keys = jnp.zeros((5, 1)), jax.random.split(jax.random.key(0), 5)
    action, info = jax.eval_shape(act, state, x, keys)
    batch = agents.Transition(x, action, jnp.zeros(5), x, jnp.zeros(5), jnp.ones(5, bool), info)
    with pytest.raises(ValueError, match="build it with cohort=5"):
        jax.eval_shape(agent.update, state, batch, keys[0])
    with pytest.raises(ValueError, match="needs the info"):
        jax.eval_shape(agent.update, state, batch._replace(info=None), keys[0])


def at_round(agent, rounds):
    return agent.init(jax.random.key(0))._replace(rounds=jnp.asarray(rounds, jnp.int32))


def test_epsilon_schedules():
    dqn = agents.make("dqn", 1, 4, horizon=100)
    for rounds, epsilon in ((0, 1.0), (50, 0.55), (100, 0.1), (500, 0.1)):
        policy = dqn.act(at_round(dqn, rounds), jnp.zeros(1), jax.random.key(0))[1].policy
        np.testing.assert_allclose(policy.min(), epsilon / 4, rtol=1e-5)
    bandit = agents.make("q_bandit", 1, 4)
    for rounds in (0, 1, 10, 98, 99, 200):
        policy = bandit.act(at_round(bandit, rounds), jnp.zeros(1), jax.random.key(0))[1].policy
        np.testing.assert_allclose(policy.min(), max(0.05, 0.97**rounds) / 4, rtol=1e-4)


def test_ddpg_random_rounds_and_intervals():
    agent = agents.make(
        "ddpg", 1, 3, hidden=(8,), batch=4, capacity=16, random_rounds=2, update_every=2
    )
    state, keys, changed = agent.init(jax.random.key(0)), jax.random.split(jax.random.key(1), 8), []
    update = jax.jit(agent.update)
    act = jax.jit(jax.vmap(agent.act, (None, 0, 0)))
    spread = lambda s: np.ptp(act(s, jnp.zeros((8, 1)), keys)[0])
    assert spread(state) > 0.3  # normalised uniform draws
    for i in range(6):
        x = jnp.full((4, 1), float(i))
        action = act(state, jnp.full((8, 1), float(i)), keys)[0][:4]
        np.testing.assert_allclose(action.sum(-1), 1, rtol=1e-5)
        batch = agents.Transition(x, action, action[:, 0], x, jnp.ones(4), jnp.ones(4, bool))
        new, _ = update(state, batch, keys[i])
        old_bias, new_bias = (s.learner.actor["params"]["Dense_1"]["bias"] for s in (state, new))
        changed.append(bool((old_bias != new_bias).any()))
        state = new
    # not in rounds 1, 2; then every second
    assert changed == [False, False, False, True, False, True]
    assert spread(state) < 0.3


def test_fixed_policies():
    constant = Fixed(action=2, num_actions=4)
    state = constant.init(jax.random.key(0))
    key = jax.random.key(0)
    assert int(constant.act(state, jnp.zeros(1), key)[0]) == 2
    assert (
        int(constant.act(state, jnp.zeros(1), key, jnp.array([False, True, False, True]))[0]) == 1
    )
    mixture = jnp.array([0.2, 0.8])
    np.testing.assert_array_equal(Fixed(action=mixture).act(state, jnp.zeros(1), key)[0], mixture)
    anything = Uniform(num_actions=4)
    act = jax.jit(
        jax.vmap(lambda k, available: anything.act(state, jnp.zeros(1), k, available)[0], (0, None))
    )
    drawn = np.bincount(
        act(jax.random.split(key, 4000), jnp.array([True, False, True, True])), minlength=4
    )
    assert drawn[1] == 0 and (abs(drawn[[0, 2, 3]] - 4000 / 3) < 4 * np.sqrt(4000 * 2 / 9)).all()
    new, losses = anything.update(state, None, key)
    assert int(new.rounds) == 1 and losses == {}


def test_joint_actions_are_flat_indices():
    for index in range(3 * 4 * 5):
        parts = agents.split_action(index, (3, 4, 5))
        assert tuple(int(p) for p in parts) == np.unravel_index(index, (3, 4, 5))
        assert int(agents.join_action(parts, (3, 4, 5))) == index


def test_ddpg_finds_the_optimum_of_a_concave_reward_on_the_simplex():
    """r = −‖a − c(s)‖² with c(s) inside the simplex: the best action is c(s), the best reward 0."""
    goals = jnp.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    agent = agents.make(
        "ddpg", 2, 3, hidden=(32,), lr=5e-3, noise=0.1, batch=64, gradient_steps=10, capacity=4000
    )

    def one_round(state, key):
        see, choose, learn = jax.random.split(key, 3)
        context = jax.random.randint(see, (20,), 0, 2)
        x = jax.nn.one_hot(context, 2)
        action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(choose, 20))
        reward = -((action - goals[context]) ** 2).sum(-1)
        batch = agents.Transition(x, action, reward, x, jnp.zeros(20), jnp.ones(20, bool), info)
        return agent.update(state, batch, learn)[0], None

    @jax.jit
    def train(key):
        state = jax.lax.scan(one_round, agent.init(key), jax.random.split(key, 300))[0]
        return jax.vmap(lambda x: agent.act(state, x, key)[1])(jnp.eye(2))

    info = train(jax.random.key(0))
    np.testing.assert_allclose(info.policy, goals, atol=0.05)
    np.testing.assert_allclose(info.value, 0, atol=0.03)


def test_q_bandit_learns_to_respect_budgets():
    """Joint action (depth, effort) ∈ {1..3}², reward = depth·effort − 4·(excess over the context's
    budgets)."""
    sizes, budgets = (3, 3), np.array([[1, 3], [2, 2], [3, 1], [3, 3]])
    agent = agents.make("q_bandit", 4, 9, lr=5e-3, epsilon_end=0.1, gradient_steps=10)

    def reward_of(context, action):
        depth, effort = (part + 1 for part in agents.split_action(action, sizes))
        b = jnp.asarray(budgets)[context]
        return depth * effort - 4.0 * (jnp.maximum(depth - b[0], 0) + jnp.maximum(effort - b[1], 0))

    def one_round(state, key):
        choose, learn = jax.random.split(key)
        context = jnp.arange(12) % 4
        x = jax.nn.one_hot(context, 4)
        action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(choose, 12))
        reward = jax.vmap(reward_of)(context, action)
        batch = agents.Transition(x, action, reward, x, jnp.zeros(12), jnp.ones(12, bool), info)
        return agent.update(state, batch, learn)[0], None

    @jax.jit
    def train(key):
        state = jax.lax.scan(one_round, agent.init(key), jax.random.split(key, 250))[0]
        return jax.vmap(lambda x: agent.act(state, x, key)[1])(jnp.eye(4))

    info = train(jax.random.key(0))
    table = np.array([[float(reward_of(c, a)) for a in range(9)] for c in range(4)])
    # the greedy action is optimal
    np.testing.assert_array_equal(info.policy.argmax(-1), table.argmax(-1))
    # which uses up both budgets
    np.testing.assert_array_equal(table.argmax(-1), (budgets - 1) @ [3, 1])
    np.testing.assert_allclose(info.value, table.max(-1), atol=0.4)
