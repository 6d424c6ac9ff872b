"""Q-bandit: actions, budgets, partial aggregation, rewards against NumPy loops; what is refused;
and that it learns."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import BATCH, SIZES, N, same_bits, start

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import simulate
from fedjax_sim.errors import UserError
from fedjax_sim.local import epoch_permutations, losses, optim
from fedjax_sim.methods import make_method
from fedjax_sim.methods.qbandit import TABLE_1, Actions, Budgets, Report, budgets_now, read_budgets
from fedjax_sim.models import build
from fedjax_sim.types import Client, Cohort, Ctx, Env, Plan

MENU = (0.01, 0.1, 0.5, 1, 2, 5)
LAMBDAS = dict(comp=1.0, comm=2.0, dist=0.01)
LOW = ((0.5, 1), (1, 2), (2, 1), (0.01, 2), (5, 1), (0.1, 2))  # nobody affords the third layer


@functools.cache
def three_layers(
    slow: tuple[float, float] = (0.0, 0.1), evaluations: tuple[str, ...] = (), **options
):
    """The tiny federation with everybody in every round and a model of three layers."""
    fed = tiny.federation()
    method = make_method("qbandit", **options)
    model = build("mlp", fed.shape, fed.classes, hidden=(5, 4))
    env = Env(
        model,
        losses.make_loss("ce", fed.classes),
        optim.Sgd(0.0, 0.0),
        N,
        N,
        BATCH,
        2.0,
        max(2.0, method.max_epochs),
        rounds=8,
    )
    who = Participation(N, N, tuple(range(N)), slow=slow)
    return simulate(
        method,
        env,
        fed,
        who,
        lr=optim.schedule("constant", 0.05, 8),
        evaluations=evaluations,
        capacity=2,
    )


@functools.cache
def default():
    return three_layers(evaluations=("global", "personal@global"))


def host(tree):
    return jax.tree.map(np.asarray, tree)


def parts(net, group):
    return np.concatenate(
        [np.ravel(a) for a in jax.tree.leaves(host(net)["params"][group])]
    ).astype(np.float64)


def whole(net):
    return np.concatenate([parts(net, group) for group in ("fc1", "fc2", "fc")])


def predict(net, x):
    p = host(net)["params"]
    for group in ("fc1", "fc2"):
        x = np.maximum(x.reshape(len(x), -1) @ p[group]["kernel"] + p[group]["bias"], 0)
    return x @ p["fc"]["kernel"] + p["fc"]["bias"]


def accuracy(net, rows):
    fed = tiny.federation()
    return np.mean(predict(net, np.asarray(fed.x)[rows]).argmax(-1) == np.asarray(fed.y)[rows])


def steps_of(n, epochs):
    return max(1, round(epochs * -(-n // BATCH)))


def one(tree, i):
    return jax.tree.map(lambda a: np.asarray(a)[i], tree)


@functools.cache
def second_round():
    """(before, after, log, ids, uploads, keys of the shuffles) of the second round at the shipped
    defaults."""
    sim = default()
    state, data = start(sim)
    before = sim.examine(state, data)[0]
    keys = jax.jit(sim.plan_round)(before, data).slots.ctx.key
    after, log, ids, nets = sim.examine(before, data)
    return before, after, host(log), np.asarray(ids), host(nets), keys


# ---- the server ----------------------------------------------------------------------------------
def test_partial_aggregation_is_a_loop_over_layers():
    before, after, log, ids, nets, _ = second_round()
    assert len({int(d) for d in log["depth"]}) > 1  # the cohort is mixed
    for layer, group in enumerate(("fc1", "fc2", "fc"), 1):
        total, weight = 0.0, 0
        for slot, client in enumerate(ids):
            if log["depth"][client] >= layer:
                total, weight = (
                    total + SIZES[client] * parts(one(nets, slot), group),
                    weight + SIZES[client],
                )
        want = total / weight if weight else parts(before.server.net, group)
        np.testing.assert_allclose(parts(after.server.net, group), want, rtol=1e-5, atol=1e-6)


def test_compliant_policy_and_a_layer_that_nobody_shared():
    sim = three_layers(agent="compliant", budgets=LOW)
    state, data = start(sim)
    after, log, _, _ = sim.examine(state, data)
    same = [
        same_bits(state.server.net["params"][g], after.server.net["params"][g])
        for g in ("fc1", "fc2", "fc")
    ]
    assert same == [False, False, True]
    assert int(log["exceed_compute"]) == int(log["exceed_comm"]) == 0
    np.testing.assert_array_equal(log["depth"], [b for _, b in LOW])
    np.testing.assert_allclose(log["epochs"], [c for c, _ in LOW])
    assert np.asarray(log["taken"]).tolist() == np.asarray(log["sent"]).tolist() == [6, 3, 0]


def test_clients_keep_what_they_do_not_take():
    before, sim = second_round()[0], default()
    for depth in (1, 2, 3):
        shared = (jnp.arange(3) < depth).astype(float)
        client = jax.tree.map(lambda a: a[4], before.clients)
        client, net = sim.method.receive(
            sim.env, before.server, client, Plan(shared, shared, 1.0), None
        )
        assert int(client.own.depth) == depth
        for layer, group in enumerate(("fc1", "fc2", "fc"), 1):
            origin = before.server.net if layer <= depth else client.resident
            assert same_bits(net["params"][group], origin["params"][group])
    assert not same_bits(before.server.net, jax.tree.map(lambda a: a[4], before.clients.resident))


# ---- the clients ---------------------------------------------------------------------------------
def test_fractional_epochs_run_exactly_their_steps():
    """Counted while training, over six rounds of random choices; every entry of the menu occurs."""
    sim = default()
    state, data = start(sim, seed=3)
    seen = set()
    for _ in range(6):
        state, log, _, _ = sim.examine(state, data)
        chosen = np.asarray(log["epochs"], np.float64).round(6)
        want = sum(steps_of(n, e) for n, e in zip(SIZES, chosen, strict=True))
        assert int(log["steps_needed"]) == int(log["steps_executed"]) == want
        seen |= set(chosen.tolist())
    assert seen == set(MENU)


def test_stragglers_do_less_and_are_judged_by_their_plan():
    sim = three_layers(slow=(1.0, 0.2), agent="compliant", budgets=((5, 3),) * N)
    state, data = start(sim)
    log = sim.examine(state, data)[1]
    full = sum(steps_of(n, 5) for n in SIZES)
    assert N <= int(log["steps_needed"]) < full and np.asarray(log["epochs"]).tolist() == [5.0] * N


def test_dropouts_count_nowhere():
    sim = default()
    state, data = start(sim)
    after, log, _ids, _ = sim.examine(state, data._replace(dropout=np.float32(0.5)))
    there = np.asarray(log["depth"]) > 0
    assert 0 < int(log["dropped"]) < N and int(there.sum()) == int(log["up"]) == int(
        after.agent.replay.size
    )
    assert same_bits(one(state.clients.resident, ~there), one(after.clients.resident, ~there))


# ---- what the agent sees and gets ----------------------------------------------------------------
def by_hand():
    """Observations, rewards per client and d_k of the second round, client by client in NumPy."""
    before, _, log, ids, nets, _ = second_round()
    fed = tiny.federation()
    seen, rewards, away = [], [], []
    for slot, client in enumerate(ids):
        c, b = TABLE_1[client][0], min(TABLE_1[client][1], 3)
        depth, epochs = int(log["depth"][client]), float(log["epochs"][client])
        hot = np.eye(N)[client]
        seen.append([*hot, float(before.clients.own.accuracy[client]), b / 3, c / 5])
        d = 0.0
        for layer, group in enumerate(("fc1", "fc2", "fc"), 1):
            if depth >= layer:
                others = [
                    parts(one(nets, s), group)
                    for s, j in enumerate(ids)
                    if log["depth"][j] >= layer
                ]
                updates = np.array(others) - parts(before.server.net, group)
                d += np.sum(
                    (
                        parts(one(nets, slot), group)
                        - parts(before.server.net, group)
                        - updates.mean(0)
                    )
                    ** 2
                )
        away.append(np.sqrt(d))
        a = accuracy(one(nets, slot), fed.client_rows(client, "val"))  # what it was not trained on
        rewards.append(
            a - LAMBDAS["comp"] * max(0, epochs - c) - LAMBDAS["comm"] * max(0, depth - b)
        )
    return np.array(seen), np.array(rewards), np.array(away)


def test_observations_and_rewards_by_hand():
    _, after, log, ids, _, _ = second_round()
    seen, rewards, away = by_hand()
    rows = one(after.agent.replay.rows, slice(N, 2 * N))
    np.testing.assert_allclose(rows.observation, seen, atol=1e-6)
    np.testing.assert_allclose(rows.reward, rewards - LAMBDAS["dist"] * away, atol=1e-5)
    np.testing.assert_allclose(log["reward"], np.mean(rewards - LAMBDAS["dist"] * away), atol=1e-5)
    np.testing.assert_allclose(log["divergence"], away.mean(), rtol=1e-4)
    assert (away > 1e-4).all() and rewards.min() < 0  # every term counted
    depth, epochs = (rows.action // 6) + 1, np.array(MENU)[rows.action % 6]
    np.testing.assert_array_equal(depth, log["depth"][ids])
    np.testing.assert_allclose(epochs, log["epochs"][ids], rtol=1e-6)
    np.testing.assert_allclose(
        one(after.clients.own.accuracy, ids).mean(), log["seen_accuracy"], rtol=1e-5
    )


def cohort_of_second_round():
    _, after, log, ids, nets, _ = second_round()
    depth = np.asarray(log["depth"])[ids]
    shared = (np.arange(3) < depth[:, None]).astype(np.float32)
    ok, none = np.arange(N) != 2, jnp.zeros(())
    plan = Plan(shared, shared, np.asarray(log["epochs"])[ids])
    reports = np.zeros(N)
    return (
        ok,
        Cohort((), none, (), none, ids, ok, none, reports, plan, none, none, nets),
        after.server,
    )


def test_round_scope_shares_the_sum_of_those_who_reported():
    ok, cohort, server = cohort_of_second_round()
    rewards, env = jnp.linspace(-3.0, 2.0, N), default().env
    own, shared = (
        np.asarray(
            make_method("qbandit", scope=scope).combine(env, server, server, rewards, cohort)
        )
        for scope in ("client", "round")
    )
    assert (own < np.asarray(rewards))[ok].all() and own[2] == rewards[2]
    np.testing.assert_allclose(shared, own[ok].sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("control", "width", "actions", "action", "epochs", "reward"),
    [
        ("joint", N + 3, 18, 2 * 6 + 3, 1, 0.75 - 1.0 * 0.5 - 2.0 * 2),
        ("layers", N + 2, 3, 2, 2, 0.75 - 2.0 * 2),
        ("epochs", N + 2, 6, 3, 1, 0.75 - 1.0 * 0.5),
    ],
)
def test_single_controls_drop_the_other_budget(control, width, actions, action, epochs, reward):
    """A client whose budgets are half an epoch and one layer gets three layers and 1 epoch, or 2
    where not steered."""
    env = dataclasses.replace(default().env, fed=tiny.federation())
    method = make_method("qbandit", control=control, budgets=((0.5, 1),) * N)
    agent, hooks = method.make_agent(env), method
    server, own = method.init(env, env.model.init(jax.random.key(0)))
    ctx = Ctx(jnp.int32(0), jax.random.key(0), jnp.int32(0), jnp.float32(2), jnp.float32(0.1))
    seen = hooks.observe(env, server, Client(own), ctx)
    assert seen.shape == (width,)
    assert agent.act(agent.init(jax.random.key(0)), seen, jax.random.key(0))[1].policy.shape == (
        actions,
    )
    plan = hooks.plan_of(env, action, server, ctx)
    assert float(plan.take.sum()) == float(plan.send.sum()) == 3 and float(plan.epochs) == epochs
    got = hooks.reward_of(env, server, server, Report(jnp.float32(0.75)), action, ctx)
    np.testing.assert_allclose(got, reward, atol=1e-6)


def test_training_accuracy_is_on_the_minibatches_of_the_round():
    sim, fed = three_layers(accuracy="train"), tiny.federation()
    state, data = start(sim)
    keys = jax.jit(sim.plan_round)(state, data).slots.ctx.key
    after, log, ids, nets = sim.examine(state, data)
    want = []
    for slot, client in enumerate(np.asarray(ids).tolist()):
        rows = np.asarray(fed.client_rows(client, "train"))
        order = np.asarray(epoch_permutations(jax.random.fold_in(keys[slot], 0), len(rows), 64, 1))[
            0
        ]
        seen = rows[
            order[: min(len(rows), steps_of(len(rows), float(log["epochs"][client])) * BATCH)]
        ]
        want.append(accuracy(one(nets, slot), seen))
    np.testing.assert_allclose(
        np.asarray(after.clients.own.accuracy)[np.asarray(ids)], want, atol=1e-6
    )


def test_long_training_on_noise_is_not_rewarded():
    """Labels are drawn by lot: whoever trains five epochs knows its minibatches by heart, and is
    right about nothing."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((490, 5, 5, 1)).astype(np.float32), rng.integers(0, 3, 490)
    rows = {"train": np.split(np.arange(120), N), "val": np.split(np.arange(120, 480), N)}
    fed = Federation.from_arrays(
        x, y, rows, test=np.arange(480, 490), classes=3, mean=0.0, std=1.0, name="noise"
    )
    gap = {}
    for options in ({}, {"accuracy": "train"}):
        seen = []
        for menu in ("0.01", "5"):
            method = make_method("qbandit", agent="random", control="epochs", menu=menu, **options)
            env = dataclasses.replace(
                default().env, model=build("mlp", fed.shape, 3, hidden=(32, 16)), max_epochs=5.0
            )
            who = Participation(N, N, tuple(range(N)))
            sim = simulate(
                method,
                env,
                fed,
                who,
                lr=optim.schedule("constant", 0.1, 8),
                evaluations=(),
                capacity=8,
            )
            seen.append(
                np.asarray(sim.run(*start(sim), jnp.int32(8))[1]["seen_accuracy"])[:8].mean()
            )
        gap[options.get("accuracy", "default")] = seen[1] - seen[0]
    assert gap["train"] > 0.15 and abs(gap["default"]) < 0.08, gap


