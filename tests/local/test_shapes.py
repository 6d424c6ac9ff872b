"""A wrong shape or type in a call of a checked subpackage is an error; see tests/conftest.py."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from fedjax_sim.engine.participation import Participation
from fedjax_sim.local.contrast import anchor_contrast
from fedjax_sim.local.mmd import mmd_rbf


def test_one_name_stands_for_one_size_in_a_call():
    a, mask = jnp.ones((4, 3)), jnp.ones(4, bool)
    mmd_rbf(a, a, mask)
    with pytest.raises(TypeCheckError, match="mmd_rbf"):
        mmd_rbf(a, jnp.ones((4, 2)), mask)
    with pytest.raises(TypeCheckError, match="anchor_contrast"):
        anchor_contrast(a, jnp.ones((5, 2)), jnp.zeros(4, jnp.int32), mask, 0.5)


def test_numbers_of_clients_are_whole():
    draw = Participation(2, 2, (0, 1, 2))
    draw.reports(jax.random.key(0), jnp.arange(2))
    with pytest.raises(TypeCheckError, match="reports"):
        draw.reports(jax.random.key(0), jnp.ones(2))
