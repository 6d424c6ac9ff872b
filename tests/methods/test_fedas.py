"""fedas: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from fixed_cohort import ctx_of, engine
from tiny import assert_close, start

from fedjax_sim.local import stream
from fedjax_sim.methods import fedas as fedas_file
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedas import alignment, fisher_trace
from fedjax_sim.types import Ctx


def test_fedas_with_equal_traces_averages_uniformly(monkeypatch):
    cohort = (0, 3, 4, 5)
    sim = engine(make_method("fedas"), cohort)
    state, data = start(sim)
    after, _, _, nets = sim.examine(state, data)
    mean = lambda nets, w: jax.tree.map(lambda a: jnp.tensordot(w, a, 1) / w.sum(), nets)
    env = sim.open(data)
    ctx = lambda k: sim.plan_round(state, data).slots.ctx._asdict() | {"id": jnp.int32(cohort[k])}
    keys = sim.plan_round(state, data).slots.ctx.key
    traces = jnp.stack(
        [
            fisher_trace(
                env, jax.tree.map(lambda a, k=k: a[k], nets), Ctx(**(ctx(k) | {"key": keys[k]}))
            )
            for k in range(len(cohort))
        ]
    )
    assert traces.max() > 1.1 * traces.min()
    assert_close(after.server.net, mean(nets, traces), 1e-5)
    monkeypatch.setattr(fedas_file, "fisher_trace", lambda env, net, ctx: jnp.full((), 0.37))
    sim = engine(make_method("fedas"), cohort)
    after, _, _, nets = sim.examine(state, data)
    assert_close(after.server.net, mean(nets, jnp.ones(len(cohort))), 1e-6)
    # the clients' heads are their own: not averaged before the next round
    received = lambda s: sim.method.receive(
        env, s.server, jax.tree.map(lambda a: a[0], s.clients), None, ctx_of(sim, s, data)
    )
    assert_close(
        jax.jit(received)(after)[1]["params"]["fc"],
        jax.tree.map(lambda a: a[0], after.clients.resident["params"]["fc"]),
    )


def test_fedas_trace_adds_up_over_batches():
    sim = engine(make_method("fedas"), (2,))
    state, data = start(sim)
    env, ctx = sim.open(data), ctx_of(sim, state, data)
    net = state.server.net
    draw = stream(env, ctx, jax.random.fold_in(ctx.key, fedas_file.FISHER), 1)
    total = 0.0
    for k in range(4):  # 14 examples: 4, 4, 4, 2
        batch = draw(jnp.int32(k))
        x, y = batch.x[np.asarray(batch.mask)], batch.y[np.asarray(batch.mask)]

        def nll(params, x=x, y=y):
            logits = env.model.head(
                {"params": params}, env.model.features({**net, "params": params}, x)[0]
            )
            return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y].mean()

        total += sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(jax.grad(nll)(net["params"])))
    assert np.isclose(float(fisher_trace(env, net, ctx)), total, rtol=1e-5)


def test_fedas_alignment_is_a_sum_over_classes():
    rng = np.random.default_rng(2)
    features, goals = rng.normal(size=(7, 3)), rng.normal(size=(4, 3))
    labels, mask = np.array([0, 0, 2, 2, 2, 1, 1]), np.array([1, 1, 1, 1, 1, 1, 0], bool)
    want = sum(np.mean((features[mask & (labels == c)] - goals[c]) ** 2) for c in (0, 1, 2))
    features[6] = np.nan  # padding may hold anything
    got = alignment(
        jnp.asarray(features), jnp.asarray(goals)[labels], jnp.asarray(labels), jnp.asarray(mask), 4
    )
    assert np.isclose(float(got), want, rtol=1e-6)
