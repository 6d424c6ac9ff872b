"""pFedRLLA's agent in another run and among other peers: what it takes along, whose order it does
not see, its aims."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pfedrlla import SMALL, announced, simulation
from tiny import M, same_bits, start

from agents.ddpg import DDPG
from agents.ranked import Ranked
from agents.types import Info, Transition
from fedjax_sim.api import run
from fedjax_sim.engine import layout as layouts
from fedjax_sim.experiment import Experiment
from fedjax_sim.methods import make_method
from fedjax_sim.methods.pfedrlla.encoder import features, mhae, placed
from fedjax_sim.runner.prepare import prepare


def config(**more):
    options = {
        "side": 4,
        "embedding": 6,
        "agent.batch": 4,
        "agent.capacity": 64,
        "random_rounds": 2,
    } | more.pop("options", {})
    return (
        dict(
            model="mlp",
            model_options={"hidden": (5,)},
            clients=6,
            participation="0.5",
            epochs=1.0,
            batch_size=8,
            protocol="pfedrlla",
            dataset="synthetic:shape=6x6x1,classes=3,train=120,test=30",
            evaluations=("resident",),
            devices="1",
            chunk="1",
            options=options,
        )
        | more
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run directory, State) of a short pre-training."""
    folder = tmp_path_factory.mktemp("train") / "run"
    settings = config(options={"regime": "pretrain"}, rounds=6)
    options = settings.pop("options")
    result = run("pfedrlla", out=folder, **settings, **options)
    return folder, jax.tree.map(jnp.asarray, result.state)


def test_the_actor_says_the_same_of_the_same_heads(trained):
    """Round 1 of a run on another partition, with --start-from: its weights are those that the
    pre-trained encoder, frame and actor give for the heads that are there, by hand; nothing is seen
    as 0."""
    folder, old = trained
    parts = ",".join(make_method("pfedrlla").hands_over)
    setup = prepare(
        Experiment.of("pfedrlla", **config(rounds=3, start_from=f"{folder}:{parts}", data_seed=7)),
        measure=False,
    )
    sim = setup.simulation
    state, data = layouts.place(sim.layout, setup.first_state(), sim.data)
    assert same_bits(state.agent.learner, old.agent.learner) and same_bits(
        state.server.frame, old.server.frame
    )
    # nobody's experience but its own
    assert int(old.agent.replay.size) == 18 and int(state.agent.replay.size) == 0
    round_plan = jax.jit(sim.plan_round)(state, data)
    ids, heads = np.asarray(round_plan.slots.ctx.id), state.clients.resident["params"]
    seen = jax.vmap(lambda net: features(net, ("fc1", "fc"), 4, old.server.frame))(heads)
    embedded = mhae(4, 6).embed(old.server.encoder, placed(old.server.frame, seen))
    np.testing.assert_allclose(round_plan.server.embedded, embedded[ids], atol=1e-5)
    assert np.std(embedded[ids], 0).max() > 1e-3  # heads are told apart
    agent, everybody = sim.method.make_agent(sim.open(data)), jnp.ones(4, bool)
    for slot, client in enumerate(ids):
        x = jnp.concatenate([embedded[ids].reshape(-1), embedded[client]])
        policy = agent.act(old.agent, x, jax.random.key(0), everybody)[1].policy
        np.testing.assert_allclose(round_plan.info.policy[slot], policy, atol=1e-5)