# ---- what is logged and evaluated ----------------------------------------------------------------
def test_exceedances_and_pairwise_distance_by_hand():
    _, _, log, _ids, nets, _ = second_round()
    budgets = [(round(float(log["epochs"][k]), 6), int(log["depth"][k])) for k in range(N)]
    assert int(log["exceed_compute"]) == sum(budgets[k][0] > TABLE_1[k][0] for k in range(N))
    assert int(log["exceed_comm"]) == sum(budgets[k][1] > min(TABLE_1[k][1], 3) for k in range(N))
    vectors = [whole(one(nets, s)) for s in range(N)]
    apart = [np.linalg.norm(vectors[i] - vectors[j]) for i in range(N) for j in range(i)]
    np.testing.assert_allclose(log["pairwise_distance"], np.mean(apart), rtol=1e-4)


def test_personal_model_is_composed_of_server_and_own_layers():
    _, after, log, _, _, _ = second_round()
    sim, fed = default(), tiny.federation()
    scores = host(sim.evaluate(after, sim.data))
    test = np.asarray(fed.server_rows["test"])
    for client in range(N):
        depth, own = int(log["depth"][client]), one(after.clients.resident, client)
        layers = {
            g: (after.server.net if i < depth else own)["params"][g]
            for i, g in enumerate(("fc1", "fc2", "fc"))
        }
        want = accuracy({"params": layers}, test)
        np.testing.assert_allclose(
            scores["personal@global"]["accuracy"]["correct"][client] / len(test), want, atol=1e-6
        )
    tested = scores["global"]["accuracy"]
    np.testing.assert_allclose(
        tested["correct"] / tested["count"], accuracy(after.server.net, test), atol=1e-6
    )


