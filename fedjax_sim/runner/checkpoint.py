"""Checkpoints of the whole State with orbax: atomic, newest k kept, checked when read.

    checkpoints/00000030/       round 30
        meta.json               format, config hash, round, shape, dtype and CRC-32 of every leaf
        state/                  orbax: every leaf but the large banks
        rows/00000000/ …        orbax: the large `[N, …]` leaves, BLOCK bytes of rows at a time

A checkpoint is written under a hidden name and renamed when complete. Large banks are written and read block by block,
into the State's own buffers, so no second copy of them is ever in memory. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import zlib
from typing import Any

import jax
import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.runner.config import FORMAT
from fedjax_sim.runner.files import write_json
from fedjax_sim.types import State

BLOCK = 256 * 2**20  # bytes of rows per block
WHOLE = 16 * 2**20  # leaves up to this are written at once with all others, several copies of them being made on the way


def _checkpointer() -> Any:
    import logging

    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    me = jax.process_index()  # each process reads and writes on its own: nobody waits for the others
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"p{me}")
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def _name(index: int) -> str:
    return f"leaf{index:04d}"


def _rows_per_block(leaf: Any) -> int:
    return max(1, BLOCK // max(1, leaf.nbytes // max(1, leaf.shape[0])))


def _large(state: State, leaves: list[Any]) -> list[bool]:
    """Which leaves are written in rows: big ones of the stacked client state."""
    stacked = jax.tree.leaves(
        state._replace(
            t=False,
            key=False,
            server=jax.tree.map(lambda _: False, state.server),
            clients=jax.tree.map(lambda _: True, state.clients),
            agent=jax.tree.map(lambda _: False, state.agent),
        )
    )
    return [bool(s) and leaf.ndim > 0 and leaf.nbytes > min(WHOLE, BLOCK) for s, leaf in zip(stacked, leaves, strict=True)]


def _host(array: Any) -> np.ndarray:
    """On the host; an array spread over processes is gathered (every process must call this)."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _rows(leaf: Any, first: int, last: int) -> np.ndarray:
    """Rows first..last on the host, each from the device it lives on.

    Slicing the sharded array instead would add zeros from the other devices, which turns −0 into 0.
    """
    if isinstance(leaf, np.ndarray) or not leaf.is_fully_addressable or len(leaf.sharding.device_set) == 1:
        return _host(leaf[first:last])
    out = np.empty((last - first, *leaf.shape[1:]), leaf.dtype)
    for shard in leaf.addressable_shards:
        start, stop, _ = shard.index[0].indices(leaf.shape[0])
        low, high = max(first, start), min(last, stop)
        if low < high:
            out[(slice(low - first, high - first), *shard.index[1:])] = np.asarray(shard.data[low - start : high - start])
    return out


def _crc(array: np.ndarray, start: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), start)  # type: ignore[arg-type]


def save(folder: pathlib.Path, state: State, config_hash: str, keep: int = 2) -> pathlib.Path:
    """Write the checkpoint of `state` under `folder`; only process 0 writes. Returns its path."""
    writer = jax.process_index() == 0
    leaves = jax.tree.leaves(state)
    large = _large(state, leaves)
    round_ = int(_host(state.t))
    target, work = folder / f"{round_:08d}", folder / f".{round_:08d}.partial"
    if writer:
        for stale in folder.glob(".*.partial"):  # of a run that was killed while writing
            shutil.rmtree(stale, ignore_errors=True)
        work.mkdir(parents=True)
    out = _checkpointer() if writer else None
    small = {
        _name(i): _host(leaf) for i, leaf in enumerate(leaves) if not large[i] and leaf.size
    }  # orbax refuses arrays without elements; there is nothing to keep
    record = [
        dict(shape=list(leaf.shape), dtype=str(leaf.dtype), crc=0, large=big)
        for leaf, big in zip(leaves, large, strict=True)
    ]
    for i, leaf in enumerate(leaves):
        if not large[i]:
            record[i]["crc"] = _crc(small[_name(i)]) if leaf.size else 0
            continue
        step, crc = _rows_per_block(leaf), 0
        for first in range(0, leaf.shape[0], step):
            block = _rows(leaf, first, min(first + step, leaf.shape[0]))
            crc = _crc(block, crc)
            if out is not None:
                out.save((work / "rows" / f"{i:04d}-{first:08d}").absolute(), {"rows": block})
        record[i]["crc"] = crc
    if out is not None:
        out.save((work / "state").absolute(), small)
        write_json(work / "meta.json", dict(format=FORMAT, config_hash=config_hash, round=round_, leaves=record))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(work, target)
        for old in rounds(folder)[:-keep]:
            shutil.rmtree(folder / f"{old:08d}", ignore_errors=True)
    return target


