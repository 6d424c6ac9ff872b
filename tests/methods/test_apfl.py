"""apfl: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import numpy as np
from fixed_cohort import after_rounds, rows
from tiny import close, simulation


def test_apfl_learns_its_weight():
    """The default: α leaves 1 for some participants, stays in [0, 1], and the personal model is not
    the global branch."""
    state, ids, uploads = after_rounds(simulation("apfl"))
    alpha = np.asarray(state.clients.own.alpha)
    assert ((alpha >= 0) & (alpha <= 1)).all() and (
        alpha[ids] < 1
    ).any()  # it may also be clipped at 1
    assert not close(rows(state.clients.own.net, ids), uploads, 1e-4)
