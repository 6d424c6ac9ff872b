"""`Delayed`: a transition ends with the actor's next observation, with any agent."""

import jax
import jax.numpy as jnp
import numpy as np

from agents.delayed import Delayed
from agents.types import Agent, Info, Transition


class Listener(Agent):
    """Keeps the last batch that it was taught."""

    def init(self, key):
        return None

    def update(self, state, batch, key):
        return batch, {}


def batch(actors, first, reported):
    count = len(actors)
    x = jnp.arange(first, first + count, dtype=float)[:, None]
    free = jnp.array([[True, True, actor % 2 == 0] for actor in actors])
    info = Info(-x[:, 0], x[:, 0], jnp.full((count, 3), 1 / 3), free)
    return Transition(
        x,
        jnp.arange(count),
        10 * x[:, 0],
        x + 0.5,
        jnp.zeros(count),
        jnp.array(reported),
        info,
        actor=jnp.array(actors),
    )


def test_what_waits_is_completed_by_the_same_actor_only():
    agent = Delayed(inner=Listener(1, 3), num_actors=6)
    state = agent.init(jax.random.key(0))
    key = jax.random.key(1)
    state, _ = agent.update(state, batch([4, 1], 1, [True, True]), key)
    assert not np.asarray(state.agent.mask).any()  # nobody was seen before
    # 4 acts but does not report: it waits on
    state, _ = agent.update(state, batch([2, 4], 7, [True, False]), key)
    assert not np.asarray(state.agent.mask).any()
    state, _ = agent.update(state, batch([4, 2], 20, [True, True]), key)
    taught = state.agent
    assert np.asarray(taught.mask).all() and not np.asarray(taught.done).any()
    np.testing.assert_array_equal(taught.observation[:, 0], [1, 7])
    np.testing.assert_array_equal(taught.next_observation[:, 0], [20, 21])
    np.testing.assert_array_equal(taught.reward, [10, 70])
    np.testing.assert_array_equal(taught.action, [0, 0])
    np.testing.assert_array_equal(taught.info.log_probability, [-1, -7])
    np.testing.assert_array_equal(taught.next_available[:, 2], [True, True])
    np.testing.assert_array_equal(np.asarray(state.pending.mask).nonzero()[0], [1, 2, 4])
    np.testing.assert_array_equal(state.pending.observation[jnp.array([1, 2, 4]), 0], [2, 21, 20])
