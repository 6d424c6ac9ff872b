"""The oracle as a teacher: what a policy that imitates it is fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import across_teacher as teacher
from benchmarks.across_federations import CONFIG
from fedjax_sim.engine.episode import Length
from fedjax_sim.runner.across.evolve import Problem
from fedjax_sim.runner.across.over import parse_over

OVER = (
    "dirichlet:0.3, clients:5..6, participation:0.5, examples:24, data:digits, test:40,"
    " server_val:20"
)


@pytest.fixture(scope="module")
def problem():
    config = CONFIG.replace(rounds=4, model_options={"hidden": (4,)}, epochs=1)
    return Problem(parse_over(OVER), config, Length(4, last=1))


def test_where_bytes_cost_all_the_oracle_exchanges_only_the_least(problem):
    """A participant cannot take nothing, so that it takes the head; it sends nothing."""
    seen, decisions = teacher.demonstrations(problem, 2, 0.0, 1e6, 0.1, "cosine")
    assert len(seen) == len(decisions) > 0 and seen.shape[1] == 9
    assert (decisions == [-1, 1, -1, -1]).all()
    found = teacher.agreement(teacher.imitate(seen, decisions), seen, decisions)
    assert found["take_head"]["yes"] == 1.0 and found["send_backbone"]["yes"] == 0.0


def test_the_imitation_is_least_squares():
    rng = np.random.default_rng(0)
    seen, truth = rng.normal(size=(200, 9)), rng.normal(size=(9, 4))
    found = teacher.imitate(seen, 1 + seen @ truth)
    np.testing.assert_allclose(found.reshape(9, 4), truth, atol=1e-3)
    alike = teacher.agreement(found, seen, np.sign(1 + seen @ truth))
    assert min(one["alike"] for one in alike.values()) > 0.99