def rounds(folder: pathlib.Path) -> list[int]:
    """Rounds with a complete checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and (p / "meta.json").is_file())


def read_meta(path: pathlib.Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta.json").read_text())
        if int(meta["format"]) != FORMAT:
            raise UserError(f"checkpoint '{path}' has format {meta['format']}; this version reads format {FORMAT}")
        return {key: meta[key] for key in ("config_hash", "round", "leaves")}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        if isinstance(problem, UserError):
            raise
        raise UserError(
            f"checkpoint '{path}' is damaged: its meta.json cannot be read; delete it to resume from an older one"
        ) from None


def load(path: pathlib.Path, state: State, config_hash: str | None = None) -> State:
    """The State stored at `path`, in the buffers and with the sharding of the freshly initialised `state`."""
    meta = read_meta(path)
    if config_hash is not None and meta["config_hash"] != config_hash:
        raise UserError(
            f"checkpoint '{path}' belongs to configuration {meta['config_hash']}, but this run is "
            f"{config_hash}; resume with the unchanged configuration"
        )
    leaves, tree = jax.tree.flatten(state)
    record = meta["leaves"]
    same = len(record) == len(leaves) and all(
        r["shape"] == list(leaf.shape) and r["dtype"] == str(leaf.dtype) for r, leaf in zip(record, leaves, strict=True)
    )
    if not same:
        raise UserError(f"checkpoint '{path}' does not fit this run: the shapes of its state differ")
    damaged = UserError(
        f"checkpoint '{path}' is damaged: stored values do not match their checksum; delete it to resume from an older one"
    )
    reader = _checkpointer()
    put = jax.jit(lambda bank, rows, first: jax.lax.dynamic_update_slice_in_dim(bank, rows, first, 0), donate_argnums=0)
    try:
        small = reader.restore((path / "state").absolute())
        for i, leaf in enumerate(leaves):
            if not leaf.size:
                continue
            if not record[i]["large"]:
                value = np.asarray(small[_name(i)]).astype(leaf.dtype, copy=False).reshape(leaf.shape)
                if _crc(value) != record[i]["crc"]:
                    raise damaged
                leaves[i] = np.array(value) if isinstance(leaf, np.ndarray) else jax.device_put(value, leaf.sharding)
                continue
            crc = 0
            for first in range(0, leaf.shape[0], _rows_per_block(leaf)):
                block = np.asarray(reader.restore((path / "rows" / f"{i:04d}-{first:08d}").absolute())["rows"])
                crc = _crc(block, crc)
                if isinstance(leaf, np.ndarray):  # rows kept on the host
                    leaf[first : first + len(block)] = block
                else:
                    leaves[i] = put(leaves[i], block, first)
            if crc != record[i]["crc"]:
                raise damaged
    except UserError:
        raise
    except Exception:  # orbax and its storage layer raise many kinds
        raise damaged from None
    return jax.tree.unflatten(tree, leaves)


def latest(folder: pathlib.Path) -> pathlib.Path:
    found = rounds(folder)
    if not found:
        raise UserError(f"'{folder}' holds no complete checkpoint; start the run again with fedjax-sim run")
    return folder / f"{found[-1]:08d}"
