"""pFedRLLA's rules for heads against NumPy: by sizes, labels, similarity and gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_pfedrlla import announced, numpy_tree, simulation
from tiny import M, N, assert_close, start

from fedjax_sim.errors import UserError
from fedjax_sim.methods import make_method
from fedjax_sim.methods.pfedrlla import RULES, Rule, part_weights

OVERLAP = np.array([0.5, 0.0, 0.25, 1.0])


@pytest.mark.parametrize("name", RULES)
def test_rules_sum_to_one(name):
    rule = Rule(name, 2.0)
    sizes, action = jnp.array([3.0, 5.0, 2.0, 7.0]), jnp.array([0.1, 0.0, 0.3, 0.6])
    weights = lambda action, usable: np.asarray(
        part_weights(rule, jnp.array(action), sizes, jnp.array(usable), jnp.array(OVERLAP))
    )
    for usable in ([True, False, True, True], [False, False, False, True]):
        found = weights([0.4, 0.0, 0.0, 0.6], usable)
        assert abs(found.sum() - 1) < 1e-6
        assert name == "agent" or (found[~np.array(usable)] == 0).all()
    want = {
        "weighted": sizes / 17,
        "agent": action,
        "even": [0.25] * 4,
        "mean": [1 / 3] * 3 + [0],
        "local": [0, 0, 0, 1],
        "same_classes": OVERLAP**2 / (OVERLAP**2).sum(),
        "similarity": [0.25] * 4,  # where they start: the client's model is not in a plan
        "gradient": [0.25] * 4,
        "bandit": [0.25] * 4,
        "pairs": [0.25] * 4,
    }
    np.testing.assert_allclose(weights(action, [True] * 4), want[name], atol=1e-6)


# ---- rules that look at labels and models --------------------------------------------------------
def after_two(**options):
    """(sim, state, data, round plan, mixtures) with the third of the previous participants
    missing."""
    sim = simulation(make_method("pfedrlla", head_layers="last", **options))
    state, data = start(sim)
    for _ in range(2):
        state = sim.examine(state, data)[0]
    missing = state.server._replace(reported=jnp.array([True, True, False, True]))
    state = state._replace(server=missing)
    return sim, state, data, *announced(sim)(state, data)


def heads_of(state, ids):
    """[len(ids), D] classifiers as NumPy."""
    fc = numpy_tree(state.clients.resident["params"]["fc"])
    flat = np.concatenate([fc[k].reshape(N, -1) for k in sorted(fc)], 1).astype(np.float64)
    return flat[np.asarray(ids)]


def mixed_heads(mixtures):
    fc = numpy_tree(mixtures["params"]["fc"])
    return np.concatenate([fc[k].reshape(M, -1) for k in sorted(fc)], 1)


def test_similarity_is_a_softmax_of_centred_cosines():
    """head=similarity:3 against NumPy, bodies as ever by size; p = 0 is `even`."""
    _, state, _, round_plan, mixtures = after_two(head="similarity:3")
    found = mixed_heads(mixtures)
    for slot in range(M):
        heads = heads_of(state, [*state.server.previous, round_plan.slots.ctx.id[slot]])
        used = np.array([True, True, False, True, True])
        away = heads - heads[used].mean(0)
        lengths = np.linalg.norm(away, axis=1)
        cosine = away @ away[-1] / lengths / lengths[-1]
        shares = np.where(used, np.exp(3 * cosine), 0)
        np.testing.assert_allclose(found[slot], shares @ heads / shares.sum(), atol=2e-5)
    assert np.ptp(shares[used]) > 0.1  # they do differ
    flat, even = (after_two(head=head)[-1] for head in ("similarity:0", "even"))
    assert_close(even, flat, 1e-5)


def test_same_classes_knows_the_labels():
    """head=same_classes:2 against a double loop over classes."""
    _, state, data, round_plan, mixtures = after_two(head="same_classes:2")
    counts, found = np.asarray(data.counts, np.float64), mixed_heads(mixtures)
    for slot in range(M):
        who = [*np.asarray(state.server.previous), int(round_plan.slots.ctx.id[slot])]
        mine, shares = counts[who[-1]] / counts[who[-1]].sum(), []
        for place, j in enumerate(who):
            theirs = counts[j] / counts[j].sum()
            shared = sum(min(a, b) for a, b in zip(mine, theirs, strict=True))
            shares.append(0 if place == 2 else shared**2)
        want = np.array(shares) @ heads_of(state, who) / sum(shares)
        np.testing.assert_allclose(found[slot], want, atol=2e-5)
        np.testing.assert_allclose(
            round_plan.slots.plan.weights[slot, 1], np.array(shares) / sum(shares), atol=1e-5
        )


def val_loss(data, net, k):
    """(loss, gradient with respect to the classifier's bias and kernel, flat) in NumPy."""
    rows = data.fed.client_rows(k, "val")
    x, y = np.asarray(data.fed.x)[rows].reshape(len(rows), -1), np.asarray(data.fed.y)[rows]
    hidden = np.maximum(x @ net["fc1"]["kernel"] + net["fc1"]["bias"], 0)
    logits = hidden @ net["fc"]["kernel"] + net["fc"]["bias"]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    wrong = (shares - np.eye(tiny.CLASSES)[y]) / len(rows)
    loss = -np.log(shares[np.arange(len(rows)), y]).mean()
    return loss, np.concatenate([wrong.sum(0), (hidden.T @ wrong).ravel()])


def test_gradient_is_mirror_descent_on_validation_rows():
    """head=gradient:4 step by step in NumPy, the best of five points; never worse there than
    `even`."""
    _, state, data, round_plan, mixtures = after_two(head="gradient:4")
    found, used = mixed_heads(mixtures), np.array([True, True, False, True, True])
    moved = 0
    for slot in range(M):
        k = int(round_plan.slots.ctx.id[slot])
        heads = heads_of(state, [*state.server.previous, k])
        body = jax.tree.map(lambda a, s=slot: np.asarray(a[s]), mixtures["params"]["fc1"])
        point, tried = used / used.sum(), []
        for i in range(5):
            head = point @ heads
            fc = {"bias": head[: tiny.CLASSES], "kernel": head[tiny.CLASSES :].reshape(5, -1)}
            loss, slope = val_loss(data, {"fc1": body, "fc": fc}, k)
            tried.append((loss, head))
            g = heads @ slope
            unit = np.ptp(g[used]) * np.sqrt(i + 1)
            point = point * np.where(used, np.exp(-(g - g[used].min()) / unit), 0)
            point /= point.sum()
        best = int(np.argmin([loss for loss, _ in tried]))
        moved += best > 0
        np.testing.assert_allclose(found[slot], tried[best][1], atol=1e-4)
    assert moved  # not all of them stay where they start


def test_mistakes_in_rules_are_sentences():
    for options, message in (
        ({"head": "even:2"}, "unknown head of pfedrlla 'even:2'"),
        ({"body": "gradient"}, "unknown body of pfedrlla"),
        ({"head": "similarity:hot"}, "p of head=similarity:p 'hot' is not a number"),
        ({"head": "pairs", "body": "agent"}, "learns by itself and body=agent asks an agent"),
        ({"head": "even", "pair_rate": 0.1}, "pair_rate has no effect with head=even"),
        ({"head": "gradient:2.5"}, "p of gradient:p is a whole number, 0 to 10000"),
    ):
        with pytest.raises(UserError, match=message):
            make_method("pfedrlla", **options)
