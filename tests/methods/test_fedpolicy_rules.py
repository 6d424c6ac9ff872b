"""Rules without learning do what they say; uploads weigh what their plan says; `taken` sends what
was taken."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CLASSES, SIZES, M, N, close, federation, same_bits, simulation, start

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedpolicy.features import FEATURES
from fedjax_sim.methods.fedpolicy.rules import SEEN, VERBS, boxes, decide
from fedjax_sim.plans import payload_bytes
from fedjax_sim.types import Plan


def ruled(rule: str, **more):
    return simulation("fedpolicy", agent="rule", rule=rule, **more)


def plans_of(sim, rounds: int = 0):
    """(the State after so many rounds, the plans and ids of the next)."""
    state, data = start(sim)
    for _ in range(rounds):
        state = sim.examine(state, data)[0]
    slots = jax.jit(sim.plan_round)(state, data).slots
    return state, jax.tree.map(np.asarray, slots.plan), np.asarray(slots.ctx.id)


def says(rule: str, chance: float = 0.5, **known: float) -> list[float]:
    """What a rule decides of a client of which this is known, all else being 0."""
    seen = np.array([known.get(name, 0.0) for name in SEEN], np.float32)
    return np.asarray(decide(boxes(rule), seen, chance)).tolist()  # type: ignore[arg-type]


# ---- the language --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule, known, wanted",  # take backbone, take head, send backbone, send head
    [
        ("keep_head", {}, [1, 0, 1, 1]),
        ("keep_head: effective_classes<2.5", dict(effective_classes=2.4), [1, 0, 1, 1]),
        ("keep_head: effective_classes<2.5", dict(effective_classes=2.6), [1, 1, 1, 1]),
        ("keep_backbone: size>10 & progress>0.5", dict(size=11, progress=0.4), [1, 1, 1, 1]),
        ("keep_backbone: size>10 & progress>0.5", dict(size=11, progress=0.6), [0, 1, 1, 1]),
        ("keep_head: size<3; keep_head: size>8", dict(size=2), [1, 0, 1, 1]),
        ("keep_head: size<3; keep_head: size>8", dict(size=5), [1, 1, 1, 1]),
        ("keep_head: size>3 & size<8", dict(size=5), [1, 0, 1, 1]),
        ("withhold_head: effective_classes<2", dict(effective_classes=1), [1, 1, 1, 0]),
        ("withhold_backbone; withhold_head: size<1", {}, [1, 1, 0, 0]),
        ("keep_head: round>30", dict(round=30), [1, 1, 1, 1]),
        ("keep_head: round>30", dict(round=31), [1, 0, 1, 1]),
        ("keep_head: chance<0.3; keep_backbone: chance>0.8", {"chance": 0.2}, [1, 0, 1, 1]),
        ("keep_head: chance<0.3; keep_backbone: chance>0.8", {"chance": 0.9}, [0, 1, 1, 1]),
        ("keep_head: chance<0.3; keep_backbone: chance>0.8", {"chance": 0.5}, [1, 1, 1, 1]),
        ("keep_head: staleness>2; discount: 0.5", dict(staleness=3), [1, 0, 1, 0.5]),
        ("keep_head: staleness>5; discount: 0.5", dict(staleness=3), [1, 1, 1, 1]),
    ],
)
def test_a_rule_decides_as_it_reads(rule, known, wanted):
    assert says(rule, **known) == pytest.approx(wanted)


def test_no_rule_is_full_and_places_do_not_matter():
    assert says("") == [1, 1, 1, 1]
    wide = boxes("keep_head: size<3", clauses=4)
    assert wide.low.shape == (len(VERBS), 4, len(SEEN) + 1)
    seen = jnp.zeros(len(SEEN)).at[SEEN.index("size")].set(2)
    assert decide(wide, seen, 0.5).tolist() == [1, 0, 1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(agent="rule"), "needs a rule"),
        (dict(rule="keep_hed: size<3"), "'keep_hed'.*keep_head"),
        (dict(rule="keep_head: sise<3"), "'sise'.*size"),
        (dict(rule="keep_head: size"), "'size' of keep_head is not a condition"),
        (dict(rule="keep_head:"), "is not a condition"),
        (dict(rule="keep_head: size<few"), "size< 'few' is not a number"),
        (dict(rule="keep_head; discount: -1"), "discount -1 is not allowed"),
        (dict(rule="keep_head; discount"), "discount '' is not a number"),
        (dict(rule="keep_head; discount: 1", send="taken"), "no effect with.*taken"),
        (dict(rule="keep_head", agent="sac"), "no effect with agent 'sac'"),
        (dict(rule="keep_head", actions="layerwise"), "actions=layerwise has no effect"),
        (dict(rule="keep_head", state="ncf"), "state=ncf has no effect"),
        (dict(send="some"), "send.*all, taken"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(UserError, match=message):
        make_method("fedpolicy", **options)


# ---- in a round ----------------------------------------------------------------------------------
def test_a_rule_that_never_holds_is_full_and_one_that_always_does_is_backbone():
    for rule, policy in (("keep_head: size<0", "full"), ("keep_head", "backbone")):
        mine, named = (
            plans_of(ruled(rule), 2)[0],
            plans_of(simulation("fedpolicy", agent=policy), 2)[0],
        )
        assert same_bits(
            (mine.server, mine.clients.resident), (named.server, named.clients.resident)
        )


def test_a_rule_sees_the_client():
    """Effective classes and sizes as counted by hand; newcomers take everything, whatever the
    rule."""
    fed = federation()
    counts = np.array(
        [np.bincount(fed.y[fed.rows["train"][i][: SIZES[i]]], minlength=CLASSES) for i in range(N)]
    )
    share = counts / counts.sum(1, keepdims=True)
    classes = np.exp(-(share * np.log(np.where(share > 0, share, 1))).sum(1))
    split = float(np.sort(classes)[N // 2 - 1 : N // 2 + 1].mean())
    rule = f"keep_head: effective_classes<{split}; withhold_head: size>8"
    state, plan, ids = plans_of(ruled(rule), 2)
    joined = np.asarray(state.clients.own.joined)
    keeps, small = (classes < split) & joined, np.array(SIZES) <= 8
    assert keeps[ids].any() and not keeps[ids].all() and small[ids].any()
    np.testing.assert_array_equal(plan.take, np.stack([np.ones(M), ~keeps[ids]], 1))
    np.testing.assert_array_equal(plan.send, np.stack([np.ones(M), small[ids]], 1))
    assert joined.all() == (state.clients.own.last >= 0).all()


def test_features_by_hand():
    sim = ruled("keep_head")
    state, data = start(sim)
    seen = []
    for t in range(3):
        announced = jax.jit(sim.plan_round)(state, data)
        ids, rows = np.asarray(announced.slots.ctx.id), np.asarray(announced.observed)
        known = dict(zip(SEEN, rows.T, strict=True))
        last = {int(i): r for r, group in enumerate(seen) for i in group}
        np.testing.assert_allclose(known["staleness"], [t - last.get(int(i), 0) for i in ids])
        np.testing.assert_allclose(known["joined"], [int(i) in last for i in ids])
        np.testing.assert_allclose(known["round"], t + 1)
        np.testing.assert_allclose(known["progress"], t / 8)
        np.testing.assert_allclose(known["size"], np.array(SIZES)[ids])
        np.testing.assert_allclose(known["relative_size"], np.array(SIZES)[ids] * N / sum(SIZES))
        head = lambda net: np.concatenate(
            [np.ravel(a) for a in jax.tree.leaves(net["params"]["fc"])]
        )
        common, row = (
            state.server.net,
            lambda i: jax.tree.map(lambda a: a[i], state.clients.resident),
        )
        apart = [np.linalg.norm(head(row(i)) - head(common)) for i in ids]
        np.testing.assert_allclose(
            known["head_distance"], apart / np.linalg.norm(head(common)), rtol=1e-4, atol=1e-6
        )
        seen.append(ids)
        state = sim.examine(state, data)[0]
    assert set(SEEN) == set(FEATURES)


# ---- uploads -------------------------------------------------------------------------------------
SENDS = np.array([[1, 0.25], [0, 1], [0.5, 0], [2, 0.125], [1, 1], [0.75, 0]], np.float32)


class Weighted(Method):
    """FedAvg whose clients send each group with a weight of its own."""

    def plan(self, env, server, ctx):
        return Plan(jnp.ones(2), jnp.asarray(SENDS)[ctx.id], ctx.epochs)


def test_real_upload_weights_are_the_weights_of_a_numpy_mean():
    sim = simulation("fedavg", around=lambda inner: Weighted())
    state, data = start(sim)
    after, log, ids, nets = sim.examine(state, data)
    weights = SENDS[np.asarray(ids)] * np.array(SIZES)[np.asarray(ids)][:, None]
    for g, name in enumerate(sim.env.model.groups):
        mean = jax.tree.map(
            lambda a, g=g: np.average(np.asarray(a), axis=0, weights=weights[:, g]),
            nets["params"][name],
        )
        assert close(after.server.net["params"][name], mean, 1e-5)
    np.testing.assert_array_equal(log["sent"], (weights > 0).sum(0))


@pytest.mark.parametrize("block", ["backbone", "head"])
def test_taken_sends_exactly_what_was_taken(block):
    sim = simulation(block, send="taken")
    state, data = start(sim)
    state = sim.examine(state, data)[0]  # everybody's first: all of it
    known = np.asarray(state.clients.own.joined)
    plan = jax.jit(sim.plan_round)(state, data).slots.plan
    np.testing.assert_array_equal(plan.send, plan.take)
    after, log, ids, nets = sim.examine(state, data)
    kept = 1 if block == "backbone" else 0
    for g, name in enumerate(sim.env.model.groups):
        senders = np.asarray([g != kept or not known[i] for i in np.asarray(ids)])
        assert senders.any() and (g != kept or not senders.all())
        mean = jax.tree.map(lambda a, who=senders: np.asarray(a)[who].mean(0), nets["params"][name])
        assert close(after.server.net["params"][name], mean, 1e-5)
    np.testing.assert_array_equal(log["sent"], log["taken"])
    wire = sim.method.wire(sim.env, state.server.net)
    one = lambda name: np.asarray(log[name])[None]
    down, up = payload_bytes(one("taken"), one("sent"), wire, one("down"), one("up"))
    assert down == up < 4 * M * sum(sim.env.group_floats(state.server.net))


def test_actions_that_say_what_is_sent():
    """exchange: pairs of blocks; exchange_mix: real weights, and at first only the takes are
    imposed."""
    sim = simulation("fedpolicy", agent="random", actions="exchange")
    _, plan, _ = plans_of(sim)
    assert (plan.take == 1).all() and {tuple(s) for s in plan.send} <= {(1, 1), (1, 0), (0, 1)}
    space, env = sim.method.space, sim.env
    pairs = [(*space.take(env, a).tolist(), *space.send(env, a).tolist()) for a in range(9)]
    assert len(set(pairs)) == 9 and pairs[0] == (1, 1, 1, 1) and pairs[5] == (1, 0, 0, 1)
    sim = simulation(
        "fedpolicy", actions="exchange_mix", **{"agent.batch": 4, "agent.gradient_steps": 1}
    )
    _, plan, _ = plans_of(sim)
    assert (plan.take == 1).all() and ((plan.send > 0) & (plan.send < 1)).any()
    _, plan, _ = plans_of(sim, 1)
    assert not (plan.take == 1).all()
