"""Five tiny problems with known answers, for every agent at its shipped defaults; a wrong sign,
target or mask fails one.

constant     reward 1 whatever happens                              the value is 1
observed     reward = observation (±1)                              the value is the observation
delayed      0 → 1 without reward, then reward 1 and the end        the value of 0 is γ, of 1 is 1
acted        reward +1 for action 1, −1 for action 0                action 1, the value is 1
both         reward +1 if the action agrees with the observation    the action follows the
                                        observation
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents

PROBLEMS = ("constant", "observed", "delayed", "acted", "both")
GAMMA, ROWS = 0.9, 16
# name: (rounds, tolerance of the values); where every observation is 0 only the output biases can
# learn,
AGENTS = {
    # 0.001 per gradient step, so that the agents with the fewest steps per round need the most
    # rounds
    "sac": (250, 0.1),
    "dqn": (250, 0.1),
    "ddpg": (400, 0.15),
    "q_bandit": (200, 0.1),
    "a2c": (4000, 0.15),
    "ppo": (800, 0.15),
    "trpo": (500, 0.15),
}
ONE_STEP = ("q_bandit", "ddpg")  # these do not bootstrap
PLACES = np.array([-1.0, 0.0, 1.0], np.float32)  # where the trained agents are asked


def observe(problem, key):
    sign = 2.0 * jax.random.bernoulli(key) - 1.0
    step = (sign + 1) / 2  # delayed: 0 is the start, 1 the last step
    return jnp.select([problem == 1, problem == 2, problem == 4], [sign, step, sign], 0.0)


def respond(problem, x, right):
    """(reward, next observation, done) of ONE observation; `right` is 1 for action 1, −1 for action
    0."""
    reward = jnp.stack([jnp.ones(()), x, x, right, x * right])[problem]
    last = (problem != 2) | (x == 1)
    return reward, jnp.where(last, 0.0, 1.0), last


def train(agent, rounds, problem, key):
    def one_round(state, key):
        see, choose, learn = jax.random.split(key, 3)
        x = jax.vmap(observe, (None, 0))(problem, jax.random.split(see, ROWS))[:, None]
        action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(choose, ROWS))
        right = 2.0 * (action if action.ndim == 1 else action[:, 1]) - 1
        reward, following, done = jax.vmap(respond, (None, 0, 0))(problem, x[:, 0], right)
        batch = agents.Transition(
            x, action, reward, following[:, None], done, jnp.ones(ROWS, bool), info
        )
        return agent.update(state, batch, learn)[0], None

    state = jax.lax.scan(
        one_round, agent.init(key), jax.random.split(jax.random.fold_in(key, 1), rounds)
    )[0]
    ask = lambda x: agent.act(state, x[None], key)[1]
    info = jax.vmap(ask)(jnp.asarray(PLACES))
    return info.value, info.policy


@functools.cache
def trained(name):
    """Values [problem, place] and policies [problem, place, action]: all five problems in one
    program."""
    rounds, _ = AGENTS[name]
    agent = agents.make(name, 1, 2)
    one = functools.partial(train, agent, rounds, key=jax.random.key(0))
    return jax.tree.map(
        np.asarray, jax.jit(lambda problems: jax.lax.map(one, problems))(jnp.arange(5))
    )


# one worker trains an agent
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"probe {name}")) for name in AGENTS]
)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_probe(name, problem):
    values, policies = (x[PROBLEMS.index(problem)] for x in trained(name))
    low, zero, high = range(3)
    tolerance = AGENTS[name][1]
    near = functools.partial(np.testing.assert_allclose, atol=tolerance)
    # SAC keeps an entropy of ½ log 2, i.e. 89 % for the better of two actions, and adds α H to its
    # values
    sure = 0.8 if name == "sac" else 0.9
    if problem == "constant":
        near(values[zero], 1)
    elif problem == "observed":
        near(values[[low, high]], [-1, 1])
    elif problem == "delayed":
        near(values[[zero, high]], [0 if name in ONE_STEP else GAMMA, 1])
    elif problem == "acted":
        assert policies[zero, 1] > sure
        if name != "sac":
            near(values[zero], 1)
    else:
        assert policies[low, 0] > sure and policies[high, 1] > sure
        if name != "sac":
            near(values[[low, high]], [1, 1])


@pytest.mark.parametrize("name", ["q_bandit", "ppo"])
def test_normalisation_makes_badly_scaled_observations_learnable(name):
    rounds, _ = AGENTS[name]
    agent = agents.make(name, 1, 2, normalise=True)

    def far_away(agent):
        """The same agent in a world whose observations are 1000 ± 0.1."""
        shift = lambda x: 1000 + 0.1 * x
        return types.SimpleNamespace(
            init=agent.init,
            act=lambda s, x, k: agent.act(s, shift(x), k),
            update=lambda s, b, k: agent.update(
                s,
                b._replace(
                    observation=shift(b.observation), next_observation=shift(b.next_observation)
                ),
                k,
            ),
        )

    _, policies = jax.jit(functools.partial(train, far_away(agent), rounds))(4, jax.random.key(0))
    assert policies[0, 0] > 0.9 and policies[2, 1] > 0.9
