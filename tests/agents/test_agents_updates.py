"""Whole updates of each agent against PyTorch: from stored arrays always, live where torch is
installed.

The PyTorch side and the script that stores its results are in `tests/golden/make_agents.py`.
"""

import importlib.util

import numpy as np
import pytest
from golden import make_agents

every_case = pytest.mark.parametrize("case", make_agents.CASES)


def same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, atol=1e-9, err_msg=name)


@every_case
def test_update_equals_stored_pytorch(case):
    with np.load(make_agents.FILE, allow_pickle=False) as file:
        stored = {
            name.removeprefix(f"{case}/"): file[name]
            for name in file.files
            if name.startswith(f"{case}/")
        }
    same(make_agents.ours(case), stored)


@every_case
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the stored arrays are compared above"
)
def test_update_equals_live_pytorch(case):
    same(make_agents.ours(case), make_agents.theirs(case))
