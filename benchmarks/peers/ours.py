"""fedjax_sim as a peer: the adapter between the engine and the line protocol.

NOT YET WIRED. `prepare` must build the workload's federation from `benchmarks.workloads.make_data`, start
from `benchmarks.models.init_weights`, and return a `Peer` whose `round(index)` runs the cohort of
`benchmarks.workloads.plan(workload, data, index)` through the engine.
"""
from __future__ import annotations

from benchmarks.peers.protocol import Peer, PeerError
from benchmarks.workloads import Workload

PACKAGES = ("jax", "jaxlib", "numpy")


def prepare(workload: Workload) -> Peer:
    raise PeerError("the adapter for fedjax_sim itself is not written yet (benchmarks/peers/ours.py)")
