"""fedbabu: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from fixed_cohort import HEAD, after_rounds
from tiny import M, close, same_bits, simulation, start

from fedjax_sim.engine.round import contexts
from fedjax_sim.plans import part


def test_fedbabu_never_touches_the_head_before_fine_tuning():
    sim = simulation("fedbabu")
    first, data = start(sim)
    state, _, uploads = after_rounds(sim)
    head, body = (lambda net: part(net, (HEAD,))), (lambda net: part(net, ("fc1",)))
    assert same_bits(head(first.server.net), head(state.server.net))
    assert same_bits(
        jax.tree.map(lambda a: jnp.stack([a] * M), head(first.server.net)), head(uploads)
    )
    assert not close(body(first.server.net), body(state.server.net), 1e-3)
    assert not jax.tree.leaves(state.clients.own)

    ctx = jax.tree.map(
        lambda a: a[0], contexts(sim.stages, sim.env, jax.random.key(0), jnp.array([2]), state.t)
    )
    tuned = sim.method.personal(sim.open(data), state.server, state.clients, ctx)
    assert not close(head(tuned), head(state.server.net), 1e-3) and not close(
        body(tuned), body(state.server.net), 1e-3
    )
