"""fedala: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from fixed_cohort import engine
from tiny import assert_close, same_bits, start

from fedjax_sim.methods import make_method
from fedjax_sim.types import Ctx


def test_fedala_weights_move_within_the_box_and_only_where_asked():
    sim = engine(make_method("fedala", layers=1, lr_weights=20.0, threshold=0.0, cap=12), (0, 2, 4))
    state, data = start(sim)
    first = sim.examine(state, data)[0]
    assert same_bits(first.clients.own, state.clients.own)  # nothing to mix in round 1
    own = sim.examine(first, data)[0].clients.own
    assert set(own.weights) == {"fc"}
    kernel = np.asarray(own.weights["fc"]["kernel"])
    assert (kernel >= 0).all() and (kernel <= 1).all()
    moved = (kernel != 1).any((1, 2))
    assert np.array_equal(np.asarray(own.begun), moved) and np.array_equal(
        np.flatnonzero(moved), [0, 2, 4]
    )


def test_fedala_is_tested_after_mixing_where_asked():
    """tested=start is Θ mixed anew; with η_w = 0 that is Θ."""
    sim = engine(make_method("fedala", tested="start", lr_weights=0.0), (0, 1))
    state, data = start(sim)
    state = sim.examine(state, data)[0]
    ctx = Ctx(jnp.int32(0), jax.random.key(0), state.t, jnp.float32(2), jnp.float32(0.1))
    mine = jax.tree.map(lambda a: a[0], state.clients)
    net = jax.jit(lambda s, c, d: sim.method.personal(sim.open(d), s, c, ctx))(
        state.server, mine, data
    )
    assert_close(net, state.server.net, 1e-6)
    assert not tiny.close(net, mine.resident, 1e-4)
