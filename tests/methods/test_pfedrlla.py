"""pFedRLLA against NumPy, against the rules it contains, against forced agents; its regimes and its
rewards."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import M, N, assert_close, close, same_bits, start

from fedjax_sim.cli.main import main
from fedjax_sim.engine.layout import Layout, make_layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Controlled
from fedjax_sim.local import losses, optim
from fedjax_sim.methods import make_method
from fedjax_sim.methods.pfedrlla import PFedRLLA
from fedjax_sim.methods.pfedrlla.regimes import Schedule
from fedjax_sim.methods.pfedrlla.reward import preferred, terms
from fedjax_sim.models import build
from fedjax_sim.types import Env

SMALL = {"side": 4, "embedding": 6, "agent.batch": 4, "agent.capacity": 64, "head_layers": "last"}


def forced(method, weights):
    """The method with an agent that always chooses weights(observation) [m+1], and learns
    nothing."""
    from agents.types import Agent, Info

    class Saying(Agent):
        def init(self, key):
            return ()

        def act(self, state, observation, key, available=None):
            action = weights(observation)
            return action, Info(jnp.zeros(()), jnp.zeros(()), action, available)

        def update(self, state, transitions, key):
            return state, {}

    class Forced(PFedRLLA):
        def make_agent(self, env):
            return Saying()

    return varied(Forced, method)


def varied(kind, method):
    """The same options in another class."""
    return kind(**{one.name: getattr(method, one.name) for one in dataclasses.fields(method)})


def simulation(
    method=None,
    participants: int = M,
    chunk: int = 1,
    devices: int = 1,
    stored="all",
    started=(),
    **options,
):
    """A small net whose body is fc1 and whose head is fc; options of pfedrlla unless a method is
    given."""
    fed = tiny.federation()
    method = method or make_method("pfedrlla", **{**SMALL, **options})
    env = Env(
        build("mlp", fed.shape, fed.classes, hidden=(5,)),
        losses.make_loss("ce", fed.classes),
        optim.Sgd(0.9, 5e-4),
        N,
        participants,
        tiny.BATCH,
        2.0,
        2.0,
        rounds=8,
        started=started,
    )
    everyone = Participation(participants, participants, tuple(range(N)))
    layout: Layout = make_layout(chunk, devices)
    rate = optim.schedule("constant", 0.05, 8)
    return simulate(
        method,
        env,
        fed,
        everyone,
        layout,
        lr=rate,
        evaluations=("resident",),
        eval_every=2,
        capacity=2,
        stored=stored,
    )


@pytest.fixture(scope="module")
def scratch():
    return simulation(random_rounds=1, every=1)


@pytest.fixture(scope="module")
def moved(scratch):
    """(sim, state, data) after two rounds: clients differ, and K' is not the cohort."""
    state, data = start(scratch)
    for _ in range(2):
        state = scratch.examine(state, data)[0]
    return scratch, state, data


COMPILED: dict = {}


def announced(sim):
    """Compiled once: (state, data) -> (round plan, the mixture of every participant [M, …])."""

    def both(state, data):
        round_plan = sim.plan_round(state, data)
        env = dataclasses.replace(sim.open(data), peers=round_plan.peers)
        rows = jax.tree.map(lambda a: a[round_plan.slots.row], state.clients)
        mix = lambda row, slot: sim.method.receive(
            env, round_plan.server, row, slot.plan, slot.ctx
        )[1]
        return round_plan, jax.vmap(mix)(rows, round_plan.slots)

    return COMPILED.setdefault(id(sim), jax.jit(both))


def numpy_tree(tree):
    return jax.tree.map(np.asarray, tree)


# ---- the mixture ---------------------------------------------------------------------------------
def test_mixture_is_a_double_loop(moved):
    """Body by ρ_j = n_j / (n_k + Σ n), head by the action, over the previous participants and the
    client itself."""
    sim, state, data = moved
    round_plan, mixtures = announced(sim)(state, data)
    previous, n = np.asarray(state.server.previous), np.asarray(data.fed.size["train"])
    bank = numpy_tree(state.clients.resident["params"])
    np.testing.assert_array_equal(round_plan.server.previous, previous)
    for slot in range(M):
        k, action = (
            int(round_plan.slots.ctx.id[slot]),
            np.asarray(round_plan.actions[slot], np.float64),
        )
        assert abs(action.sum() - 1) < 1e-5 and (action >= 0).all()
        total = n[k] + sum(n[j] for j in previous)
        want = jax.tree.map(lambda a, k=k: np.zeros_like(a[k]), bank)
        for group in ("fc1", "fc"):
            for leaf in want[group]:
                for place, j in enumerate([*previous, k]):
                    weight = n[j] / total if group == "fc1" else action[place]
                    want[group][leaf] = want[group][leaf] + weight * bank[group][leaf][j]
        assert_close(
            want, jax.tree.map(lambda a, s=slot: np.asarray(a[s]), mixtures["params"]), 1e-5
        )


