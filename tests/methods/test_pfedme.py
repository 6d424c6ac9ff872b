"""pfedme: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from fixed_cohort import after_rounds, rows, variant
from tiny import assert_close, simulation, start

from fedjax_sim.local.optim import Sgd


def test_pfedme_without_a_pull_is_plain_sgd():
    """λ = 0, K = 1: θ is a plain descent from Θ, and nothing ever moves Θ."""
    sim = simulation("pfedme", lam=0.0, inner_steps=1, lr_personal=0.03, decay_personal=0.02)
    state, ids, _ = after_rounds(sim)
    assert_close(start(sim)[0].server, state.server, 1e-6)  # an average of equal models
    plain = variant(simulation("fedavg"), lr=0.03, optimizer=Sgd(0.0, 0.02))
    first, data = start(plain)
    # the second round, from Θ⁰
    _, _, same, uploads = plain.examine(first._replace(t=jnp.int32(1)), data)
    assert np.array_equal(ids, same)
    assert_close(rows(state.clients.own, ids), uploads, 1e-6)
