"""pFedRLLA: every ablation and switch does what it says, and the agent as shipped learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pfedrlla import SMALL, simulation
from tiny import M

from fedjax_sim.hooks import Controlled
from fedjax_sim.methods import make_method
from fedjax_sim.methods.pfedrlla import Report, Server
from fedjax_sim.methods.pfedrlla.control import for_the_run
from fedjax_sim.methods.pfedrlla.regimes import Schedule
from fedjax_sim.methods.pfedrlla.settings import ALIVE
from fedjax_sim.types import Cohort, Ctx


# ---- ablations and switches ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("mean", "mean"),
        ("weighted", "mean"),
        ("mean", "agent"),
        ("weighted", "agent"),
        ("agent", "agent"),
    ],
    ids=["None", "Body", "Head", "Both", "DRL"],
)
def test_ablations_weigh_as_they_say(body, head):
    """The plan of client k, part by part, from NumPy."""
    sim = simulation(
        make_method(
            "pfedrlla",
            **(SMALL if "agent" in (body, head) else {"head_layers": "last"}),
            body=body,
            head=head,
        )
    )
    assert (sim.method.ask(Controlled) is None) == ("agent" not in (body, head))
    data = jax.device_put(sim.data)
    env, k = sim.open(data), 3
    action, previous = np.array([0.4, 0.1, 0.2, 0.0, 0.3], np.float32), np.arange(M, dtype=np.int32)
    server = Server((), jnp.asarray(previous), jnp.array([True, True, False, True]), ())
    ctx = Ctx(jnp.int32(k), None, None, jnp.float32(1), None)
    method = sim.method
    make = (
        method.plan_of
        if method.ask(Controlled)
        else lambda env, _, server, ctx: method.plan(env, server, ctx)
    )
    found = np.asarray(make(env, jnp.asarray(action), server, ctx).weights)
    n = np.asarray(data.fed.size["train"])[[*previous, k]] * np.array([1, 1, 0, 1, 1])
    wanted = {"mean": np.array([1, 1, 0, 1, 0]) / 3, "weighted": n / n.sum(), "agent": action}
    np.testing.assert_allclose(found, np.stack([wanted[body], wanted[head]]), atol=1e-6)


def shown(**options):
    """(the method, env) of pFedRLLA with the options, nothing compiled."""
    sim = simulation(make_method("pfedrlla", **{**SMALL, **options}))
    return sim.method, sim.open(jax.device_put(sim.data))


def test_every_switch_of_the_reward_and_the_agent_is_honoured():
    """Beside the paper's, what the authors' code does; an option that changes nothing would pass
    none of these."""
    report = Report(
        jnp.zeros((1, 16)), jnp.float32(0.4), jnp.float32(0.7), jnp.array([0.5, 0.2, 0.1, 0.1, 0.1])
    )
    action = jnp.full(M + 1, 0.2)
    worth = lambda **o: float(
        (lambda c, env: c.reward_of(env, None, None, report, action, None))(*shown(**o))
    )
    apart = float(jnp.square(action - report.wanted).sum())
    gain = np.exp(0.7 - 1) - 1
    assert abs(worth() - (gain + 0.3 - 2 * apart)) < 1e-5
    assert abs(worth(beta1=3.0) - (3 * gain + 0.3 - 2 * apart)) < 1e-5
    assert abs(worth(beta2=3.0) - (gain + 0.9 - 2 * apart)) < 1e-5
    assert abs(worth(beta3=0.0) - (gain + 0.3)) < 1e-5
    assert abs(worth(acc_tar=0.7) - (0.3 - 2 * apart)) < 1e-5
    assert abs(worth(r3="code") - (gain + 0.3 - 2 * np.sqrt(apart))) < 1e-5
    cohort = lambda ok: Cohort(
        *[None] * 5, ok, None, report._replace(mixed=jnp.array([0.7, 0.1])), *[None] * 4
    )._replace(count=2)
    combined = lambda **o: (
        lambda c, env: c.combine(env, None, None, jnp.zeros(2), cohort(jnp.ones(2, bool)))
    )(*shown(**o))
    assert (combined() == 0).all()
    np.testing.assert_allclose(
        combined(reward_baseline=True), 1 - (np.exp(-0.3) + np.exp(-0.9)) / 2, rtol=1e-6
    )

    def loud(**options):
        """The largest weight of an actor whose outputs are far apart."""
        control, env = shown(**options)
        agent = control.make_agent(env)
        state = agent.init(jax.random.key(0))
        actor = jax.tree.map(lambda a: 1e3 * a, state.learner.actor)
        state = state._replace(learner=state.learner._replace(actor=actor))
        return float(agent.act(state, jnp.ones(6 * (M + 1)), jax.random.key(1))[1].policy.max())

    assert loud() > 0.9 and loud(**{"agent.tanh_logits": True}) <= np.e / (np.e + M / np.e) + 1e-5
    rows = lambda **o: (lambda c, env: c.make_agent(env).init(jax.random.key(0)).replay)(
        *shown(**o)
    )
    empty = lambda replay: jax.tree.leaves(replay)
    # what follows is stored
    assert len(empty(rows(**{"agent.bootstrap": True}))) == len(empty(rows())) + 3


def test_head_layers_last_is_the_classifier():
    rules = lambda **o: list(np.asarray(plan_of(**o).weights[:, -1]))
    body, head = rules(head_layers="last")  # fc1 by data sizes
    assert 0 < body < 1 and head == 1.0
    assert rules(head_layers="all_fc") == [1.0, 1.0]


def plan_of(**options):
    control, env = shown(**options)
    server = Server((), jnp.arange(M, dtype=jnp.int32), jnp.ones(M, bool), ())
    return control.plan_of(
        env, jnp.eye(M + 1)[M], server, Ctx(jnp.int32(0), None, None, jnp.float32(1), None)
    )


# ---- the agent -----------------------------------------------------------------------------------
SIZE, SHOWN = 4, 128 * 4  # weights, and what an encoder of 128 numbers shows of as many heads


def bandit(rounds: int = 400, **options):
    """Rewards −2‖A − V_g‖² for states that show a group g among noisy numbers: (regret,
    sensitivity, live) at the end."""
    import agents

    centres = 0.3 * jax.random.normal(jax.random.key(1), (3, SHOWN))
    wanted = jnp.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]])
    agent = agents.make("ddpg", SHOWN, SIZE, **options)

    def one_round(state, key):
        groups, noise, act, update = jax.random.split(key, 4)
        g = jax.random.randint(groups, (10,), 0, 3)
        seen = centres[g] + 0.1 * jax.random.normal(noise, (10, SHOWN))
        action, info = jax.vmap(lambda o, k: agent.act(state, o, k))(
            seen, jax.random.split(act, 10)
        )
        reward = lambda a: -2 * jnp.square(a - wanted[g]).sum(-1)
        last = agents.Transition(
            seen, action, reward(action), seen, jnp.ones(10), jnp.ones(10, bool), info
        )
        state, losses = agent.update(state, last, update)
        return state, (
            -reward(info.policy).mean(),
            losses["sensitivity"],
            losses["live_policy"],
            losses["live_critic"],
        )

    start = agent.init(jax.random.key(0))
    found = jax.jit(
        lambda s: jax.lax.scan(one_round, s, jax.random.split(jax.random.key(2), rounds))[1]
    )(start)
    return [float(np.asarray(v)[-20:].mean()) for v in found]


def test_agent_reaches_the_optimum_of_a_designed_bandit():
    """DDPG exactly as pFedRLLA pre-trains it finds the allocation of each group, and its units stay
    alive."""
    regret, sensitivity, live_policy, live_critic = bandit(
        **ALIVE, **for_the_run(Schedule("pretrain", 50, 1), SIZE)
    )
    print(
        f"regret {regret:.4f} sensitivity {sensitivity:.3f} live units: actor {live_policy:.2f}"
        f" critic {live_critic:.2f}"
    )
    assert regret < 0.01, regret  # uniform weights: 0.49
    assert sensitivity > 0.2 and live_policy > 0.5 and live_critic > 0.5
