"""Whole updates of the agents in PyTorch (float64), written from the equations; writes
agents_updates.npz.

    python -m tests.golden.make_agents          (from the repository's root, needs torch)

`ours(case)` runs the agent, `theirs(case)` the PyTorch version from the same start on the same
rows; both give the parameters afterwards. `tests/agents/test_agents_updates.py` compares the first
with the stored arrays always, and with the second where torch is installed. Every action mask is
used: of the state and of the next state; rows with a single available action teach nothing.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import agents
from agents import replay as ring
from agents import replay_agent

FILE = Path(__file__).parent / "agents_updates.npz"
S, A, ROWS, HIDDEN, LR, GAMMA, TAU, RATIO, DECAY = 3, 4, 12, 6, 0.01, 0.9, 0.1, 0.6, 0.8
COMMON: dict[str, Any] = {"hidden": (HIDDEN,), "lr": LR, "normalise": False}
REPLAY = COMMON | {"batch": 8, "gradient_steps": 2, "capacity": 20}
ON_POLICY = COMMON | {"gamma": GAMMA, "advantage_decay": DECAY}
DDPG = REPLAY | {"gamma": GAMMA, "tau": TAU}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # agent, options, rounds
    "dqn": ("dqn", REPLAY | {"gamma": GAMMA, "target_every": 2}, 1),
    "q_bandit": ("q_bandit", REPLAY, 1),
    "q_bandit_sgd": ("q_bandit", REPLAY | {"optimizer": "sgd"}, 1),
    "sac": ("sac", REPLAY | {"gamma": GAMMA, "tau": TAU, "entropy_ratio": RATIO, "alpha": 0.1}, 1),
    "ddpg": ("ddpg", DDPG, 1),
    "ddpg_bootstrap": ("ddpg", DDPG | {"bootstrap": True}, 1),
    "a2c": ("a2c", ON_POLICY, 3),
    "ppo": ("ppo", ON_POLICY | {"cohort": 16}, 3),  # the third update has forgotten the first round
}
NETWORKS = {
    "dqn": ("online", "target"),
    "q_bandit": ("online",),
    "sac": ("policy", "critics", "targets"),
    "ddpg": ("actor", "critic", "target_actor", "target_critic"),
}


def shaken(tree: Any) -> Any:
    """Every float shaken, so that no symmetry of the initial values hides a mistake."""
    leaves, shape = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return shape.unflatten(
        [
            x + 0.3 * jax.random.normal(k, x.shape, x.dtype)
            for x, k in zip(leaves, keys, strict=True)
        ]
    )


def experience(agent: agents.Agent, state: Any, seed: int) -> agents.Transition:
    rng = np.random.default_rng(seed)
    x, following = jnp.asarray(rng.normal(size=(2, ROWS, S)))
    available, next_available = jnp.asarray(rng.random((2, ROWS, A)) < 0.7)
    keys = jax.random.split(jax.random.key(seed), ROWS)
    action, info = jax.jit(jax.vmap(agent.act, (None, 0, 0, 0)))(state, x, keys, available)
    reward, done = jnp.asarray(rng.normal(size=ROWS)), jnp.asarray(rng.random(ROWS) < 0.4)
    return agents.Transition(
        x, action, reward, following, done, jnp.ones(ROWS, bool), info, next_available
    )


@functools.cache
def played(case: str) -> tuple[Any, Any, list[agents.Transition], Any]:
    """(learner before, learner after, the rounds' transitions, the two minibatches of a replay
    agent)."""
    name, options, rounds = CASES[case]
    with jax.enable_x64(True):
        agent = agents.make(name, S, A, **options, dtype=jnp.float64)
        state = agent.init(jax.random.key(0))
        parts = NETWORKS.get(name, ("params",))
        before = state.learner._replace(
            **shaken({part: getattr(state.learner, part) for part in parts})
        )
        state, batches, drawn = state._replace(learner=before), [], None
        for seed in range(rounds):
            batches.append(experience(agent, state, seed))
            key = jax.random.key(5)
            if name in NETWORKS:
                clean = agent.learnable(batches[-1])
                rows = replay_agent.experience(clean, state.replay.rows.done is not None)
                drawn = ring.sample(ring.add(state.replay, rows, clean.mask), key, (2, 8))
            state, _ = jax.jit(agent.update)(state, batches[-1], key)
        return before, state.learner, batches, drawn


def layers(params: Any, twin: int | None = None) -> list[np.ndarray]:
    """(W1, b1, W2, b2) of a network with one hidden layer."""
    found = [
        params["params"][layer][leaf]
        for layer in ("Dense_0", "Dense_1")
        for leaf in ("kernel", "bias")
    ]
    return [np.asarray(x if twin is None else x[twin]) for x in found]


def networks(learner: Any, name: str) -> dict[str, list[np.ndarray]]:
    if name not in NETWORKS:
        return {"policy": layers(learner.params.policy), "value": layers(learner.params.value)}
    if name == "sac":
        twins = {
            f"{part}{i}": layers(getattr(learner, part), i)
            for part in ("critics", "targets")
            for i in (0, 1)
        }
        return {
            "policy": layers(learner.policy),
            **twins,
            "log_alpha": [np.asarray(learner.log_alpha)],
        }
    return {part: layers(getattr(learner, part)) for part in NETWORKS[name]}


def ours(case: str) -> dict[str, np.ndarray]:
    found = networks(played(case)[1], CASES[case][0])
    return {f"{part}.{i}": x for part, arrays in found.items() for i, x in enumerate(arrays)}


# --------------------------------------------------------------------------------------------------
# PyTorch
def theirs(case: str) -> dict[str, np.ndarray]:
    import torch

    name, options, _ = CASES[case]
    before, _, batches, drawn = played(case)
    nets = {
        k: [torch.tensor(x, requires_grad=True) for x in arrays]
        for k, arrays in networks(before, name).items()
    }
    tensor = lambda x: torch.tensor(np.asarray(x))
    run = lambda p, x: torch.relu(x @ p[0] + p[1]) @ p[2] + p[3]
    forbid = lambda logits, usable: logits.masked_fill(~usable, -1e9)

    def optimiser(parameters: Any) -> Any:
        return (torch.optim.SGD if options.get("optimizer") == "sgd" else torch.optim.Adam)(
            parameters, LR
        )

    def step(optimiser: Any, parameters: Any, loss: Any) -> None:
        """Gradient, clip of the global norm at 1, optimiser."""
        optimiser.zero_grad()
        loss.backward(inputs=parameters)
        norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
        for p in parameters:
            p.grad *= torch.clamp(1 / norm, max=1.0)
        optimiser.step()

    def follow(targets: Any, online: Any) -> None:
        with torch.no_grad():
            for t, o in zip(targets, online, strict=True):
                t.mul_(1 - TAU).add_(TAU * o)

    minibatches = []
    if drawn is not None:
        minibatches = [jax.tree.map(lambda x: tensor(x[g]), drawn) for g in range(2)]
    one = range(8)

    if name in ("dqn", "q_bandit"):
        online = nets["online"]
        descent = optimiser(online)

        def goal(rows: Any, centre: Any, scale: Any) -> Any:
            if name == "q_bandit":
                return rows.reward
            best = forbid(run(online, rows.next_observation), rows.next_available).argmax(-1)
            after = centre + scale * run(nets["target"], rows.next_observation)[one, best]
            return (rows.reward + GAMMA * (1 - rows.done) * after).detach()

        # the first update: networks as they are say 0 + 1 · q, and from now on centre + scale · q
        goals = torch.cat([goal(rows, 0.0, 1.0) for rows in minibatches])
        units = goals.mean(), torch.clamp(goals.std(correction=0), min=1.0)
        for rows in minibatches:
            y = (goal(rows, *units) - units[0]) / units[1]
            taken = run(online, rows.observation)[one, rows.action.long()]
            step(descent, online, torch.nn.functional.huber_loss(taken, y))
        if name == "dqn":
            nets["target"] = online  # copied after two steps

    elif name == "sac":
        policy, log_alpha = nets["policy"], nets["log_alpha"][0]
        critics, targets = ([nets[f"{part}{i}"] for i in (0, 1)] for part in ("critics", "targets"))
        both = critics[0] + critics[1]
        descents = [optimiser(p) for p in (both, policy, [log_alpha])]
        for rows in minibatches:
            log_p = torch.log_softmax(
                forbid(run(policy, rows.next_observation), rows.next_available), -1
            )
            q = torch.minimum(*(run(t, rows.next_observation) for t in targets))
            alpha = log_alpha.exp().item()
            soft = (log_p.exp() * (q - alpha * log_p)).sum(-1)
            y = (rows.reward + GAMMA * (1 - rows.done) * soft).detach()
            error = [run(c, rows.observation)[one, rows.action.long()] - y for c in critics]
            step(descents[0], both, sum((e**2).mean() for e in error))
            log_p = torch.log_softmax(forbid(run(policy, rows.observation), rows.available), -1)
            q = torch.minimum(*(run(c, rows.observation) for c in critics)).detach()
            entropy = -(log_p.exp() * log_p).sum(-1).detach()
            step(descents[1], policy, (log_p.exp() * (alpha * log_p - q)).sum(-1).mean())
            wanted = RATIO * torch.log(rows.available.sum(-1).double())
            step(descents[2], [log_alpha], (-log_alpha * (wanted - entropy)).mean())
            for i in (0, 1):
                follow(targets[i], critics[i])

    elif name == "ddpg":
        actor, critic, target_actor, target_critic = (nets[part] for part in NETWORKS["ddpg"])
        descents = [optimiser(p) for p in (critic, actor)]
        mu = lambda p, x, usable: torch.softmax(forbid(run(p, x), usable), -1)
        value = lambda p, x, a: run(p, torch.cat([x, a], -1))[:, 0]
        for rows in minibatches:
            y = rows.reward
            if options.get("bootstrap"):
                action = mu(target_actor, rows.next_observation, rows.next_available)
                y = (
                    y
                    + GAMMA * (1 - rows.done) * value(target_critic, rows.next_observation, action)
                ).detach()
            step(
                descents[0],
                critic,
                ((value(critic, rows.observation, rows.action) - y) ** 2).mean(),
            )
            wanted = mu(actor, rows.observation, rows.available)
            step(descents[1], actor, -value(critic, rows.observation, wanted).mean())
            follow(target_actor, actor)
            follow(target_critic, critic)

    # a2c, ppo: the mean of the advantages fades over the rounds before, their scale over this one
    # too
    else:
        policy, value = nets["policy"], nets["value"]
        descent, weight, mean, square = optimiser(policy + value), 0.0, 0.0, 0.0
        for t in range(len(batches)):
            recent = [batches[t], *(batches[max(0, t - 1) : t] if name == "ppo" else ())]
            # none available: all are
            free = [np.asarray(b.info.available).sum(-1) != 1 for b in recent]
            kept = [
                jax.tree.map(lambda x, f=f: np.asarray(x)[f], b)
                for b, f in zip(recent, free, strict=True)
            ]
            rows = [
                jax.tree.map(tensor, b._replace(done=np.asarray(b.done, np.float64))) for b in kept
            ]
            pick = lambda get: torch.cat([get(b) for b in rows])
            x, a, following = (
                pick(lambda b, f=f: getattr(b, f))
                for f in ("observation", "action", "next_observation")
            )
            reward, done, old = (
                pick(lambda b: b.reward),
                pick(lambda b: b.done),
                pick(lambda b: b.info.log_probability),
            )
            usable = pick(lambda b: b.info.available)
            y = (reward + GAMMA * (1 - done) * run(value, following)[:, 0]).detach()
            error = (y - run(value, x)[:, 0]).detach()
            centre = mean / weight if weight else 0.0
            fresh = error[: free[0].sum()]
            square = DECAY * square + (1 - DECAY) * ((fresh - centre) ** 2).mean().item()
            mean, weight = (
                DECAY * mean + (1 - DECAY) * fresh.mean().item(),
                DECAY * weight + 1 - DECAY,
            )
            advantage = (error - centre) / ((square / weight) ** 0.5 + 1e-8)
            for _ in range(1 if name == "a2c" else 4):
                log_p = torch.log_softmax(forbid(run(policy, x), usable), -1)
                taken = log_p[range(len(a)), a.long()]
                ratio = (taken - old).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                gain = taken * advantage if name == "a2c" else gain
                entropy = -(log_p.exp() * log_p).sum(-1).mean()
                loss = -gain.mean() + 0.5 * ((run(value, x)[:, 0] - y) ** 2).mean() - 0.01 * entropy
                step(descent, policy + value, loss)

    return {
        f"{part}.{i}": x.detach().numpy()
        for part, arrays in nets.items()
        for i, x in enumerate(arrays)
    }


if __name__ == "__main__":
    np.savez_compressed(
        FILE, **{f"{case}/{name}": x for case in CASES for name, x in theirs(case).items()}
    )
    print(FILE, FILE.stat().st_size, "bytes")
