"""fedrep: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

from fixed_cohort import after_rounds
from tiny import same_bits, simulation


def test_fedrep_without_its_order_is_fedper():
    want, _, _ = after_rounds(simulation("fedper"))
    got, _, _ = after_rounds(simulation("fedrep", head_epochs=0.0, freeze_head=False))
    assert same_bits((want.server, want.clients.own), (got.server, got.clients.own))
