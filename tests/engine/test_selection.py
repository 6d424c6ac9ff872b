"""Who takes part: a hook with uniform draws as its default, power-of-choice, an agent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from commands import SMALL, empty_folder, refused
from tiny import SIZES, M, N, same_bits, simulation, start

import fedjax_sim as fs
from agents import DQN
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Selects
from fedjax_sim.transforms import transformed
from fedjax_sim.transforms.power_of_choice import drawn

__all__ = ["empty_folder"]  # used by every test


class InTurn(Selects, Method):
    """Round t: the clients t, t+1, …; as a method decides by itself."""

    def select(self, env, server, t, key, stats):
        return (t + jnp.arange(env.cohort)) % env.num_clients


def chosen(sim, rounds: int) -> np.ndarray:
    """[rounds, M] participants."""
    state, data = start(sim)
    found = []
    for _ in range(rounds):
        state, _, ids, _ = sim.examine(state, data)
        found.append(np.asarray(ids))
    return np.stack(found)


def test_a_method_may_decide():
    plain, own = simulation("fedavg"), simulation("fedavg", around=lambda _: InTurn())
    assert chosen(own, 3).tolist() == [[(t + k) % N for k in range(M)] for t in range(3)]
    # and inside a transform
    wrapped = simulation("fedavg", around=lambda _: fs.Clip(1e6, InTurn()))
    assert chosen(wrapped, 2).tolist() == [[(t + k) % N for k in range(M)] for t in range(2)]
    assert not np.array_equal(chosen(plain, 3), chosen(own, 3))


def test_draws_follow_their_chances():
    chance = jnp.array([1.0, 2.0, 0.0, 5.0])
    first = jax.vmap(lambda k: drawn(k, chance, 3))(jax.random.split(jax.random.key(0), 4000))
    share = np.bincount(np.asarray(first[:, 0]), minlength=4) / 4000
    np.testing.assert_allclose(share, [1 / 8, 2 / 8, 0, 5 / 8], atol=0.03)
    assert not (np.asarray(first) == 2).any() and all(
        len(set(row)) == 3 for row in np.asarray(first).tolist()
    )


def test_power_of_choice_takes_the_largest_losses():
    """d = N: who never took part first, then by the last loss."""
    sim = simulation("fedavg", around=lambda method: transformed(method, [f"power_of_choice:{N}"]))
    state, data = start(sim)
    state, _, first, _ = sim.examine(state, data)
    known = np.asarray(state.server.mine)
    assert (
        np.isfinite(known[np.asarray(first)]).all()
        and np.isinf(np.delete(known, np.asarray(first))).all()
    )
    state2, _, second, _ = sim.examine(state, data)
    never = set(range(N)) - set(np.asarray(first).tolist())
    assert never <= set(np.asarray(second).tolist()[: len(never)])
    largest = np.argsort(-np.asarray(state2.server.mine))[:M]
    assert set(np.asarray(sim.examine(state2, data)[2]).tolist()) == set(largest.tolist())


def test_power_of_choice_now_asks_the_candidates():
    sim = simulation("fedavg", around=lambda method: fs.PowerOfChoice(N, "now", method))
    state, data = start(sim)
    _, _, ids, _ = sim.examine(state, data)
    env, net, fed = sim.open(data), state.server.inner.net, tiny.federation()
    loss = []
    for k in range(N):
        rows = fed.client_rows(k)
        logits = env.model.head(
            net, env.model.features(net, jnp.asarray(fed.x[rows]), train=False)[0]
        )
        loss.append(-float(jax.nn.log_softmax(logits)[jnp.arange(len(rows)), fed.y[rows]].mean()))
    assert set(np.asarray(ids).tolist()) == set(np.argsort(loss)[-M:].tolist())
    plain, now = fs.FedAvg().wire(env, net), sim.method.wire(env, net)
    assert now.beside_down == (N - M) * sum(plain.down) / M and now.beside_up == N * 32 / M


def test_an_agent_decides_and_learns():
    sim = simulation(
        "fedprox",
        around=lambda method: fs.AgentSelection(DQN(hidden=(4,), batch=4, capacity=32), method),
    )
    state, data = start(sim)
    before = state.server.mine.agent.learner
    for _ in range(3):
        state, _, ids, _ = sim.examine(state, data)
        assert len(set(np.asarray(ids).tolist())) == M
    memory = state.server.mine
    assert not same_bits(before, memory.agent.learner) and int(memory.agent.rounds) == 3
    assert int(memory.agent.replay.size) == 3 * M and np.asarray(memory.last).max() == 3
    rewards = np.asarray(memory.agent.replay.rows.reward)[: 3 * M].reshape(3, M)
    assert (
        (rewards[0] == 0).all()
        and (rewards[1:] != 0).all()
        and (np.ptp(rewards, axis=1) == 0).all()
    )
    assert "agent.lr" in sim.method.numbers


def test_an_agent_that_wants_the_small_ones_gets_them():
    """The policy's word counts: an agent that takes clients by their size, and surely."""
    kind = type(fs.AgentSelection(inner=fs.FedAvg()).agent)

    class Small(kind):
        name = "q_bandit"

        def policy(self, learner, x, usable, rounds):
            take = jnp.where(x[..., 0] < 0.6, 1.0, 0.0)
            return jnp.stack([1 - take, take], -1)

    sim = simulation(
        "fedavg",
        around=lambda method: fs.AgentSelection(Small(hidden=(4,), batch=4, capacity=32), method),
    )
    small = {k for k in range(N) if SIZES[k] / max(SIZES) < 0.6}
    picked = chosen(sim, 3)
    assert all(small <= set(row) for row in picked.tolist()), (small, picked)


def test_clients_on_the_host_are_chosen_alike():
    more = dict(
        model="mlp",
        rounds=3,
        epochs=1,
        participation="0.5",
        devices="1",
        chunk="1",
        transforms=["power_of_choice"],
    )
    near, far = (
        fs.run("ditto", tiny.federation(), state_on=where, **more) for where in ("device", "host")
    )
    tiny.assert_close(near.state, far.state, 1e-5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("power_of_choice:2", rf"candidates=2 is not allowed; use {M} \(the participants\) to {N}"),
        (
            "power_of_choice:losses=then",
            "unknown losses of power_of_choice 'then'; allowed: last, now",
        ),
        ("agent_selection:ppo", "agent_selection.agent=ppo is not allowed; use q_bandit, dqn, sac"),
    ],
)
def test_mistakes_are_sentences(text, says):
    with pytest.raises(UserError, match=says):
        sim = simulation("fedavg", around=lambda method: transformed(method, [text]))
        start(sim)


def test_fixed_cohorts_are_not_chosen_from(capsys):
    argv = ["--transform", "power_of_choice:losses=now"]
    assert "asks for a common model, and 'local' has none" in refused(
        capsys, "run", "local", *SMALL, *argv
    )
