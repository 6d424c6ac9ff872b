"""Data: sources -> partition -> Federation. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_sim.data.federation import Federation
    from fedjax_sim.data.figure import bubble_plot
    from fedjax_sim.data.partition import PARTITIONS, parse_partition
    from fedjax_sim.data.protocols import PROTOCOLS, federate
    from fedjax_sim.data.sources import DATASETS, Dataset, load

_HOME = {
    "Federation": "federation",
    "bubble_plot": "figure",
    "PARTITIONS": "partition",
    "parse_partition": "partition",
    "PROTOCOLS": "protocols",
    "federate": "protocols",
    "DATASETS": "sources",
    "Dataset": "sources",
    "load": "sources",
}
__all__ = [
    "DATASETS",
    "PARTITIONS",
    "PROTOCOLS",
    "Dataset",
    "Federation",
    "bubble_plot",
    "federate",
    "load",
    "parse_partition",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedjax_sim.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fedjax_sim.data.{_HOME[name]}"), name)