def test_first_round_mixes_its_own_cohort(scratch):
    state, data = start(scratch)
    round_plan = announced(scratch)(state, data)[0]
    np.testing.assert_array_equal(round_plan.server.previous, round_plan.slots.ctx.id)
    assert round_plan.server.reported.all() and not state.server.reported.any()


def test_who_failed_to_report_counts_nothing(moved):
    sim, state, data = moved
    missing = state._replace(
        server=state.server._replace(reported=jnp.array([True, False, False, True]))
    )
    round_plan = announced(sim)(missing, data)[0]
    weights = np.asarray(round_plan.slots.plan.weights)  # [M, G, m+1]
    assert (weights[:, :, 1:3] == 0).all() and (weights[:, :, [0, 3, 4]] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (np.asarray(round_plan.observed).reshape(M, M + 1, -1)[:, 1:3] == 0).all()


# ---- what it reduces to --------------------------------------------------------------------------
def rounds_of(sim, count=3):
    state, data = start(sim)
    for _ in range(count):
        state, _, _, nets = sim.examine(state, data)
    return state, nets


def test_own_weight_alone_is_local_training():
    """Every agent's weight on oneself, bodies at home: after the same first training, the uploads
    of local training."""
    alone = lambda observation: jnp.zeros(M + 1).at[-1].set(1.0)
    options = dict(SMALL, body="local", initial_training=False)
    ours = simulation(forced(make_method("pfedrlla", **options), alone))
    local = simulation(make_method("local"))
    (mine, sent), (theirs, trained) = rounds_of(ours), rounds_of(local)
    assert_close(trained, sent, 1e-6)
    assert_close(theirs.clients.resident, mine.clients.resident, 1e-6)


def test_size_weights_everywhere_are_the_weighted_rule():
    """An agent that says n_j / Σ n for the whole net does what body = head = weighted does without
    an agent."""
    weighted = simulation(make_method("pfedrlla", body="weighted", head="weighted"))
    asked = make_method("pfedrlla", **{**SMALL, "body": "agent"})

    class BySize(PFedRLLA):
        def plan_of(self, env, action, server, ctx):
            sizes = env.fed.size["train"][jnp.append(server.previous, ctx.id)].astype(env.dtype)
            return super().plan_of(env, sizes / sizes.sum(), server, ctx)

    asked = varied(BySize, asked)
    (mine, sent), (theirs, want) = rounds_of(simulation(asked)), rounds_of(weighted)
    assert weighted.method.ask(Controlled) is None and theirs.server.encoder == ()
    assert_close(want, sent, 1e-6)
    assert_close(theirs.clients.resident, mine.clients.resident, 1e-6)


def test_everybody_trains_before_round_one(scratch):
    """The start of client k is local training from the common model; without it, the common
    model."""
    state, data = start(scratch)
    bank = numpy_tree(state.clients.resident["params"]["fc1"]["kernel"])
    assert all((bank[i] != bank[j]).any() for i in range(N) for j in range(i))
    net = scratch.env.model.init(jax.random.key(0))
    plain = simulation(initial_training=False)
    assert close(jax.tree.map(lambda a: a[2], start(plain)[0].clients.resident), net)
    broken = dataclasses.replace(data.fed, x=np.full_like(data.fed.x, np.nan))
    sick = dataclasses.replace(scratch, init=simulate_start(scratch, broken))
    # kept, as others mix it
    assert close(jax.tree.map(lambda a: a[2], sick.init(0, net).clients.resident), net)


def simulate_start(sim, fed):
    from fedjax_sim.engine.simulation import start as begin

    return lambda seed, net: begin(sim.stages, sim.data._replace(fed=fed), seed, net)


# ---- the reward ----------------------------------------------------------------------------------
def test_reward_is_the_papers(moved):
    """r1, r2, r3 from NumPy: accuracies of w_DRL on validation rows before and after the mixture,
    V_k from cosines."""
    sim, state, data = moved
    (round_plan, mixtures), (_, log, _, _) = announced(sim)(state, data), sim.examine(state, data)
    fed = data.fed
    e = np.asarray(round_plan.server.embedded, np.float64)
    expected = []
    for slot in range(M):
        k = int(round_plan.slots.ctx.id[slot])
        mixed, second = (
            jax.tree.map(lambda a, i=i: np.asarray(a[i]), t["params"])
            for t, i in ((mixtures, slot), (state.clients.own.second, k))
        )
        # one update of the agent has happened, at which every client copies the body at its next
        # participation
        body = mixed["fc1"] if int(state.clients.own.version[k]) < 1 else second["fc1"]
        rows = fed.client_rows(k, "val")
        x, y = np.asarray(fed.x)[rows].reshape(len(rows), -1), np.asarray(fed.y)[rows]
        hidden = np.maximum(x @ body["kernel"] + body["bias"], 0)
        before, now = (
            ((hidden @ head["kernel"] + head["bias"]).argmax(1) == y).mean()
            for head in (second["fc"], mixed["fc"])
        )
        own = np.asarray(round_plan.observed[slot], np.float64)[-6:]
        near = [(own @ x / np.linalg.norm(own) / np.linalg.norm(x) + 1) / 2 for x in e] + [1.0]
        r3 = -np.sum((np.asarray(round_plan.actions[slot]) - np.array(near) / sum(near)) ** 2)
        expected.append(np.exp(now - 1) - 1 + now - before + 2 * r3)
    assert abs(float(log["reward"]) - np.mean(expected)) < 1e-5
    assert abs(float(log["r1"] + log["r2"] + 2 * log["r3"]) - float(log["reward"])) < 1e-5


def test_similarities_and_forms():
    e, others = jnp.array([1.0, 0.0]), jnp.array([[0.0, 2.0], [-1.0, 0.0], [3.0, 0.0]])
    usable = jnp.array([True, True, False, True])
    np.testing.assert_allclose(
        preferred(e, others, usable, "paper"), np.array([0.5, 0, 0, 1]) / 1.5, atol=1e-6
    )
    # cosines plus L1 distances of who counts, itself last: as the authors' code adds them
    far = np.array([0 + 3, -1 + 2, 0])
    near = np.exp(-(far + 1e-4) / (3 + 1e-4))
    np.testing.assert_allclose(
        preferred(e, others, usable, "code")[jnp.array([0, 1, 3])], near / near.sum(), atol=1e-6
    )
    action, wanted = jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0])
    assert float(terms(0.7, 0.5, action, wanted, 0.7, "paper")[2]) == -0.5
    np.testing.assert_allclose(
        terms(0.7, 0.5, action, wanted, 0.7, "code"), (0.0, 0.2, -np.sqrt(0.5)), atol=1e-6
    )