def six_layers(policy, clip=False, **more):
    """The plans of a policy for all 36 actions and the ten clients of Table 1: (epochs, layers)
    [36, 10]."""
    env = dataclasses.replace(
        default().env,
        model=default().env.model._replace(groups=tuple("abcdef")),
        epochs=1.0,
        **more,
    )
    space = Actions(policy, ("layers", "epochs"), (), MENU, clip)
    table = jax.tree.map(jnp.asarray, read_budgets("table1", 10, 6))
    table = Budgets(table.epochs.astype(jnp.float32), table.layers)
    order = lambda action, k: space.order(env, action, Budgets(table.epochs[k], table.layers[k]))
    return host(
        jax.vmap(lambda a: jax.vmap(lambda k: order(a, k))(jnp.arange(10)))(jnp.arange(36))
    ), host(table)


@pytest.mark.parametrize(
    ("policy", "clip", "compute", "comm"),
    [
        ("full", False, 400, 800),
        ("random", False, 366.7, 383.3),
        ("compliant", False, 0, 0),
        ("q_bandit", True, 0, 0),
    ],
)
def test_expected_exceedances_of_table_1(policy, clip, compute, comm):
    """100 rounds, 10 clients: what the budgets imply for FedAvg, for uniform choices, and within
    budget."""
    budgets, most = six_layers(policy, clip)
    counts = [
        100 * (getattr(budgets, w) > getattr(most, w)).mean(0).sum() for w in ("epochs", "layers")
    ]
    np.testing.assert_allclose(counts, [compute, comm], atol=0.05)
    if policy == "compliant":
        np.testing.assert_array_equal(budgets.layers[0], [b for _, b in TABLE_1])
        np.testing.assert_allclose(budgets.epochs[0], [c for c, _ in TABLE_1])