# ---- the order of peers --------------------------------------------------------------------------
def test_weights_do_not_depend_on_the_order_of_the_previous_cohort():
    """The same State with K' written down in another order: every peer has the same weight, in what
    is done and learned."""
    sim = simulation(random_rounds=0, every=1, **{"agent.noise": 0.05})
    state, data = start(sim)
    for _ in range(3):
        state = sim.examine(state, data)[0]
    order = np.array([2, 0, 3, 1])
    server = state.server._replace(
        previous=state.server.previous[order], reported=state.server.reported[order]
    )
    turned = state._replace(server=server._replace(embedded=server.embedded[order]))
    (round_plan, mixed), (again, same) = announced(sim)(state, data), announced(sim)(turned, data)
    assert np.ptp(np.asarray(round_plan.actions), -1).min() > 1e-4
    back = np.append(order, M)
    np.testing.assert_allclose(np.asarray(round_plan.actions)[:, back], again.actions, atol=1e-6)
    for a, b in zip(jax.tree.leaves(mixed), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    after, other = sim.examine(state, data)[0].agent, sim.examine(turned, data)[0].agent
    for a, b in zip(jax.tree.leaves(after.learner), jax.tree.leaves(other.learner), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_ranked_agents_learn_the_same_in_any_order():
    """Rows with their candidates turned, and one that may not be chosen: the same memory, the same
    networks."""
    rng, width, count = np.random.default_rng(0), 3, 5
    agent = Ranked(
        inner=DDPG(
            width * 4,
            4,
            hidden=(8,),
            batch=4,
            capacity=16,
            gradient_steps=2,
            bootstrap=True,
            lr=0.1,
        )
    )
    x, following = rng.normal(size=(2, count, 4, width)).astype(np.float32)
    action = rng.dirichlet(np.ones(4), count).astype(np.float32)
    may = np.tile([True, True, False, True], (count, 1))

    def taught(order):
        places = np.append(order, 3)
        turn = lambda a: a[:, places]
        info = Info(
            np.zeros(count, np.float32), np.zeros(count, np.float32), turn(action), turn(may)
        )
        flat = lambda a: turn(a).reshape(count, -1)
        rows = Transition(
            *(
                flat(x),
                turn(action),
                x[:, 3, 0],
                flat(following),
                np.zeros(count),
                np.ones(count, bool),
                info,
                turn(may),
            )
        )
        return jax.jit(agent.update)(agent.init(jax.random.key(0)), rows, jax.random.key(1))[0]

    here, there = taught([0, 1, 2]), taught([2, 0, 1])
    assert not same_bits(here.learner, agent.init(jax.random.key(0)).learner)
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


# ---- what it aims at, how often it learns --------------------------------------------------------
def test_a_following_target_is_the_accuracy_so_far():
    sim = simulation(target="following", random_rounds=0, every=1)
    state, data = start(sim)
    target = None
    for _ in range(3):
        state, log, _, _ = sim.examine(state, data)
        mixed = float(log["val_mixed"])
        target = mixed if target is None else target
        np.testing.assert_allclose(log["target"], target, atol=1e-6)  # as it was before this round
        target += 0.1 * (mixed - target) if state.t > 1 else 0
        np.testing.assert_allclose(state.server.target, target, atol=1e-6)
    assert simulation().method.target == "constant"


def test_the_regime_scratch_takes_the_steps_of_all_rounds():
    """Every ten rounds fifty steps, where there were five; pre-training and fine-tuning take five
    at a time."""
    steps = {}
    for regime in ("scratch", "pretrain", "finetune"):
        options = {k: v for k, v in SMALL.items() if not k.startswith("agent.")}
        sim = simulation(make_method("pfedrlla", regime=regime, **options))
        steps[regime] = sim.method.make_agent(sim.open(sim.data)).inner
    assert {k: (a.gradient_steps, a.update_every) for k, a in steps.items()} == {
        "scratch": (50, 10),
        "pretrain": (5, 1),
        "finetune": (5, 10),
    }


def test_training_with_a_preset_has_the_rounds_of_training():
    from fedjax_sim.cli.parser import make_parser
    from fedjax_sim.cli.settings import AGENT_ROUNDS, settings_of

    def rounds(*argv):
        return int(settings_of(make_parser().parse_args(argv), "pfedrlla")["rounds"])

    assert rounds("train", "pfedrlla", "--preset", "pfedrlla-cifar10") == AGENT_ROUNDS == 600
    assert rounds("train", "pfedrlla", "--preset", "pfedrlla-cifar10", "--rounds", "70") == 70
    assert rounds("run", "pfedrlla", "--preset", "pfedrlla-cifar10") == 500