def test_switches_of_the_reward():
    """Weights of the reward, acc_tar, the previous accuracy, the baseline: each changes the reward
    as its formula says."""
    even = lambda observation: jnp.full(M + 1, 1 / (M + 1))
    every = {
        "beta1": 2.0,
        "beta2": 0.5,
        "beta3": 5.0,
        "acc_tar": 0.5,
        "acc_pre": "previous",
        "reward_baseline": True,
    }
    sim = simulation(forced(make_method("pfedrlla", **SMALL, regime="finetune", **every), even))
    state, data = start(sim)
    state = sim.examine(state, data)[0]
    _, log, ids, _ = sim.examine(state, data)
    # a second participation starts from the accuracy after the first mixture
    assert (
        abs(float(log["val_before"]) - np.asarray(state.clients.own.last)[np.asarray(ids)].mean())
        < 1e-6
    )
    # with the baseline the mean of β1 r1 is 0, whatever acc_tar is
    assert abs(float(log["reward"]) - float(0.5 * log["r2"] + 5 * log["r3"])) < 1e-5
    assert float(log["r1"]) > float(jnp.exp(-0.5)) - 1 - 1e-6  # acc ≥ 0 and acc_tar = 0.5


# ---- regimes -------------------------------------------------------------------------------------
def test_schedules_are_the_papers():
    """Appendix G: the encoder in every round to 50, then every 10; the agent's updates are what
    w_DRL is round_plan."""
    plan = Schedule("scratch", 50, 10)
    due = [r + 1 for r in range(100) if bool(plan.encoder_due(jnp.int32(r)))]
    assert due == [*range(1, 51), 60, 70, 80, 90, 100]
    assert [int(plan.versions(jnp.int32(r))) for r in (0, 49, 50, 59, 60, 69, 70)] == [
        0,
        0,
        0,
        0,
        1,
        1,
        2,
    ]


