"""Plans: parts of a net and how they are put together."""

from __future__ import annotations

from fedjax_sim.plans import overlay, part


def test_part_and_overlay_are_inverse():
    net = {"params": {"stem": 1, "fc": 2}, "batch_stats": {"stem": 3}}
    other = {"params": {"stem": 4, "fc": 5}, "batch_stats": {"stem": 6}}
    assert overlay(net, part(other, ("stem",))) == {
        "params": {"stem": 4, "fc": 2},
        "batch_stats": {"stem": 6},
    }
    assert overlay(net, part(net, ("fc",))) == net
