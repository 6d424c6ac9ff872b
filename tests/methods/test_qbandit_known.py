"""Q-bandit with known penalties, gains of composed models and dual ascent, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from test_qbandit import host, one, parts, predict, three_layers
from tiny import N, start

BUDGETS = ((0.5, 2), (0.1, 3), (1.0, 1), (2.0, 2), (0.01, 1), (5.0, 3))
KNOWN = dict(agent="ridge_bandit", budgets=BUDGETS, lam_dist=0.0)


def loss(net, k):
    """Mean cross-entropy of a net on the validation rows of client k."""
    fed = tiny.federation()
    rows = fed.client_rows(k, "val")
    logits = predict(net, np.asarray(fed.x)[rows])
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return -np.log(shares[np.arange(len(rows)), np.asarray(fed.y)[rows]]).mean()


def composed(server, own, depth):
    groups = ("fc1", "fc2", "fc")
    take = lambda i, g: (server if i < depth else own)["params"][g]
    return {"params": {g: take(i, g) for i, g in enumerate(groups)}, "batch_stats": {}}


def test_the_agent_knows_the_penalties_and_never_exceeds_without_a_gain():
    sim = three_layers(**KNOWN)
    state, data = start(sim)
    plan = jax.jit(sim.plan_round)(state, data)
    works = np.array([0.01, 0.1, 0.5, 1, 2, 5])
    for slot in range(N):
        c, b = BUDGETS[int(plan.slots.ctx.id[slot])]
        want = [
            -1.0 * max(0, e - c) - 2.0 * max(0, depth - b) for depth in (1, 2, 3) for e in works
        ]
        np.testing.assert_allclose(plan.observed[slot, -18:], want, atol=1e-5)
    for _ in range(4):
        state, log, _, _ = sim.examine(state, data)
        assert int(log["exceed_compute"]) == int(log["exceed_comm"]) == 0
        assert abs(float(log["reward"]) - float(log["seen_accuracy"])) < 1e-6  # and nothing else


def test_gains_are_of_composed_models_as_they_are_evaluated():
    """L_val before the round minus after the server has averaged, minus the cohort's mean."""
    sim = three_layers(**KNOWN, reward="gain")
    state, data = start(sim)
    state = sim.examine(state, data)[0]
    before = host(state)
    after, log, ids, nets = sim.examine(state, data)
    after, nets = host(after), host(nets)
    fell = []
    for slot, k in enumerate(np.asarray(ids)):
        old = composed(
            before.server.net, one(before.clients.resident, k), before.clients.own.depth[k]
        )
        new = composed(after.server.net, one(nets, slot), after.clients.own.depth[k])
        fell.append(loss(old, k) - loss(new, k))
    fell = np.array(fell)
    rewards = np.asarray(log["acted_rewards"])
    np.testing.assert_allclose(rewards, fell - fell.mean(), atol=1e-4)
    assert np.ptp(fell) > 1e-3 and parts(after.server.net, "fc1").size


def test_dual_ascent_raises_the_price_of_what_is_exceeded():
    """By the mean excess of a round; what is within budget keeps its price."""
    sim = three_layers(agent="full", budgets=BUDGETS, dual=0.5, lam_comp=0.25, lam_comm=0.125)
    state, data = start(sim)
    for _ in range(2):
        state, log, _, _ = sim.examine(state, data)
    epochs = np.mean([max(0, 2.0 - c) for c, _ in BUDGETS])  # the run's two epochs
    layers = np.mean([max(0, 3 - b) for _, b in BUDGETS])
    np.testing.assert_allclose(state.server.prices["epochs"], 0.25 + 2 * 0.5 * epochs, rtol=1e-5)
    np.testing.assert_allclose(state.server.prices["layers"], 0.125 + 2 * 0.5 * layers, rtol=1e-5)
    assert float(log["price_layers"]) == float(state.server.prices["layers"])
    within = three_layers(**KNOWN, dual=0.5)
    state, data = start(within)
    state = within.examine(state, data)[0]
    assert float(state.server.prices["epochs"]) == 1.0  # lam_comp
    assert jnp.isfinite(state.server.prices["layers"])
