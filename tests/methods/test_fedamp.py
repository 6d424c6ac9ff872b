"""fedamp: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax.numpy as jnp
import tiny
from fixed_cohort import alone, engine, scattered
from tiny import N, assert_close, start

from fedjax_sim.methods import make_method


def test_fedamp_far_apart_is_local_training_with_a_pull_to_itself():
    cohort, options = (0, 2, 5), dict(lam=0.2, alpha=0.5, sigma=0.1)
    sim, base = engine(make_method("fedamp", **options), cohort), alone(cohort, 0.4)
    uploaded = lambda s: s._replace(server=s.server._replace(last=s.server.last + 1))
    (state, data), (other, same) = start(sim), start(base)
    far = sim.examine(uploaded(scattered(state, 3.0)), data)[0]
    assert_close(
        far.clients.resident, base.examine(scattered(other, 3.0), same)[0].clients.resident, 1e-6
    )
    near = sim.examine(uploaded(scattered(state, 0.02)), data)[0]
    want = base.examine(scattered(other, 0.02), same)[0]
    # they do attract each other when close
    assert not tiny.close(near.clients.resident, want.clients.resident, 1e-4)
    strangers = sim.examine(scattered(state, 0.02), data)[0]  # but not before they have uploaded
    assert_close(strangers.clients.resident, want.clients.resident, 1e-6)


def test_fedamp_reaches_the_last_uploaders():
    """peers=2 with two uploads so far is the same as reaching everybody; with three it is not."""
    cohort, options = (0, 3), dict(lam=0.2, alpha=0.05, sigma=1.0)
    everybody = engine(make_method("fedamp", **options), cohort)
    two = engine(make_method("fedamp", peers=2, **options), cohort)
    for uploads, same in (({1: 3, 4: 2}, True), ({1: 3, 4: 2, 5: 1}, False)):
        last = (
            jnp.zeros(N, jnp.int32)
            .at[jnp.array(list(uploads))]
            .set(jnp.array(list(uploads.values())))
        )
        ends = []
        for sim in (everybody, two):
            state, data = start(sim)
            state = scattered(state, 0.1)._replace(server=state.server._replace(last=last))
            ends.append(sim.examine(state, data)[0].clients.resident)
        assert tiny.close(*ends, 1e-6) == same