@pytest.mark.parametrize("model", ["cnn6", "resnet18"])
def test_models_of_the_paper_have_six_layers(model):
    groups = build(model, (32, 32, 3), 10).groups
    assert len(groups) == 6 and read_budgets("table1", 10, len(groups)).layers.tolist() == [
        b for _, b in TABLE_1
    ]


# ---- budgets -------------------------------------------------------------------------------------
def test_budgets_from_a_file_live_in_the_state(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("epochs, layers\n" + "".join(f"{c},{b}\n" for c, b in LOW))
    assert [a.tolist() for a in read_budgets(path, N, 3)] == [
        a.tolist() for a in read_budgets(LOW, N, 3)
    ]
    sim = default()
    state, data = start(sim)
    poor = Budgets(np.full(N, 1e-6, np.float32), np.zeros(N, np.int32))
    log = sim.examine(state._replace(server=state.server._replace(budgets=poor)), data)[1]
    assert int(log["exceed_compute"]) == int(log["exceed_comm"]) == N  # those of the state count


def test_budgets_that_vary():
    env, given = default().env, Budgets(jnp.array([0.5, 2.0] * 3), jnp.array([1, 3] * 3))
    for k, t in ((0, 0), (1, 5), (4, 17)):
        factor = 1 + 0.6 * np.sin(2 * np.pi * (t / 10 + k / N))
        now = budgets_now(env, given, jnp.int32(k), jnp.int32(t), (0.6, 10.0))
        np.testing.assert_allclose(now.epochs, given.epochs[k] * factor, rtol=1e-5)
        assert int(now.layers) == np.clip(round(float(given.layers[k] * factor)), 1, 3)
    assert budgets_now(env, given, jnp.int32(1), jnp.int32(5), (0.0, 10.0)) == (2.0, 3)


def test_the_next_state_has_the_next_budgets():
    """Of an agent that bootstraps, with budgets that swing once in three rounds."""
    sim = three_layers(agent="dqn", vary="0.9:3", budgets=LOW)
    state, data = start(sim)
    for t in range(2):
        round_plan = jax.jit(sim.plan_round)(state, data)
        state = sim.examine(state, data)[0]
        ids = round_plan.slots.ctx.id
        rows = one(state.agent.replay.rows, slice(t * N, (t + 1) * N))
        for when, seen in ((t, rows.observation), (t + 1, rows.next_observation)):
            limits = jax.vmap(
                lambda k, when=when: sim.method.limits(sim.env, state.server, k, jnp.int32(when))
            )(ids)
            np.testing.assert_allclose(seen[:, -2], limits.layers / 3, rtol=1e-5)
            np.testing.assert_allclose(seen[:, -1], np.minimum(limits.epochs / 5, 1), rtol=1e-5)


def test_clipped_learner_stays_within_budgets_that_vary():
    sim = three_layers(clip=True, vary="0.9:3", budgets=LOW)
    state, data = start(sim)
    depths = []
    for _ in range(3):
        state, log, _, _ = sim.examine(state, data)
        assert int(log["exceed_compute"]) == int(log["exceed_comm"]) == 0
        depths.append(np.asarray(log["depth"]).tolist())
    assert max(map(max, depths)) == 3 > max(b for _, b in LOW)  # budgets grow, too


def write(folder, text):
    (folder / "budgets.csv").write_text(text)
    return str(folder / "budgets.csv")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budgets": LOW[:4]}, "budgets are of 4 clients and there are 6"),
        ({"budgets": "nowhere.csv"}, "'nowhere.csv' cannot be read; allowed: table1"),
        ({"budgets": "FILE:layers\n1\n"}, "must begin with the line epochs,layers"),
        ({"budgets": "FILE:epochs,layers\n1,2\n1\n"}, "line of client 1 must have two numbers"),
        (
            {"budgets": "FILE:epochs,layers\n" + "1,2\n" * 5 + "1,4\n"},
            "layers of client 5.*'4' is too large; allowed: 3",
        ),
        ({"budgets": ((1, 2),) * 5 + ((0, 1),)}, "epochs of client 5.*'0' is too small"),
        (
            {"budgets": ((1, 2),) * 5 + ((1, 1.5),)},
            "layers of client 5.*'1.5' is not a whole number",
        ),
        ({"budgets": 3}, "3 are not budgets"),
        ({"depths": "1x4"}, "depths 1x4 is not allowed; model 'mlp' has 3 parameter groups"),
        ({"depths": "2x1"}, "depths 2x1 is not allowed"),
        ({"menu": "1,0.5"}, "menu '1,0.5' is not allowed"),
        ({"menu": "1,x"}, "'x' is not a number"),
        (
            {"menu": "1,2", "control": "layers"},
            "menu has no effect with agent=q_bandit and control=layers",
        ),
        ({"depths": "1x2", "agent": "full"}, "depths has no effect with agent=full"),
        ({"control": "all"}, "control of qbandit"),
        ({"scope": "all"}, "scope of qbandit"),
        ({"accuracy": "test"}, "accuracy of qbandit"),
        ({"agent": "fixed"}, "agent of qbandit"),
        ({"agent": "full", "agent.lr": 1}, "option of agent 'full'"),
        ({"vary": "1"}, "vary '1' is not allowed"),
        ({"vary": "0.5:0"}, "vary '0.5:0' is not allowed"),
        ({"lam_comp": -1}, "lam_comp=-1 is not allowed"),
    ],
)
def test_mistakes_are_one_sentence(options, says, tmp_path):
    budgets = options.get("budgets")
    if isinstance(budgets, str) and budgets.startswith("FILE:"):
        options = options | {"budgets": write(tmp_path, budgets.removeprefix("FILE:"))}
    env = dataclasses.replace(default().env, fed=tiny.federation())
    with pytest.raises(UserError, match=says):
        make_method("qbandit", **options).make_agent(env)


