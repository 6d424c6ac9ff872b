"""Which rows teach, and as whose: forced choices, older policies, drifting normalisation, rewards
far from 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_agents_contract import (
    ROWS,
    A,
    S,
    close,
    differs,
    every_agent,
    programs,
    situation,
    traced_once,  # noqa: F401
)

import agents
from agents.delayed import Delayed
from agents.q_learning import Units, in_units
from agents.types import Info, Transition


def forced_rows(name, batch, count=2):
    """First participations: only action 2 may be taken, and it is followed by a reward unlike all
    others."""
    rng = np.random.default_rng(1)
    only = np.tile(np.arange(A) == 2, (count, 1))
    x = (5 + rng.normal(size=(2, count, S))).astype(np.float32)
    action = only.astype(np.float32) if batch.action.ndim == 2 else np.full(count, 2, np.int32)
    info = Info(
        np.zeros(count, np.float32), np.zeros(count, np.float32), only.astype(np.float32), only
    )
    return Transition(
        x[0],
        action,
        np.full(count, 80.0, np.float32),
        x[1],
        np.zeros(count),
        np.ones(count, bool),
        info,
    )


@every_agent
def test_forced_choices_teach_nothing(name):
    """The same networks, statistics, moments and memory with and without rows in which one action
    was available."""
    agent, *_ = programs(name)
    state, batch = situation(name)
    batch = jax.tree.map(np.asarray, batch._replace(done=np.asarray(batch.done, float)))
    forced = forced_rows(name, batch)
    both = jax.tree.map(
        lambda a, b: np.concatenate([a, b.astype(a.dtype)])[np.array([6, 0, 1, 7, 2, 3, 4, 5])],
        batch,
        forced,
    )
    update = jax.jit(agent.update)
    plain, mixed = (
        update(state, batch, jax.random.key(5))[0],
        update(state, both, jax.random.key(5))[0],
    )
    assert differs(plain.learner, state.learner)
    close(plain, mixed, 1e-4 if name == "trpo" else 1e-6)
    alone = update(state, forced, jax.random.key(5))[0]
    close(alone._replace(rounds=state.rounds), state, 0)


def test_a_forced_turn_that_is_completed_later_teaches_nothing():
    """Of two actors one had no choice at its first turn; both come back twice."""
    agent = Delayed(inner=agents.make("sac", 1, 3, batch=2, capacity=8), num_actors=2)
    state, sizes = agent.init(jax.random.key(0)), []
    for turn in range(3):
        free = np.array([[True, turn > 0, turn > 0], [True] * 3])
        x, two = np.ones((2, 1), np.float32), np.ones(2, np.float32)
        info = Info(-two, two, np.full((2, 3), 1 / 3, np.float32), free)
        rows = Transition(
            x, np.zeros(2, int), 10 * two, x, 0 * two, two > 0, info, actor=np.arange(2)
        )
        state, _ = jax.jit(agent.update)(state, rows, jax.random.key(1))
        sizes.append(int(state.agent.replay.size))
    assert sizes == [0, 1, 3]


def game(agent, rounds, key, forced):
    """Share of best actions over time: a hundred clients, ten at a time; at its first turn a client
    has no choice and earns 0.8, later 0.01 ± 0.05, and 0.05 more for the right action. forced:
    'taught' or 'masked'."""
    clients, M, actions = 100, 10, 3

    def one(carry, key):
        state, joined = carry
        who, see, act, noise, learn = jax.random.split(key, 5)
        ids = jax.random.choice(who, clients, (M,), replace=False)
        x = jax.random.normal(see, (2, M, 4))
        best = jnp.argmax(x[0][:, :actions], -1)
        new = ~joined[ids]
        available = ~new[:, None] | (jnp.arange(actions) == 0)
        action, info = jax.vmap(agent.act, (None, 0, 0, 0))(
            state, x[0], jax.random.split(act, M), available
        )
        later = 0.01 + 0.05 * jax.random.normal(noise, (M,)) + 0.05 * (action == best)
        reward = jnp.where(new, 0.8, later)
        mask = jnp.ones(M, bool) if forced == "taught" else ~new
        batch = Transition(x[0], action, reward, x[1], jnp.ones(M), mask, info, actor=ids)
        state, _ = agent.update(state, batch, learn)
        right = jnp.where(new, 0, action == best).sum() / jnp.maximum((~new).sum(), 1)
        return (state, joined.at[ids].set(True)), right

    start = agent.init(jax.random.fold_in(key, 1)), jnp.zeros(clients, bool)
    return jax.lax.scan(one, start, jax.random.split(key, rounds))[1]


@pytest.mark.parametrize("name", ["a2c", "ppo", "trpo", "sac", "dqn", "q_bandit"])
def test_poisoned_first_turns_cost_nothing(name):
    """As many right choices as where the forced rows are hidden from the agent, and more than by
    chance."""
    options = dict(lr=0.01) if name == "a2c" else {}
    agent = agents.make(name, 4, 3, **options)
    keys = jax.random.split(jax.random.key(0), 3)
    play = lambda forced: np.asarray(
        jax.jit(jax.vmap(lambda key: game(agent, 150, key, forced)))(keys)
    )
    taught, masked = play("taught"), play("masked")
    print(name, taught[:, -50:].mean(), masked[:, -50:].mean())
    assert taught[:, -50:].mean() > 0.4  # 0.33 by chance
    assert abs(taught[:, -50:].mean() - masked[:, -50:].mean()) < 0.02


# ---- on-policy agents ----------------------------------------------------------------------------
class Watched(agents.PPO):
    """PPO that tells how far the policy that learns is from the one that chose, before its first
    step."""

    def learn(self, learner, batch, target, advantage):
        policy = self.networks.policy(
            learner.params.policy, batch.observation, batch.info.available
        )
        fresh = jnp.arange(len(batch.mask)) < ROWS
        apart = jnp.abs(policy.log_prob(batch.action) - batch.info.log_probability)
        return learner, super().learn(learner, batch, target, advantage)[1] | {
            "apart": jnp.where(fresh & (batch.mask > 0), apart, 0).max()
        }


def test_what_chose_is_what_learns():
    """Observations that drift from round to round: learning starts at the policy by which the
    actions were chosen."""
    agent = Watched(S, A, hidden=(8,), cohort=8, lr=0.01)
    state = agent.init(jax.random.key(0))
    # a policy that depends on what it sees
    big = lambda path, x: x * 30 if "Dense_1" in jax.tree_util.keystr(path) else x
    state = state._replace(learner=jax.tree_util.tree_map_with_path(big, state.learner))

    def one(state, t):
        see, act = jax.random.split(jax.random.fold_in(jax.random.key(1), t))
        x = jax.random.normal(see, (ROWS, S)) * (1 + t) + 3 * t
        action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(act, ROWS))
        batch = Transition(x, action, x[:, 0], x, jnp.ones(ROWS), jnp.ones(ROWS, bool), info)
        state, values = agent.update(state, batch, act)
        return state, values["apart"]

    apart = jax.jit(lambda s: jax.lax.scan(one, s, jnp.arange(10)))(state)[1]
    assert float(apart.max()) < 1e-5


@pytest.mark.parametrize("name", ["a2c", "trpo"])
def test_rows_of_an_older_policy_are_weighted(name):
    """Ten actions in the proportions of an old policy teach what ten in those of the present one
    do."""
    agent = agents.make(
        name, 1, 2, normalise=False, gamma=0.0, **({"entropy_weight": 0.0} if name == "a2c" else {})
    )
    state = agent.init(jax.random.key(0))
    even = lambda path, x: (
        x * 0
        if "policy" in jax.tree_util.keystr(path) and "Dense_1" in jax.tree_util.keystr(path)
        else x
    )
    # π = (½, ½)
    state = state._replace(learner=jax.tree_util.tree_map_with_path(even, state.learner))
    # both batches have the same moments, as those of ten rows of unequal proportions would differ
    state = state._replace(
        advantages=type(state.advantages)(jnp.ones(()), jnp.zeros(()), jnp.ones(()))
    )
    agent = agents.make(
        name,
        1,
        2,
        normalise=False,
        gamma=0.0,
        advantage_decay=1.0,
        **({"entropy_weight": 0.0} if name == "a2c" else {}),
    )

    def learned(counts, chance, info=True):
        action = np.repeat([0, 1], counts)
        log = np.log(np.repeat(chance, counts)).astype(np.float32)
        extras = (
            Info(log, 0 * log, np.tile(np.float32(chance), (10, 1)), np.ones((10, 2), bool))
            if info
            else None
        )
        x, ten = np.ones((10, 1), np.float32), np.ones(10)
        batch = Transition(
            x, action, np.where(action == 1, 1.0, -0.5).astype(np.float32), x, ten, ten > 0, extras
        )
        return jax.jit(agent.update)(state, batch, jax.random.key(1))[0].learner.params

    now = learned((5, 5), (0.5, 0.5))
    assert differs(now, state.learner.params)
    close(now, learned((8, 2), (0.8, 0.2)), 1e-5)
    close(now, learned((5, 5), (0.5, 0.5), info=False), 1e-6)
    assert differs(
        jax.tree.map(lambda a: np.asarray(a).round(4), now),
        jax.tree.map(lambda a: np.asarray(a).round(4), learned((8, 2), (0.5, 0.5))),
    )


# ---- rewards far from 0 --------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["q_bandit", "dqn"])
def test_rewards_far_from_zero_are_learned(name):
    """Ten clients with 36 actions of their own costs, rewarded alike by the sum over all of them:
    around −20 at first."""
    agent = agents.make(name, 10, 36)
    rng = np.random.default_rng(0)
    costs = jnp.asarray(rng.uniform(0, 8, (10, 36)) * (rng.random((10, 36)) < 0.6))

    def one(state, key):
        act, noise, learn = jax.random.split(key, 3)
        x, ten = jnp.eye(10), jnp.ones(10)
        action, info = jax.vmap(agent.act, (None, 0, 0))(state, x, jax.random.split(act, 10))
        cost = costs[jnp.arange(10), action]
        reward = ten * (0.8 + 0.05 * jax.random.normal(noise, (10,)) - cost).sum()
        state, _ = agent.update(state, Transition(x, action, reward, x, ten, ten > 0, info), learn)
        return state, (cost.mean(), reward.mean(), info.value.mean())

    run = jax.jit(
        jax.vmap(lambda key: jax.lax.scan(one, agent.init(key), jax.random.split(key, 100))[1])
    )
    found = [np.asarray(v) for v in run(jax.random.split(jax.random.key(2), 8))]
    cost, reward, value = (v[:, -30:].mean() for v in found)
    print(name, cost, reward, value, "at first", found[1][:, 0].mean(), "by chance", costs.mean())
    assert cost < (0.5 if name == "q_bandit" else 0.6) * costs.mean()
    assert abs(value - reward) < 2.5


def test_other_units_say_the_same():
    agent = agents.make("q_bandit", 3, 4)
    params = jax.tree.map(lambda x: x + 0.1, agent.init(jax.random.key(0)).learner.online)
    old, new = Units(jnp.float32(1), jnp.float32(2)), Units(jnp.float32(-20), jnp.float32(7))
    apply, x = agent.network[1], jnp.array([[1.0, -2, 3], [0, 0, 1]])
    said = [
        u.centre + u.scale * apply(p, x)
        for u, p in ((old, params), (new, in_units(params, old, new)))
    ]
    np.testing.assert_allclose(*said, rtol=1e-5)
