"""fedper: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import pytest
from fixed_cohort import HEAD, after_rounds, variant
from tiny import assert_close, same_bits, simulation, start

from fedjax_sim.errors import UserError
from fedjax_sim.methods import make_method


def test_fedper_trains_as_the_backbone_redistribution():
    """Size weights: the same backbone on the server, the same heads on the clients; only the head
    stays at home."""
    want, _, _ = after_rounds(simulation("backbone", weights="size", first="any"))
    got, _, _ = after_rounds(simulation("fedper"))
    body = lambda net: {name: sub for name, sub in net["params"].items() if name != HEAD}
    assert_close(body(want.server.net), body(got.server.net), 1e-6)
    assert_close(want.clients.resident["params"][HEAD], got.clients.own["params"][HEAD], 1e-6)
    assert set(got.clients.own["params"]) == {HEAD}  # nothing else is stored
    first = start(simulation("fedper"))[0].server.net["params"][HEAD]
    assert same_bits(first, got.server.net["params"][HEAD])


@pytest.mark.parametrize("layers", [2, -1])
def test_fedper_must_share_something(layers):
    sim = simulation("fedavg")
    with pytest.raises(
        UserError,
        match=rf"^{layers} parameter groups cannot stay private.*'mlp' has 2; allowed: 0 to 1",
    ):
        variant(sim, make_method("fedper", layers=layers)).init(
            0, sim.env.model.init(jax.random.key(0))
        )