def test_pretraining_keeps_bodies_at_home():
    sim = simulation(regime="pretrain", random_rounds=0)
    state, data = start(sim)
    round_plan = announced(sim)(state, data)[0]
    # fc1: only its own
    np.testing.assert_array_equal(round_plan.slots.plan.weights[:, 0], np.eye(M + 1)[[M] * M])
    assert (
        np.asarray(round_plan.slots.plan.take) == [0, 1]
    ).all() and state.clients.own.second == ()
    before = state.server.encoder
    state = sim.examine(state, data)[0]
    assert int(state.server.encoder.rounds) == 1 and not same_bits(
        before.params, state.server.encoder.params
    )


def test_second_model_moves_when_the_agent_has_learned():
    """w_DRL: the head of every mixture; the body only at the first participation after an update of
    the agent."""
    sim = simulation(random_rounds=1, every=3)  # the agent learns in rounds 3, 6, …
    state, data = start(sim)
    second = lambda s, g: numpy_tree(s.clients.own.second["params"][g]["kernel"])
    begin = second(state, "fc1")
    for t in range(1, 6):
        old, ids = state, None
        state, _, ids, _ = sim.examine(state, data)
        took_part = np.isin(np.arange(N), np.asarray(ids))
        heads = (second(old, "fc") != second(state, "fc")).any((1, 2))
        np.testing.assert_array_equal(heads, took_part)
        bodies = (begin != second(state, "fc1")).any((1, 2))
        if t <= 3:
            assert not bodies.any()
        else:
            assert bodies[took_part].all()


@pytest.mark.full
def test_a_pretrained_agent_is_fine_tuned(tmp_path, capsys):
    """train writes a run directory; run takes agent and encoder over and says what is missing."""
    common = (
        "--model mlp --set model.hidden=5 --clients 6 --participation 0.5 --epochs 1 --protocol"
        " pfedrlla --quiet "
    )
    common += (
        "--devices 1 --chunk 1 --dataset synthetic:shape=6x6x1,classes=3,train=120,test=30"
        " --evaluate resident "
    )
    common += (
        "--set pfedrlla.side=4 --set pfedrlla.embedding=6 --set pfedrlla.agent.batch=4 --set"
        " pfedrlla.agent.capacity=64"
    )
    first, second = tmp_path / "first", tmp_path / "second"
    argv = f"train pfedrlla --rounds 4 --set pfedrlla.random_rounds=2 --out {first} {common}"
    assert main(argv.split()) == 0
    parts = "agent.learner,agent.rounds,server.encoder,server.frame"
    assert f"--start-from {first}:{parts}" in capsys.readouterr().out
    argv = (
        f"run pfedrlla --rounds 2 --set pfedrlla.random_rounds=2 --out {second} {common}"
        f" --start-from {first}"
    )
    assert main([*argv.split()[:-1], f"{first}:{parts}"]) == 0
    from fedjax_sim.api import resume

    result = resume(second, 3)
    assert int(result.state.server.encoder.rounds) == 7 and int(result.state.agent.rounds) == 7
    assert result.state.clients.own.second == ()  # fine-tuning compares real models, on resume too
    assert int(result.state.agent.replay.size) <= 3 * 3  # its own experience alone
    for wrong in ("agent", "agent,server.encoder", "agent.learner,agent.rounds,server"):
        assert (
            main(
                [
                    *argv.replace(str(second), str(tmp_path / "third")).split()[:-1],
                    f"{first}:{wrong}",
                ]
            )
            == 2
        )
        said = capsys.readouterr().err
        assert (
            "needs its encoder and the encoder's frame" in said and f"allowed: RUN:{parts}" in said
        )
    assert main(["train", "fedavg"]) == 2
    assert "has no agent to train; allowed: fedpolicy, qbandit, pfedrlla" in capsys.readouterr().err


def test_mistakes_are_sentences():
    for options, message in (
        ({"regime": "warm"}, "unknown regime of pfedrlla"),
        ({"head": "size"}, "unknown head of pfedrlla"),
        ({"beta3": -1.0}, "beta3=-1 is not allowed"),
        ({"side": 1}, "side=1 is not allowed; use 2 to 256"),
        ({"agent.update_every": 3}, "set by pfedrlla.every"),
        ({"agent.hue": 3}, "option of agent 'ddpg'"),
        ({"head": "weighted", "beta1": 2.0}, "pfedrlla.beta1 is the agent's"),
    ):
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            make_method("pfedrlla", **options)
    fed = tiny.federation()
    without = dataclasses.replace(fed, rows={k: v for k, v in fed.rows.items() if k != "val"})
    with pytest.raises(UserError, match="allowed: --protocol pfedrlla"):
        simulate(
            make_method("pfedrlla"),
            simulation().env,
            without,
            Participation(M, M, tuple(range(N))),
            lr=lambda t: t,
        )


