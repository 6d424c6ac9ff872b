"""fedcp: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import numpy as np
import tiny
from fixed_cohort import engine
from tiny import assert_close, same_bits, simulation, start

from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedcp import context, gates


def test_fedcp_gates_sum_to_one_and_the_context_has_length_one():
    sim = simulation("fedcp")
    net = sim.env.model.init(jax.random.key(0))
    v = context(sim.env, net)
    total = np.asarray(net["params"]["fc"]["kernel"]).sum(1)
    np.testing.assert_allclose(v, total / np.linalg.norm(total), atol=1e-6)
    z = jax.random.normal(jax.random.key(1), (6, 5))
    policy = net["params"]["policy"]
    soft, noisy, other = (
        gates(policy, z, v, key) for key in (None, jax.random.key(2), jax.random.key(3))
    )
    for r, s in (soft, noisy, other):
        np.testing.assert_allclose(r + s, 1, atol=1e-6)
        assert (r > 0).all() and (s > 0).all()
    assert not np.allclose(soft[0], noisy[0]) and not np.allclose(noisy[0], other[0])
    a = np.asarray((z * v) @ policy["kernel"] + policy["bias"])
    a = np.maximum((a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5), 0)
    # first half: the private gate
    np.testing.assert_allclose(soft[0], 1 / (1 + np.exp(a[:, 5:] - a[:, :5])), atol=1e-5)


def test_fedcp_private_head_stays_and_the_global_one_is_the_middle():
    sim = engine(make_method("fedcp"), (4,))
    state, data = start(sim)
    after = sim.examine(state, data)[0]
    own = jax.tree.map(lambda a: a[4], after.clients.own)
    old = state.server.net["params"]["fc"]
    assert_close(
        after.server.net["params"]["fc"], jax.tree.map(lambda a, b: (a + b) / 2, own, old), 1e-6
    )
    assert not tiny.close(own, old, 1e-3)
    assert not same_bits(after.server.net["params"]["policy"], state.server.net["params"]["policy"])
