"""fedrod: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import numpy as np
from fixed_cohort import rows
from tiny import arrays, close, same_bits, simulation, start


def test_fedrod_personal_heads_do_not_reach_the_generic_branch():
    """Other residual heads: the same uploads to the last bit, other personal scores."""
    sim = simulation("fedrod")
    state, data = start(sim)
    noise = jax.tree.map(
        lambda a: a + np.random.default_rng(0).standard_normal(a.shape).astype(a.dtype),
        state.clients.own,
    )
    other = state._replace(clients=state.clients._replace(own=noise))
    after, _, ids, uploads = sim.examine(state, data)
    after2, _, _, uploads2 = sim.examine(other, data)
    assert same_bits(uploads, uploads2) and same_bits(after.server, after2.server)
    ids = np.asarray(ids)
    moved = [
        np.abs(a - b).max()
        for a, b in zip(*(arrays(rows(s.clients.own, ids)) for s in (state, after)), strict=True)
    ]
    assert min(moved) > 1e-3
    assert not close(
        sim.evaluate(after, data)["personal"]["loss"]["total"],
        sim.evaluate(after2, data)["personal"]["loss"]["total"],
        1e-3,
    )
