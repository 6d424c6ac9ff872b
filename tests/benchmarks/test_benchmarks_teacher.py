"""The oracle as a teacher: what a policy that imitates it is fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import across_teacher as teacher
from benchmarks.across_federations import CONFIG, evolved
from benchmarks.across_page import has_bias, shares
from fedjax_sim.engine.episode import Length
from fedjax_sim.errors import UserError
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedpolicy.state import STATES, USUAL
from fedjax_sim.runner.across.evolve import Baseline, Problem, Search, Trainer
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


def test_given_weights_are_a_threshold_on_what_is_seen(tmp_path):
    """The backbone is taken where the last one is old, and the head always; the policy is saved as
    a search reads it."""
    weights = "take_backbone.relative_staleness=7, send_head.progress=-1"
    teacher.main(["--weights", weights, "--out", str(tmp_path)])
    first = Trainer(
        Problem(
            parse_over(OVER), CONFIG.replace(start_from=f"{tmp_path}:agent"), Length(4, last=1)
        ),
        Search(),
        Baseline(0.1, "constant", 0.0, []),
    ).first
    seen = np.tile([USUAL[name][0] for name in STATES["portable"]], (3, 1))
    seen[:, STATES["portable"].index("relative_staleness")] = 0.3, 0.6, 0.9
    take_backbone, take_head, *_ = shares(first, seen).T
    np.testing.assert_allclose(take_backbone, [0, 0.5, 1], atol=1e-6)
    assert (take_head == 1).all()


def test_a_bias_moves_the_threshold_of_a_steep_policy():
    first = teacher.weighted("take_backbone.relative_staleness=35, take_backbone.bias=4")
    assert len(first) == 40 and has_bias(first)
    seen = np.tile([USUAL[name][0] for name in STATES["portable"]], (3, 1))
    seen[:, STATES["portable"].index("relative_staleness")] = 0.57, 0.6, 0.63
    np.testing.assert_allclose(shares(first, seen)[:, 0], [0, 0.5, 1], atol=1e-6)
    agent = make_method("fedpolicy", **evolved(first)["options"])
    plain = make_method("fedpolicy", **evolved(first[:36])["options"])
    assert agent.agent.bias and not plain.agent.bias


@pytest.mark.parametrize(
    ("text", "said"),
    [("take_all.progress=1", "take_backbone"), ("take_head.age=1", "progress"), ("x", "feature")],
)
def test_unknown_weights_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        teacher.weighted(text)
