"""FedPolicy against FedAvg, against NumPy, against the paper's byte counts; what the agent sees,
and that it can learn."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from by_hand import accuracy, predict, vector
from tiny import CLASSES, M, N, close, same_bits, simulation, start

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.local import local_sgd, upload
from fedjax_sim.local.optim import schedule
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedpolicy import STATES, observation_size
from fedjax_sim.methods.fedpolicy.actions import subset_masks
from fedjax_sim.models import build
from fedjax_sim.plans import floats_on_wire, payload_bytes


def rounds_of(sim, count=2):
    state, data = start(sim)
    for _ in range(count):
        state = sim.examine(state, data)[0]
    return state


# ---- what it reduces to --------------------------------------------------------------------------
def test_full_policy_is_fedavg_with_uniform_weights():
    mine, base = (
        rounds_of(simulation("fedpolicy", agent="full")),
        rounds_of(simulation("fedavg", weights="uniform")),
    )
    assert close(mine.server.net, base.server.net, 1e-6)


def keeps(private: str):
    """A static policy in its own words: one group is the client's, the server averages all and
    knows no blocks or plans."""

    class Keeps(Method):
        needs = frozenset({"resident"})
        has_global_model = False

        def init(self, env, net):
            return net["params"], net["params"][private]

        def receive(self, env, server, client, plan, ctx):
            return client, {"params": {**server, private: client.own}, "batch_stats": {}}

        def local(self, env, net, server, client, ctx):
            client, done = local_sgd(env, net, client, ctx)
            return client._replace(own=done.net["params"][private]), upload(
                env, ctx, done, "uniform"
            )

        def aggregate(self, env, server, cohort):
            return cohort.mean["params"]

    return Keeps()


@pytest.mark.parametrize("block, private", [("backbone", "fc"), ("head", "fc1")])
def test_static_policies_keep_a_block_private(block, private):
    """agent=backbone is FedPer with uniform weights whose heads are averaged too, but never handed
    out."""
    sim = simulation("fedavg")
    everybody = Participation(M, M, tuple(range(N)))
    base = rounds_of(
        simulate(
            keeps(private),
            sim.env,
            tiny.federation(),
            everybody,
            lr=schedule("constant", 0.05, 8),
            evaluations=(),
        )
    )
    mine = rounds_of(simulation("fedpolicy", agent=block, first="any"))
    assert close(mine.server.net["params"], base.server, 1e-6)
    assert close(mine.clients.resident, base.clients.resident, 1e-6)
    named = rounds_of(simulation(block, first="any"))
    assert same_bits((named.server, named.clients), (mine.server, mine.clients))


def test_first_participation_gets_everything():
    """In round 2 those who were there get the head, the newcomers everything; and so says what was
    logged."""
    sim = simulation("head")
    state, data = start(sim)
    state, _, before, _ = sim.examine(state, data)
    assert np.asarray(state.clients.own.joined).nonzero()[0].tolist() == sorted(
        np.asarray(before).tolist()
    )
    round_plan = jax.jit(sim.plan_round)(state, data)
    ids = np.asarray(round_plan.slots.ctx.id)
    known = np.isin(ids, np.asarray(before))
    assert known.any() and not known.all()
    np.testing.assert_array_equal(
        round_plan.slots.plan.take, np.where(known[:, None], [[0, 1]], [[1, 1]])
    )
    log = sim.examine(state, data)[1]
    np.testing.assert_array_equal(log["acted_takes"], round_plan.slots.plan.take)
    np.testing.assert_array_equal(log["acted_ids"], ids)
    assert (int(log["action_full"]), int(log["action_head"])) == ((~known).sum(), known.sum())
    for agent in ("sac", "dqn", "oracle"):  # whoever decides may not decide otherwise
        options = {"agent.batch": 4} if agent != "oracle" else {}
        sim = simulation("fedpolicy", agent=agent, **options)
        assert set(np.asarray(jax.jit(sim.plan_round)(*start(sim)).actions).tolist()) == {0}
    mix = simulation("fedpolicy", actions="mix", **{"agent.batch": 4, "agent.gradient_steps": 1})
    state, data = start(mix)
    slot = jax.tree.map(lambda a: a[0], jax.jit(mix.plan_round)(state, data).slots)
    client = jax.tree.map(lambda a: a[0], state.clients)
    client = client._replace(resident=jax.tree.map(lambda a: a + 1, client.resident))
    assert close(
        mix.method.receive(mix.env, state.server, client, slot.plan, slot.ctx)[1],
        state.server.net,
        0,
    )


def test_blocks_move_the_papers_bytes():
    """ResNet-18, 10 classes, 10 clients: 0.8331, 0.8329 and 0.4167 GB per round."""
    model = build("resnet18", (32, 32, 3), 10)
    env = dataclasses.replace(simulation("fedpolicy", agent="full").env, model=model)
    floats = env.group_floats(jax.eval_shape(model.init, jax.random.key(0)))
    assert (sum(floats[:-1]), floats[-1]) == (11_176_512, 5_130)
    for agent, want in (("full", 0.8331), ("backbone", 0.8329), ("head", 0.4167)):
        control = make_method("fedpolicy", agent=agent)
        action = ("full", "backbone", "head").index(agent)
        plan = control.plan_of(env, action, None, tiny_ctx())
        taken, sent = (10 * (np.asarray(mask) > 0)[None] for mask in (plan.take, plan.send))
        down, up = payload_bytes(
            taken, sent, floats_on_wire(floats), np.array([10]), np.array([10])
        )
        assert round(float(down[0] + up[0]) / 2**30, 4) == want


def tiny_ctx():
    from fedjax_sim.types import Ctx

    return Ctx(jnp.int32(0), jax.random.key(0), jnp.int32(0), jnp.float32(1), jnp.float32(0.1))


# ---- state, reward, transition -------------------------------------------------------------------
def numpy_state(fed, confusion, resident, net, client):
    rows = np.asarray(confusion.conf, np.float64)
    away = np.linalg.norm(vector(resident) - vector(net)) / np.linalg.norm(vector(net))
    return np.concatenate(
        [
            (rows / rows.sum(1, keepdims=True)).ravel(),
            [
                accuracy(fed, resident, fed.client_rows(client, "val")),
                accuracy(fed, net, fed.server_rows["val"]),
                away,
            ],
        ]
    )


def test_state_reward_and_transition_by_hand():
    """The second round of a SAC run: everything in the replay, recomputed in NumPy from nets, rows
    and confusions."""
    sim = simulation("fedpolicy", first="any", **{"agent.batch": 4})
    state, data = start(sim)
    fed = data.fed
    one = lambda tree, i: jax.tree.map(lambda a: np.asarray(a)[i], tree)
    first = sim.examine(state, data)[0]
    second, log, ids, nets = sim.examine(first, data)
    replay = second.agent.replay
    assert int(replay.size) == 2 * M
    rewards, gaps, heads, inits = [], [], [], []
    for slot, client in enumerate(np.asarray(ids).tolist()):
        row = one(replay.rows, M + slot)
        before = numpy_state(
            fed,
            one(first.clients.confusion, client),
            one(first.clients.resident, client),
            first.server.net,
            client,
        )
        after = numpy_state(
            fed, one(second.clients.confusion, client), one(nets, slot), second.server.net, client
        )
        np.testing.assert_allclose(row.observation, before, atol=1e-5)
        np.testing.assert_allclose(row.next_observation, after, atol=1e-5)
        assert before.shape == (CLASSES**2 + 3,)
        reward = (after[-3] - before[-3]) + 0.25 * (after[-2] - before[-2])
        np.testing.assert_allclose(row.reward, reward, atol=1e-6)
        assert float(row.done) == 0.0 and int(row.action) in (0, 1, 2)
        rewards.append(reward)
        resident, net = (
            one(first.clients.resident, client)["params"],
            jax.tree.map(np.asarray, first.server.net["params"]),
        )
        part = lambda tree, g: np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree[g])])
        gaps.append(np.linalg.norm(part(resident, "fc1") - part(net, "fc1")))
        heads.append(np.linalg.norm(part(resident, "fc") - part(net, "fc")))
        takes = [(1, 1), (1, 0), (0, 1)][int(row.action)]
        inits.append(
            np.concatenate(
                [
                    part(net if take else resident, g)
                    for take, g in zip(takes, ("fc1", "fc"), strict=True)
                ]
            )
        )
    np.testing.assert_allclose(log["reward"], np.mean(rewards), atol=1e-6)
    np.testing.assert_allclose(log["backbone_mismatch"], np.mean(gaps), rtol=1e-4)
    np.testing.assert_allclose(log["head_mismatch"], np.mean(heads), rtol=1e-4)
    drift = np.mean(np.sum((np.array(inits) - np.mean(inits, 0)) ** 2, 1))
    np.testing.assert_allclose(log["init_drift"], drift, rtol=1e-3, atol=1e-6)
    assert sum(int(log[f"action_{a}"]) for a in ("full", "backbone", "head")) == M


def test_first_participation_knows_the_initial_model():
    """Resident = Θ⁰, its accuracy on every client's validation rows, uniform confusion rows,
    distance 0."""
    sim = simulation("fedpolicy", **{"agent.batch": 4})
    state, data = start(sim)
    want = [accuracy(data.fed, state.server.net, data.fed.client_rows(i, "val")) for i in range(N)]
    np.testing.assert_allclose(state.clients.own.acc, want, atol=1e-6)
    np.testing.assert_allclose(
        state.server.acc,
        accuracy(data.fed, state.server.net, data.fed.server_rows["val"]),
        atol=1e-6,
    )
    seen = np.asarray(jax.jit(sim.plan_round)(state, data).observed)
    np.testing.assert_allclose(seen[:, : CLASSES**2], 1 / CLASSES, atol=1e-6)
    np.testing.assert_allclose(seen[:, -1], 0, atol=1e-6)


def test_test_labels_never_reach_the_agent():
    sim = simulation("fedpolicy", **{"agent.batch": 4})
    state, data = start(sim)
    fed = data.fed
    rows = np.concatenate(
        [fed.server_rows["test"], *(fed.client_rows(i, "test") for i in range(N))]
    )
    y = np.array(fed.y)
    y[rows] = (y[rows] + 1) % CLASSES
    other = data._replace(fed=dataclasses.replace(fed, y=y))
    (after, log, *_), (after2, log2, *_) = sim.examine(state, data), sim.examine(state, other)
    assert same_bits((after.agent, log), (after2.agent, log2))


# ---- switches ------------------------------------------------------------------------------------
def test_state_subsets_change_the_observation():
    assert [observation_size(s, 10) for s in ("all", "ncf", "ncfnla", "ocmla", "opd")] == [
        103,
        3,
        2,
        102,
        102,
    ]
    assert observation_size("all", 100) == 10_003
    state, data = start(simulation("fedpolicy", **{"agent.batch": 4}))
    env, ctx = simulation("fedpolicy", **{"agent.batch": 4}).open(data), tiny_ctx()
    client = jax.tree.map(lambda a: a[0], state.clients)
    everything = make_method("fedpolicy").observe(env, state.server, client, ctx)
    c2 = CLASSES**2
    keep = dict(
        all=range(c2 + 3),
        ncf=range(c2, c2 + 3),
        ncfnla=(c2 + 1, c2 + 2),
        ocmla=range(c2 + 2),
        opd=(*range(c2 + 1), c2 + 2),
    )
    assert {*keep, "portable"} == set(STATES)
    for name in keep:
        seen = make_method("fedpolicy", state=name).observe(env, state.server, client, ctx)
        np.testing.assert_array_equal(seen, everything[jnp.array(list(keep[name]))])
    raw = make_method("fedpolicy", state_scaling="raw").observe(env, state.server, client, ctx)
    np.testing.assert_allclose(raw[:c2], np.ravel(client.confusion.conf))


def test_rewards():
    from fedjax_sim.methods.fedpolicy import Report, Server

    zero = jnp.float32(0)
    report, old, new = (
        Report(jnp.float32(0.5), jnp.float32(0.7), zero, zero, zero),
        Server((), 0.4),
        Server((), 0.8),
    )
    reward = lambda **options: float(
        make_method("fedpolicy", **options).reward_of(None, old, new, report, 0, None)
    )
    assert reward() == pytest.approx(0.2 + 0.25 * 0.4)
    assert reward(lam="1") == pytest.approx(0.6)
    assert reward(reward="local") == pytest.approx(0.2)
    assert reward(reward="global") == pytest.approx(0.4)
    # the shares come by `combine`
    assert reward(reward="mixture") == reward(reward="contribution") == pytest.approx(0.2)


def test_layerwise_and_mix():
    """Subsets of groups as masks; mixing coefficients that interpolate, with DDPG learning from
    real-valued actions."""
    assert {tuple(m) for m in np.asarray(subset_masks(2), int).tolist()} == {(1, 0), (0, 1), (1, 1)}
    sim = simulation("fedpolicy", actions="layerwise", **{"agent.batch": 4})
    state, data = start(sim)
    round_plan = jax.jit(sim.plan_round)(state, data)
    np.testing.assert_array_equal(
        round_plan.slots.plan.take, np.asarray(subset_masks(2))[np.asarray(round_plan.actions)]
    )
    sim = simulation("fedpolicy", actions="mix", **{"agent.batch": 4, "agent.gradient_steps": 1})
    state, data = start(sim)
    for _ in range(4):
        state, log, ids, _ = sim.examine(state, data)
    after = state._replace(
        clients=state.clients._replace(own=state.clients.own._replace(last=jnp.zeros(N, jnp.int32)))
    )
    round_plan = jax.jit(sim.plan_round)(after, data)
    take = np.asarray(round_plan.slots.plan.take)
    np.testing.assert_allclose(take, (np.asarray(round_plan.actions) + 1) / 2, atol=1e-6)
    assert (
        take.shape == (M, 2)
        and (take >= 0).all()
        and (take <= 1).all()
        and len(np.unique(take)) > 2
    )
    assert float(log["agent_critic"]) > 0 and {"mix_fc1", "mix_fc"} <= set(log)
    client = jax.tree.map(lambda a: a[ids[0]], after.clients)
    slot = jax.tree.map(lambda a: a[0], round_plan.slots)
    _, net = sim.method.receive(sim.env, after.server, client, slot.plan, slot.ctx)
    for g, name in enumerate(("fc1", "fc")):
        mine, common = (
            np.asarray(t["params"][name]["kernel"]) for t in (client.resident, after.server.net)
        )
        np.testing.assert_allclose(
            net["params"][name]["kernel"], mine + take[0, g] * (common - mine), atol=1e-6
        )


def test_what_is_executed_is_what_is_learned_and_logged():
    """actions=mix: at a first participation everything is taken, whatever the agent says; it learns
    nothing from that."""
    sim = simulation("fedpolicy", actions="mix", **{"agent.batch": 4, "agent.gradient_steps": 1})
    state, data = start(sim)
    joined, stored = set(), 0
    for _ in range(3):
        round_plan = jax.jit(sim.plan_round)(state, data)
        new = np.array(
            [client not in joined for client in np.asarray(round_plan.slots.ctx.id).tolist()]
        )
        state, log, ids, _ = sim.examine(state, data)
        joined |= set(np.asarray(ids).tolist())
        takes = np.asarray(log["acted_takes"])
        assert (takes[new] == 1).all() and (np.asarray(log["acted_actions"])[new] == 1).all()
        assert (takes[~new] < 1).any() or new.all()
        np.testing.assert_allclose([log["mix_fc1"], log["mix_fc"]], takes.mean(0), rtol=1e-6)
        replay = state.agent.replay
        np.testing.assert_array_equal(
            replay.rows.action[stored : stored + (~new).sum()], log["acted_actions"][~new]
        )
        stored += (~new).sum()
        assert int(replay.size) == stored
    assert 0 < stored < 3 * M


def test_forced_choices_are_not_remembered():
    """Blocks: who takes part for the first time gets everything, and that is no row of the replay,
    nor of the statistics."""
    sim = simulation("fedpolicy", **{"agent.batch": 4})
    state, data = start(sim)
    first = sim.examine(state, data)[0]
    assert int(first.agent.replay.size) == 0 and float(first.agent.statistics.seen) == 0
    known = np.asarray(first.clients.own.joined)
    second, _, ids, _ = sim.examine(first, data)
    count = known[np.asarray(ids)].sum()
    assert int(second.agent.replay.size) == int(second.agent.statistics.seen) == count > 0


def test_greedy_takes_what_the_agent_thinks_best():
    """The same learned agent, drawing and not: in place of a draw, the most probable available
    block; nothing is learned."""
    draws, picks = (
        simulation("fedpolicy", greedy=greedy, **{"agent.batch": 4}) for greedy in (False, True)
    )
    state, data = start(draws)
    for _ in range(3):
        state = draws.examine(state, data)[0]
    own = start(picks)[1]  # its settings are among its data
    round_plan, sure = jax.jit(draws.plan_round)(state, data), jax.jit(picks.plan_round)(state, own)
    np.testing.assert_array_equal(sure.actions, np.asarray(round_plan.info.policy).argmax(-1))
    assert same_bits(picks.examine(state, own)[0].agent, state.agent)


def test_oracle_takes_the_candidate_with_the_lowest_validation_loss():
    sim = simulation("fedpolicy", agent="oracle")
    state, data = start(sim)
    for _ in range(2):
        state = sim.examine(state, data)[0]
    round_plan = jax.jit(sim.plan_round)(state, data)
    fed = data.fed
    for slot, client in enumerate(np.asarray(round_plan.slots.ctx.id).tolist()):
        resident = jax.tree.map(lambda a: np.asarray(a)[client], state.clients.resident)["params"]
        net = jax.tree.map(np.asarray, state.server.net)["params"]
        rows, losses = fed.client_rows(client, "val"), []
        for body, head in ((net, net), (net, resident), (resident, net)):
            z = predict(
                {"params": {"fc1": body["fc1"], "fc": head["fc"]}}, np.asarray(fed.x)[rows]
            ).astype(np.float64)
            losses.append(
                np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), np.asarray(fed.y)[rows]])
            )
        np.testing.assert_allclose(round_plan.observed[slot], losses, atol=1e-5)
        assert int(round_plan.actions[slot]) == int(np.argmin(losses))


@pytest.mark.parametrize("agent", ["random"])
def test_every_agent_gives_a_plan(agent):
    """The round plan only, which is cheap to compile; that agents learn is tested where they
    live."""
    sim = simulation("fedpolicy", agent=agent)
    round_plan = jax.jit(sim.plan_round)(*start(sim))
    assert set(np.asarray(round_plan.actions).tolist()) <= {0, 1, 2} and np.asarray(
        round_plan.slots.plan.take
    ).shape == (M, 2)


def test_agent_options_arrive():
    sim = simulation("fedpolicy", **{"agent": "dqn", "agent.hidden": "7x5", "agent.capacity": "70"})
    state = start(sim)[0]
    assert state.agent.replay.rows.reward.shape == (70,)
    widths = {a.shape for a in jax.tree.leaves(state.agent.learner.online) if a.ndim == 2}
    assert {(CLASSES**2 + 3, 7), (7, 5), (5, 3)} == widths


@pytest.mark.parametrize(
    "options, message",
    [
        ({"agent": "sca"}, "unknown agent of fedpolicy 'sca'"),
        ({"state": "al"}, "unknown state of fedpolicy 'al'"),
        ({"lam": "-1"}, r"lam=-1 is not allowed"),
        ({"reward": "x"}, "unknown reward"),
        ({"actions": "x"}, "unknown actions"),
        ({"actions": "mix", "agent": "sac"}, "allowed: ddpg"),
        ({"agent": "ddpg"}, "unknown agent"),
        ({"agent.lrr": "1"}, "unknown option of agent 'sac' 'lrr'"),
        ({"agent": "full", "agent.lr": "1"}, "option of agent 'full'"),
        ({"state_scaling": "x"}, "unknown state_scaling"),
        ({"next_state": "x"}, "unknown next_state of fedpolicy 'x'"),
        ({"first": "x"}, "unknown first of fedpolicy 'x'"),
        ({"agent": "full", "state": "ncf"}, "state=ncf has no effect with agent 'full'"),
        ({"agent": "oracle", "next_state": "participation"}, "no effect with agent 'oracle'"),
        ({"agent": "random", "greedy": "true"}, "no effect with agent 'random'"),
        ({"agent.lr": "fast"}, "agent.lr 'fast' is not a number"),
        ({"agent.gamma": "2"}, "agent 'sac': gamma must lie between 0 and 1"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(UserError, match=message):
        simulation("fedpolicy", **options)


def test_what_it_needs_of_model_and_data():
    sim, fed = simulation("fedpolicy", **{"agent.batch": 4}), tiny.federation()
    simulated = lambda fed, env=sim.env: simulate(
        sim.method, env, fed, Participation(M, M, tuple(range(N))), lr=schedule("constant", 0.1, 1)
    )
    rows = {s: [fed.client_rows(i, s) for i in range(N)] for s in ("train", "val", "test")}
    bare = lambda **more: Federation.from_arrays(
        fed.x,
        fed.y,
        more.pop("rows", rows),
        test=fed.server_rows["test"],
        classes=CLASSES,
        mean=0.0,
        std=1.0,
        **more,
    )
    with pytest.raises(UserError, match="server holds back for validation"):
        simulated(bare())
    with pytest.raises(UserError, match="validation rows on every client"):
        simulated(bare(rows={"train": rows["train"]}, server_val=fed.server_rows["val"]))
    # a static policy needs no validation rows; its reward is not known
    static = simulation("fedpolicy", agent="full")
    plain = simulate(
        static.method,
        static.env,
        bare(),
        Participation(M, M, tuple(range(N))),
        lr=schedule("constant", 0.1, 1),
    )
    log = plain.examine(*start(plain))[1]
    assert (
        np.isnan(float(log["reward"]))
        and "server_val_acc" not in log
        and np.isfinite(float(log["init_drift"]))
    )
    with pytest.raises(UserError, match="one parameter group"):
        simulated(fed, dataclasses.replace(sim.env, model=sim.env.model._replace(groups=("fc",))))


def test_loss_of_the_paper_unless_another_is_named():
    from fedjax_sim.experiment import Experiment
    from fedjax_sim.runner.prepare import prepare

    config = Experiment.of("fedpolicy", model="mlp", clients=4, rounds=1, chunk="1", devices="1")
    assert prepare(config).experiment.training.loss == "c3e"
    assert prepare(config.replace(loss="ce")).experiment.training.loss == "ce"
    assert prepare(config.replace(method="fedavg")).experiment.training.loss == "ce"


# ---- figures -------------------------------------------------------------------------------------
def test_figures_from_run_directories(tmp_path):
    """Every figure is made from plain CSV files; shares are those of the last ten rounds."""
    import json

    from fedjax_sim.cli.main import main
    from fedjax_sim.report.runs import load_run, windowed_shares
    from fedjax_sim.runner import run_directory
    from fedjax_sim.runner.files import stamp

    rng = np.random.default_rng(0)
    for agent in ("sac", ""):
        folder = tmp_path / (agent or "plain")
        folder.mkdir()
        options = {"agent": agent} if agent else {}
        (folder / "config.json").write_text(
            json.dumps(
                {"config": {"method": "fedpolicy" if agent else "fedavg", "options": options}}
            )
        )
        counts = rng.multinomial(10, [0.5, 0.4, 0.1], 20)
        names = "round,bytes_down,bytes_up" + (
            ",action_full,action_backbone,action_head,action_entropy" if agent else ""
        )
        lines = [
            f"{i + 1},{900 + i},1000" + (f",{','.join(map(str, c))},0.5" if agent else "")
            for i, c in enumerate(counts)
        ]
        (folder / "rounds.csv").write_text("\n".join([names, *lines]) + "\n")
        (folder / "metrics.csv").write_text(
            "round,global_acc,client_mean\n"
            + "".join(f"{i},{0.04 * i},{'' if i % 2 else 0.03 * i}\n" for i in range(1, 21))
        )
        run_directory.write_manifest(
            folder, {file.name: stamp(file.read_bytes()) for file in folder.iterdir()}
        )
        if agent:
            shares = windowed_shares(load_run(folder).actions)
            np.testing.assert_allclose(shares["full"][14], counts[5:15, 0].sum() / 100)
            np.testing.assert_allclose(shares["head"][3], counts[:4, 2].sum() / 40)
    assert (
        main(
            [
                "report",
                str(tmp_path / "sac"),
                str(tmp_path / "plain"),
                "--out",
                str(tmp_path / "figures"),
            ]
        )
        == 0
    )
    drawn = {p.name for p in (tmp_path / "figures").iterdir()}
    assert {
        "accuracy.png",
        "actions.png",
        "communication.png",
        "policy.png",
        "report.html",
    } <= drawn
    assert all((tmp_path / "figures" / name).stat().st_size > 5000 for name in drawn)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