def test_heldout_needs_validation_rows():
    fed = tiny.federation()
    fed = dataclasses.replace(
        fed, rows={"train": fed.rows["train"]}, size={"train": fed.size["train"]}
    )
    with pytest.raises(UserError, match=r"heldout needs validation rows .* --val-fraction"):
        make_method("qbandit", accuracy="heldout").make_agent(
            dataclasses.replace(default().env, fed=fed)
        )


# ---- it learns -----------------------------------------------------------------------------------
@functools.cache
def hundred_rounds(agent: str, seed: int = 0):
    """Exceedances [100, 2] and the log of 100 rounds: ten clients with the budgets of Table 1, all
    defaults."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, 330)
    x = (rng.standard_normal((330, 4, 4, 1)) + 2 * y[:, None, None, None]).astype(np.float32)
    own = np.arange(300).reshape(10, 30)
    rows = {"train": list(own[:, :24]), "val": list(own[:, 24:])}
    fed = Federation.from_arrays(
        x, y, rows, test=np.arange(300, 330), classes=3, mean=0.0, std=1.0, name="ten"
    )
    model = build("mlp", fed.shape, 3, hidden=(6, 6, 6, 6, 6))  # six layers
    method = make_method("qbandit", agent=agent)
    env = Env(
        model, losses.make_loss("ce", 3), optim.Sgd(0.0, 0.0), 10, 10, 8, 1.0, 5.0, rounds=100
    )
    who = Participation(10, 10, tuple(range(10)))
    sim = simulate(
        method,
        env,
        fed,
        who,
        lr=optim.schedule("constant", 0.01, 100),
        evaluations=(),
        eval_every=100,
        capacity=1,
    )
    _, logs, _ = sim.run(*start(sim, seed), jnp.int32(100))
    return np.stack([logs["exceed_compute"], logs["exceed_comm"]], 1), host(logs)


def test_the_learner_exceeds_less_than_random_at_the_shipped_defaults():
    (learned, logs), (random, _) = hundred_rounds("q_bandit"), hundred_rounds("random")
    assert abs(random.sum(0) - [366.7, 383.3]).max() < 60
    assert (learned[70:].sum(0) < 0.4 * random[70:].sum(0)).all(), (
        learned[70:].sum(0),
        random[70:].sum(0),
    )
    assert (learned.sum(0) < 0.75 * random.sum(0)).all(), (learned.sum(0), random.sum(0))
    np.testing.assert_allclose(
        logs["agent_epsilon"][:100], np.maximum(0.05, 0.97 ** np.arange(100)), rtol=1e-4
    )
    assert (
        logs["agent_live_critic"][:100].min() > 0.3
        and logs["reward"][70:].mean() > logs["reward"][:20].mean() + 1
    )
