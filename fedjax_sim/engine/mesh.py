"""One frame for everything that runs on a device mesh, and the collectives inside it.

On a single device the frame is a plain call, so the code that is written inside it stands once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Int

from fedjax_sim.engine.layout import CLIENTS, Layout
from fedjax_sim.types import Array, Tree

NOWHERE = jnp.iinfo(jnp.int32).max  # a row number that is never written


def over_mesh(layout: Layout, fn: Callable, everywhere: Tree, split: Tree) -> tuple[Tree, Tree]:
    """`fn(everywhere, split) -> (the same on every device, rows of this device)` on every device of
    the layout.

    `everywhere` is handed to each device whole, the leading axis of `split` is shared out.
    """
    if layout.mesh is None:
        return fn(everywhere, split)
    same, rows = PartitionSpec(), PartitionSpec(CLIENTS)
    # gradients are taken inside: without replication typing (check_vma) JAX inserts no sum over
    # devices into them, and method code may start loops from plain constants
    frame = jax.shard_map(
        fn, mesh=layout.mesh, in_specs=(same, rows), out_specs=(same, rows), check_vma=False
    )
    return frame(everywhere, split)


def take(tree: Tree, index: Int[Array, " *wanted"] | int) -> Tree:
    """Rows `index` of a stacked tree."""
    return jax.tree.map(lambda a: a.at[index].get(mode="clip"), tree)


def put(tree: Tree, index: Int[Array, " *wanted"], rows: Tree) -> Tree:
    """A stacked tree with `rows` written at `index`; NOWHERE writes nothing."""
    return jax.tree.map(lambda a, r: a.at[index].set(r.astype(a.dtype), mode="drop"), tree, rows)


def _as_one(op: Callable[[Array], Array], tree: Tree, after: Tree = (), rows: bool = True) -> Tree:
    """A collective on a whole tree as one operation per dtype, one after the other.

    Few large messages instead of many small ones; and a fixed order, without which collectives that
    do not depend on each other may meet the wrong partner on another process. rows: keep the
    leading axis (gathers, scatters).
    """
    leaves, structure = jax.tree.flatten(tree)
    plain = [a.astype(jnp.int32) if a.dtype == bool else a for a in leaves]
    out: list[Any] = [None] * len(leaves)
    for dtype in sorted({str(a.dtype) for a in plain}):
        which = [i for i, a in enumerate(plain) if str(a.dtype) == dtype]
        flat = [plain[i].reshape(*plain[i].shape[: 1 if rows else 0], -1) for i in which]
        joined = op(lax.optimization_barrier((jnp.concatenate(flat, -1), after))[0])
        after = joined
        cuts = np.cumsum([a.shape[-1] for a in flat])[:-1].tolist()
        for i, part in zip(which, jnp.split(joined, cuts, -1), strict=True):
            shape = (part.shape[0], *leaves[i].shape[1:]) if rows else leaves[i].shape
            out[i] = part.reshape(shape).astype(leaves[i].dtype)
    return jax.tree.unflatten(structure, out)


def collect(layout: Layout, tree: Tree) -> Tree:
    """Sum over the mesh (each device filled its own places, the others hold zeros)."""
    return (
        tree if layout.mesh is None else _as_one(lambda a: lax.psum(a, CLIENTS), tree, rows=False)
    )


def gather_rows(layout: Layout, tree: Tree, after: Tree = ()) -> Tree:
    """All devices' rows, one after another, on every device."""
    return (
        tree
        if layout.mesh is None
        else _as_one(lambda a: lax.all_gather(a, CLIENTS, tiled=True), tree, after)
    )


def scatter_rows(tree: Tree) -> Tree:
    """Rows summed over the mesh, each device keeping its share of them; inside a mesh only.

    Everybody sends everybody else's share: a TPU makes an all-reduce of `psum_scatter`, which moves
    every row to everyone.
    """
    devices = lax.axis_size(CLIENTS)
    share = lambda a: lax.all_to_all(a.reshape(devices, -1, *a.shape[1:]), CLIENTS, 0, 0).sum(0)
    return _as_one(share, tree)


def locate(
    shard: Tree, row: Int[Array, " wanted"]
) -> tuple[Int[Array, " wanted"], Bool[Array, " wanted"]]:
    """Global row numbers -> (their places in this device's shard, whether they live here); inside a
    mesh only."""
    rows_here = jax.tree.leaves(shard)[0].shape[0]
    place = row - lax.axis_index(CLIENTS) * rows_here
    return place, (place >= 0) & (place < rows_here)


def own_rows(shard: Tree, place: Int[Array, " wanted"], here: Bool[Array, " wanted"]) -> Tree:
    """Rows of this device's shard, zero where they live elsewhere."""
    wide = lambda a: here.reshape(-1, *[1] * (a.ndim - 1))
    return jax.tree.map(
        lambda a: jnp.where(wide(a), a.at[place].get(mode="clip"), 0).astype(a.dtype), shard
    )


def copy_clients(layout: Layout, stored: Tree, row: Int[Array, " peers"]) -> Tree:
    """The client states `row` of [N, …], copied to every device: K of them, never N."""
    if layout.mesh is None or not jax.tree.leaves(stored):
        return take(stored, row)
    share = lambda row, shard: (collect(layout, own_rows(shard, *locate(shard, row))), ())
    return over_mesh(layout, share, row, stored)[0]


def split_rows(
    layout: Layout, fn: Callable, everywhere: Tree, rows: Int[Array, " examples"]
) -> Tree:
    """`fn(everywhere, rows [R']) -> tree of [R', …]` with the rows [R] shared out over the
    devices."""
    size = rows.shape[0]
    padded = jnp.pad(rows, (0, -size % layout.devices))
    share = lambda everywhere, rows: (gather_rows(layout, fn(everywhere, rows)), ())
    return jax.tree.map(lambda a: a[:size], over_mesh(layout, share, everywhere, padded)[0])
