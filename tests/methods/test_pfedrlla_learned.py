"""pFedRLLA's small controllers of heads: order and number of peers do not matter; they learn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pfedrlla import announced, numpy_tree, simulation
from tiny import M, start

from fedjax_sim.methods import make_method
from fedjax_sim.methods.pfedrlla import learned

RULES = {
    "bandit": lambda alike, sizes, may: learned.arm_weights(jnp.int32(9), alike, may),
    "pairs": lambda alike, sizes, may: learned.pair_weights(THETA, alike, sizes, may),
}
THETA = learned.no_pairs(jnp.float32) + 0.5 * jax.random.normal(jax.random.key(3), (41,))


def peers(count, seed=0):
    rng = np.random.default_rng(seed)
    alike = np.append(rng.uniform(-1, 1, count), 1).astype(np.float32)
    return alike, rng.integers(1, 50, count + 1).astype(np.float32), rng.random(count + 1) < 0.8


@pytest.mark.parametrize("rule", RULES)
def test_permuting_peers_permutes_weights(rule):
    alike, sizes, may = peers(6)
    may[-1] = True
    order = np.append(np.random.default_rng(1).permutation(6), 6)
    found = np.asarray(RULES[rule](alike, sizes, jnp.array(may)))
    turned = np.asarray(RULES[rule](alike[order], sizes[order], jnp.array(may[order])))
    np.testing.assert_allclose(turned, found[order], atol=1e-6)
    assert abs(found.sum() - 1) < 1e-6 and (found[~may] == 0).all() and np.ptp(found[may]) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_the_number_of_peers_is_free(rule):
    """Parameters of one federation serve another one with more peers; those that do not report
    change nothing."""
    alike, sizes, _ = peers(3)
    few = np.asarray(RULES[rule](alike, sizes, jnp.ones(4, bool)))
    more = [np.insert(a, 3, [0.9, -0.3]) for a in (alike, sizes)]
    may = jnp.array([True, True, True, False, False, True])
    many = np.asarray(RULES[rule](*more, may))
    np.testing.assert_allclose(many[[0, 1, 2, 5]], few, atol=1e-6)
    assert len(np.asarray(RULES[rule](*more, jnp.ones(6, bool)))) == 6


def test_pairs_are_trained_with_some_peers_and_used_with_others():
    """θ of a run with 4 participants continues, frozen, in one with 3; untrained it is
    similarity."""
    options = dict(head="pairs", head_layers="last")
    sim = simulation(make_method("pfedrlla", **options))
    state, data = start(sim)
    first = np.asarray(state.server.heads)
    for _ in range(4):
        state = sim.examine(state, data)[0]
    theta = state.server.heads
    assert (np.asarray(theta) != first).any()
    frozen = simulation(make_method("pfedrlla", **options, pair_rate=0.0), participants=3)
    other, data = start(frozen)
    other = other._replace(server=other.server._replace(heads=jnp.array(theta)))
    for _ in range(2):
        other, log, _, _ = frozen.examine(other, data)
    np.testing.assert_array_equal(other.server.heads, theta)
    assert int(log["diverged"]) == 0


def test_untrained_pairs_mix_as_similarity_does():
    heads = []
    for options in (dict(head="pairs", pair_rate=0.0), dict(head="similarity:5")):
        sim = simulation(make_method("pfedrlla", head_layers="last", **options))
        state, data = start(sim)
        state = sim.examine(state, data)[0]
        heads.append(numpy_tree(announced(sim)(state, data)[1]["params"]["fc"]["kernel"]))
    np.testing.assert_allclose(*heads, atol=1e-6)


def test_scores_are_gains_on_validation_rows_after_training():
    """The bandit's table after two rounds, from the losses that clients keep."""
    sim = simulation(make_method("pfedrlla", head="bandit", head_layers="last"))
    state, data = start(sim)
    state = sim.examine(state, data)[0]
    assert float(state.server.heads.tries.sum()) == 0  # nobody had a score before
    before = numpy_tree(state.clients.own)
    state, _, ids, _ = sim.examine(state, data)
    after, ids = numpy_tree(state.clients.own), np.asarray(ids)
    again = ids[before.known[ids]]
    assert len(again) > 1 and after.known[ids].all()
    fell = before.loss[again] - after.loss[again]
    scores = (fell - fell.mean()) / fell.std()
    total = np.zeros(len(learned.ARMS))
    np.add.at(total, after.what[again], scores)
    np.testing.assert_allclose(state.server.heads.total, total, atol=1e-4)
    assert float(state.server.heads.tries.sum()) == len(again) <= M


def test_they_find_what_scores():
    """A designed score: the bandit comes to prefer the best arm, θ the weights that score best."""

    def bandit(arms, key):
        draw, noise = jax.random.split(key)
        which = jax.vmap(lambda k: learned.draw_arm(arms, k))(jax.random.split(draw, 10))
        good = jnp.where(which == 6, 1.0, 0.0) + jax.random.normal(noise, (10,))
        use = jnp.ones(10, bool)
        return learned.scored(arms, which, learned.standard(good, use), use), which

    play = lambda step, begin, rounds: jax.lax.scan(
        step, begin, jax.random.split(jax.random.key(0), rounds)
    )
    _, which = play(bandit, learned.no_scores(jnp.float32), 200)
    assert (np.asarray(which)[-50:] == 6).mean() > 0.5  # by chance: 1 in 16
    alike, sizes = jnp.array([0.4, 0.2, -0.3, 1.0]), jnp.array([10.0, 40.0, 10.0, 20.0])
    weigh = lambda theta: learned.pair_weights(theta, alike, sizes, jnp.ones(4, bool))

    def pairs(theta, key):  # what scores is the weight of the large client
        tried = learned.TRIES * jax.random.normal(key, (10, len(theta)))
        good = jax.vmap(lambda e: weigh(theta + e)[1])(tried)
        use = jnp.ones(10, bool)
        return learned.moved(theta, 0.3, tried, learned.standard(good, use), use), ()

    begin = learned.no_pairs(jnp.float32)
    assert float(weigh(begin)[1]) < 0.1 and float(weigh(play(pairs, begin, 200)[0])[1]) > 0.5
