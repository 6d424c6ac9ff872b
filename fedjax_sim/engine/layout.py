"""Where things live: how many clients side by side, on which devices, and how a State is spread
over them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_sim.types import Tree

CLIENTS = "clients"  # the mesh axis


@dataclasses.dataclass(frozen=True)
class Layout:
    """chunk: clients side by side on one device (1: no vmap at all); mesh: None for a single
    device."""

    chunk: int = 1
    mesh: Mesh | None = None

    @property
    def devices(self) -> int:
        return self.mesh.size if self.mesh is not None else 1

    def padded(self, clients: int) -> int:
        """Rows of the stacked state: N rounded up to a multiple of the device count."""
        return -(-clients // self.devices) * self.devices


def make_layout(chunk: int, devices: int) -> Layout:
    if devices <= 1:
        return Layout(chunk)
    return Layout(
        chunk,
        jax.make_mesh(
            (devices,), (CLIENTS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
        ),
    )


def one_machine(mesh: Mesh) -> bool:
    """Whether the devices are cores of one machine, which share its memory and communicate at no
    cost."""
    return all(
        d.platform == "cpu" and d.process_index == mesh.devices.flat[0].process_index
        for d in mesh.devices.flat
    )


def asks(node: Any) -> bool:
    return hasattr(node, "shared_out")


def server_shardings(layout: Layout, server: Tree) -> Any:
    """Where the leaves of a server's state live: everywhere.

    But a part of it with `shared_out(devices) -> [leaf: whether]` is split along the last axis of
    these leaves on one machine, whose cores would all do the same work on copies of them otherwise.
    """
    assert layout.mesh is not None
    mesh, near = layout.mesh, one_machine(layout.mesh)
    last = lambda a, split: (
        PartitionSpec(*[None] * (a.ndim - 1), CLIENTS) if split else PartitionSpec()
    )
    parts = lambda node: (
        node.shared_out(layout.devices)
        if near and asks(node)
        else jax.tree.map(lambda _: False, node)
    )
    where = lambda node: jax.tree.map(
        lambda a, split: NamedSharding(mesh, last(a, split)), node, parts(node)
    )
    return jax.tree.map(where, server, is_leaf=asks)


def shardings(layout: Layout, state: Any) -> Any:
    """Where a State's leaves live: client states spread over the mesh, everything else everywhere;
    see `server_shardings`."""
    assert layout.mesh is not None
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    spread = NamedSharding(layout.mesh, PartitionSpec(CLIENTS))
    whole = jax.tree.map(lambda _: everywhere, state._replace(server=()))
    return whole._replace(
        clients=jax.tree.map(lambda _: spread, state.clients),
        server=server_shardings(layout, state.server),
    )


def stay(layout: Layout, server: Tree) -> Tree:
    """A server's new state on the devices of the old one; only shared parts need a constraint."""
    if layout.mesh is None or not any(asks(node) for node in jax.tree.leaves(server, is_leaf=asks)):
        return server
    return jax.lax.with_sharding_constraint(server, server_shardings(layout, server))


def spread(tree: Tree, where: Any) -> Tree:
    """Host or device arrays to a sharding, also one that reaches over several processes (all hold
    the same values)."""

    def one(a: Any, sharding: Any) -> Any:
        if sharding.is_fully_addressable or (
            isinstance(a, jax.Array) and not a.is_fully_addressable
        ):
            return jax.device_put(a, sharding)
        host = np.asarray(a)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    if isinstance(where, NamedSharding):
        return jax.tree.map(lambda a: one(a, where), tree)
    return jax.tree.map(one, tree, where)


def everywhere(layout: Layout, tree: Tree) -> Tree:
    """The same values on every device of the layout."""
    if layout.mesh is None:
        return jax.device_put(tree)
    return spread(tree, NamedSharding(layout.mesh, PartitionSpec()))


def place(layout: Layout, state: Any, data: Any) -> tuple[Any, Any]:
    """Put a State and its data where the layout wants them."""
    if layout.mesh is None:
        return jax.device_put(state), jax.device_put(data)
    return spread(state, shardings(layout, state)), everywhere(layout, data)


def available_devices() -> int:
    return len(jax.devices())


def host_cores() -> int:
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )


def as_numpy(tree: Tree) -> Tree:
    return jax.tree.map(np.asarray, tree)