# ---- layouts -------------------------------------------------------------------------------------
@pytest.mark.full
def test_two_devices_and_clients_on_the_host_give_the_same(moved):
    """The same uploads to 1e-5 on two devices; `--state-on host` the same States; a round reads m
    rows, not all."""
    from fedjax_sim.engine.host_clients import on_host, place

    sim, state, data = moved
    want = sim.examine(state, data)
    two = simulation(random_rounds=1, every=1, devices=2)
    there = start(two)
    where = jax.tree.map(lambda a: a.sharding, there[0])
    got = two.examine(jax.device_put(numpy_tree(state), where), there[1])
    assert close(want[3], got[3]) and close(
        want[0].clients, jax.tree.map(lambda a: a[:N], got[0].clients)
    )
    host = on_host(simulation(random_rounds=1, every=1, stored="cohort"))
    far, inputs = place(
        host.layout, host.init(0, host.env.model.init(jax.random.key(0))), host.data
    )
    near, data = start(sim)
    for _ in range(3):
        near, far = sim.examine(near, data)[0], host.round(far, inputs)[0]
    assert close(near.clients, far.clients) and close(near.server, far.server)
    assert {a.shape[0] for a in jax.tree.leaves(announced(sim)(near, data)[0].peers)} == {M}


@pytest.mark.full
def test_devices_share_out_the_decoder(monkeypatch):
    """Half of its columns each, round after round, and the same encoder as on one device; another
    one is whole on both."""
    from fedjax_sim.methods.pfedrlla import encoder as module

    one, whole = simulation(), start(simulation(devices=2))[0].server.encoder
    monkeypatch.setattr(module, "WIDE", 1)
    two = simulation(devices=2)
    states = [start(sim) for sim in (one, two)]
    place = jax.tree.map(lambda a: a.sharding, states[1][0].server)
    for _ in range(3):
        states = [
            (sim.run(state, data, 1)[0], data)
            for sim, (state, data) in zip((one, two), states, strict=True)
        ]
    near, far = (state.server.encoder for state, _ in states)
    assert_close(near.params, numpy_tree(far.params), 1e-4)
    sizes = lambda encoder: (
        encoder.params["params"]["up_0"]["cell"]["hi"]["kernel"].addressable_shards[1].data.shape
    )
    assert sizes(whole) == (16, 16) and sizes(far) == (16, 8)
    same_place = lambda a, where: a.sharding.is_equivalent_to(where, a.ndim)
    # as the compiled program takes it
    assert all(jax.tree.leaves(jax.tree.map(same_place, states[1][0].server, place)))


def test_a_round_needs_the_state_and_the_rows_it_reads():
    """Beside a bank of 120 models, a compiled round holds room for a few of them: no second bank,
    no copy of the first."""
    fed = prepare_many(120)
    method = make_method(
        "pfedrlla",
        **{**SMALL, "head_layers": "all_fc", "regime": "finetune", "initial_training": False},
    )
    net = build("mlp", fed.shape, fed.classes, hidden=(256,))
    env = Env(
        net, losses.make_loss("ce", fed.classes), optim.Sgd(0.9, 0.0), 120, M, 8, 1.0, 1.0, rounds=8
    )
    who = Participation(M, M, tuple(range(120)))
    sim = simulate(
        method, env, fed, who, lr=optim.schedule("constant", 0.05, 8), evaluations=("resident",)
    )
    state, data = start(sim)
    one = sum(a.nbytes for a in jax.tree.leaves(net.init(jax.random.key(0))))
    bank = sum(a.nbytes for a in jax.tree.leaves(state.clients.resident))
    assert bank == 120 * one
    used = jax.jit(sim.round, donate_argnums=0).lower(state, data).compile().memory_analysis()
    assert used.temp_size_in_bytes < (M + 12) * one, (used.temp_size_in_bytes / one, "models")
    assert used.alias_size_in_bytes > bank  # the bank is written where it is


def prepare_many(clients: int):
    """Federation of a few rows per client."""
    from fedjax_sim.data.federation import Federation

    rng = np.random.default_rng(5)
    x, y = (
        rng.standard_normal((clients * 8, 12, 12, 1)).astype(np.float32),
        rng.integers(0, 3, clients * 8),
    )
    rows = np.arange(clients * 8).reshape(clients, 8)
    return Federation.from_arrays(
        x,
        y,
        {"train": list(rows[:, :4]), "val": list(rows[:, 4:6]), "test": list(rows[:, 6:])},
        classes=3,
        name="many",
    )
