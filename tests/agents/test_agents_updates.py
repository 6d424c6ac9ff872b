"""One whole `update` of each agent against a PyTorch version written from the equations (float64)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
from agents import replay as ring
from agents import replay_agent
from agents.types import clean_transitions

torch = pytest.importorskip("torch")
S, A, ROWS, HIDDEN, LR, GAMMA = 3, 4, 12, 6, 0.01, 0.9


def net(params):
    """The parameters of a one-hidden-layer MLP as torch leaves (W1, b1, W2, b2)."""
    layers = params["params"]
    return [
        torch.tensor(np.asarray(layers[layer][leaf]), requires_grad=True)
        for layer in ("Dense_0", "Dense_1")
        for leaf in ("kernel", "bias")
    ]


def run(p, x):
    return torch.relu(x @ p[0] + p[1]) @ p[2] + p[3]


def step(optimiser, parameters, loss):
    """Gradient, clip of the global norm at 1, Adam."""
    optimiser.zero_grad()
    loss.backward(inputs=parameters)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
    for p in parameters:
        p.grad *= torch.clamp(1 / norm, max=1.0)
    optimiser.step()


def same(params, expected):
    for got, wanted in zip(net(params), expected, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), wanted.detach().numpy(), rtol=1e-6, atol=1e-9)


def noisy(state):
    """Every float of the state shaken, so that no symmetry of the initial values hides a mistake."""
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return tree.unflatten(
        [leaf + 0.3 * jax.random.normal(k, leaf.shape, leaf.dtype) for leaf, k in zip(leaves, keys, strict=True)]
    )


def experience(agent, state, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x, following = jnp.asarray(rng.normal(size=(2, rows, S)))
    keys = jax.random.split(jax.random.key(seed), rows)
    action, info = jax.jit(jax.vmap(agent.act, (None, 0, 0)))(state, x, keys)
    return agents.Transition(
        x,
        action,
        jnp.asarray(rng.normal(size=rows)),
        following,
        jnp.asarray(rng.random(rows) < 0.4),
        jnp.ones(rows, bool),
        info,
    )


def tensors(rows):
    return [torch.tensor(np.asarray(x)) for x in rows]


def prepared(name, parts, **options):
    """An agent whose networks (these fields of the learner) are shaken, a batch, and the rows it will draw."""
    agent = agents.make(name, S, A, hidden=(HIDDEN,), lr=LR, dtype=jnp.float64, **options)
    state = agent.init(jax.random.key(0))
    learner = state.learner._replace(**noisy({part: getattr(state.learner, part) for part in parts}))
    state = state._replace(learner=learner)
    batch = experience(agent, state)
    key = jax.random.key(5)
    drawn = None
    if hasattr(state, "replay"):
        clean = clean_transitions(batch, S, A, jnp.float64, continuous=name == "ddpg")
        rows = replay_agent.experience(clean, state.replay.rows.done is not None)
        drawn = ring.sample(ring.add(state.replay, rows, clean.mask), key, (2, 8))
    new, losses = jax.jit(agent.update)(state, batch, key)
    return state, batch, drawn, new, losses


REPLAY = {"batch": 8, "gradient_steps": 2, "capacity": 20}


def each(drawn):
    """The torch tensors of the two minibatches."""
    for g in range(2):
        rows = jax.tree.map(lambda x: x[g], drawn)
        yield (
            torch.tensor(np.asarray(rows.observation)),
            torch.tensor(np.asarray(rows.action)),
            torch.tensor(np.asarray(rows.reward)),
            *(torch.tensor(np.asarray(x)) for x in (rows.next_observation, rows.done) if x is not None),
        )


def test_dqn():
    with jax.enable_x64(True):
        state, _, drawn, new, _ = prepared("dqn", ("online", "target"), gamma=GAMMA, target_every=2, **REPLAY)
        online, target = net(state.learner.online), net(state.learner.target)
        optimiser = torch.optim.Adam(online, LR)
        for x, a, r, following, done in each(drawn):
            best = run(online, following).argmax(-1)
            y = (r + GAMMA * (1 - done) * run(target, following)[range(8), best]).detach()
            step(optimiser, online, torch.nn.functional.huber_loss(run(online, x)[range(8), a.long()], y))
        same(new.learner.online, online)
        same(new.learner.target, online)  # copied after two steps


def test_q_bandit():
    with jax.enable_x64(True):
        state, _, drawn, new, _ = prepared("q_bandit", ("online",), **REPLAY)
        q = net(state.learner.online)
        optimiser = torch.optim.Adam(q, LR)
        for x, a, r in each(drawn):
            step(optimiser, q, torch.nn.functional.huber_loss(run(q, x)[range(8), a.long()], r))
        same(new.learner.online, q)


def test_sac():
    tau, ratio = 0.1, 0.6
    with jax.enable_x64(True):
        state, _, drawn, new, _ = prepared(
            "sac", ("policy", "critics", "targets"), gamma=GAMMA, tau=tau, entropy_ratio=ratio, **REPLAY
        )
        twin = lambda params: [net(jax.tree.map(lambda x: x[i], params)) for i in (0, 1)]
        policy, critics = net(state.learner.policy), twin(state.learner.critics)
        targets = twin(state.learner.targets)
        log_alpha = torch.tensor(float(state.learner.log_alpha), dtype=torch.float64, requires_grad=True)
        np.testing.assert_allclose(log_alpha.exp().item(), 0.1)
        both = critics[0] + critics[1]
        optimisers = [torch.optim.Adam(p, LR) for p in (both, policy, [log_alpha])]
        for x, a, r, following, done in each(drawn):
            log_p = torch.log_softmax(run(policy, following), -1)
            q = torch.minimum(run(targets[0], following), run(targets[1], following))
            alpha = log_alpha.exp().item()
            y = (r + GAMMA * (1 - done) * (log_p.exp() * (q - alpha * log_p)).sum(-1)).detach()
            step(optimisers[0], both, sum(((run(c, x)[range(8), a.long()] - y) ** 2).mean() for c in critics))
            log_p = torch.log_softmax(run(policy, x), -1)
            q = torch.minimum(run(critics[0], x), run(critics[1], x)).detach()
            entropy = -(log_p.exp() * log_p).sum(-1).detach()
            step(optimisers[1], policy, (log_p.exp() * (alpha * log_p - q)).sum(-1).mean())
            step(optimisers[2], [log_alpha], (log_alpha.exp() * (entropy - ratio * np.log(A))).mean())
            with torch.no_grad():
                for target, critic in zip(targets, critics, strict=True):
                    for t, c in zip(target, critic, strict=True):
                        t.mul_(1 - tau).add_(tau * c)
        same(new.learner.policy, policy)
        np.testing.assert_allclose(new.learner.log_alpha, log_alpha.item(), rtol=1e-8)
        for i in (0, 1):
            same(jax.tree.map(lambda x: x[i], new.learner.critics), critics[i])
            same(jax.tree.map(lambda x: x[i], new.learner.targets), targets[i])


@pytest.mark.parametrize("bootstrap", [False, True])
def test_ddpg(bootstrap):
    tau = 0.1
    with jax.enable_x64(True):
        state, _, drawn, new, _ = prepared(
            "ddpg", ("actor", "critic", "target_actor", "target_critic"), bootstrap=bootstrap, gamma=GAMMA, tau=tau, **REPLAY
        )
        names = ("actor", "critic", "target_actor", "target_critic")
        actor, critic, target_actor, target_critic = (net(getattr(state.learner, name)) for name in names)
        optimisers = [torch.optim.Adam(p, LR) for p in (critic, actor)]
        mu = lambda p, x: torch.softmax(run(p, x), -1)
        value = lambda p, x, a: run(p, torch.cat([x, a], -1))[:, 0]
        for x, a, r, *rest in each(drawn):
            y = r
            if bootstrap:
                following, done = rest
                next_value = value(target_critic, following, mu(target_actor, following))
                y = (r + GAMMA * (1 - done) * next_value).detach()
            step(optimisers[0], critic, ((value(critic, x, a) - y) ** 2).mean())
            step(optimisers[1], actor, -value(critic, x, mu(actor, x)).mean())
            with torch.no_grad():
                for target, online in ((target_actor, actor), (target_critic, critic)):
                    for t, o in zip(target, online, strict=True):
                        t.mul_(1 - tau).add_(tau * o)
        for name, wanted in zip(names, (actor, critic, target_actor, target_critic), strict=True):
            same(getattr(new.learner, name), wanted)


def on_policy_torch(policy, value, batches, optimiser, epochs, surrogate):
    """The common part of A2C and PPO on the concatenated `batches` of Transitions."""
    x, a, r, following, done, old = (
        torch.cat(parts)
        for parts in zip(
            *[
                tensors(
                    (
                        b.observation,
                        b.action,
                        b.reward,
                        b.next_observation,
                        b.done.astype(jnp.float64),
                        b.info.log_probability,
                    )
                )
                for b in batches
            ],
            strict=True,
        )
    )
    y = (r + GAMMA * (1 - done) * run(value, following)[:, 0]).detach()
    advantage = (y - run(value, x)[:, 0]).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    for _ in range(epochs):
        log_p = torch.log_softmax(run(policy, x), -1)
        taken = log_p[range(len(a)), a.long()]
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        loss = surrogate(taken, old, advantage) + 0.5 * ((run(value, x)[:, 0] - y) ** 2).mean() - 0.01 * entropy
        step(optimiser, policy + value, loss)


def test_a2c():
    with jax.enable_x64(True):
        state, batch, _, new, _ = prepared("a2c", ("params",), gamma=GAMMA)
        policy, value = net(state.learner.params.policy), net(state.learner.params.value)
        on_policy_torch(
            policy,
            value,
            [batch],
            torch.optim.Adam(policy + value, LR),
            1,
            lambda taken, old, advantage: -(taken * advantage).mean(),
        )
        same(new.learner.params.policy, policy)
        same(new.learner.params.value, value)


def test_ppo_uses_the_last_two_rounds():
    def clipped(taken, old, advantage):
        ratio = (taken - old).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    with jax.enable_x64(True):
        agent = agents.make("ppo", S, A, hidden=(HIDDEN,), lr=LR, gamma=GAMMA, cohort=16, dtype=jnp.float64)
        state = agent.init(jax.random.key(0))
        state = state._replace(learner=state.learner._replace(params=noisy(state.learner.params)))
        policy, value = net(state.learner.params.policy), net(state.learner.params.value)
        optimiser, batches = torch.optim.Adam(policy + value, LR), []
        update = jax.jit(agent.update)
        for seed, rows in enumerate((12, 12, 12)):  # the third update has forgotten the first round
            batches.append(experience(agent, state, rows, seed))
            state, _ = update(state, batches[-1], jax.random.key(9))
            on_policy_torch(policy, value, batches[-2:], optimiser, 4, clipped)
            same(state.learner.params.policy, policy)
            same(state.learner.params.value, value)
