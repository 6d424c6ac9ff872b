"""The methods with one model: any loss, side by side, bad options."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from golden.stored import torch_values
from one_client import rows_of, train_one
from tiny import close

from fedjax_sim.errors import UserError
from fedjax_sim.methods import make_method


def test_pytorch_saw_the_examples_of_client_1():
    values = torch_values("methods_global")
    for mine, theirs in zip(rows_of(1), (values["x"], values["y"]), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", ["fedntd", "ccvr", "fedsam", "fedfa", "fedfa_freq", "fedca"])
def test_takes_the_loss_of_the_run(name):
    plain, calibrated = train_one(name)[2], train_one(name, loss="c3e")[2]
    assert all(np.isfinite(a).all() for a in tiny.arrays(calibrated)) and not close(
        plain.net, calibrated.net, 1e-3
    )


@pytest.mark.parametrize("name", ["ccvr", "fedfa"])
def test_side_by_side_agrees(name):
    """Running values and statistics stand still once a client has finished and its neighbour has
    not."""
    (_, alone, want), (_, beside, got) = train_one(name), train_one(name, neighbour=2)
    assert close(want, got, 1e-5) and close(alone, beside, 1e-5)


@pytest.mark.parametrize(
    "name, options, said",
    [
        (
            "ccvr",
            {"mode": "half"},
            "unknown mode of ccvr 'half'; allowed: per_round_diag, post_full",
        ),
        ("fedsam", {"rho": "-1"}, "rho=-1"),
        ("ccvr", {"samples": "0"}, "samples=0"),
        ("fedfa", {"p": "1.5"}, "p=1.5"),
        ("fedfa_freq", {"lam": "2"}, "lam=2"),
        ("fedntd", {"tau": "0"}, "tau=0"),
        ("fedca", {"priorities": "-1"}, "priorities=-1"),
    ],
)
def test_bad_options_are_refused(name, options, said):
    with pytest.raises(UserError, match=said):
        make_method(name, **options)
