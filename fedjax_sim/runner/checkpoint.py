"""Checkpoints of the whole State with orbax: atomic, newest k kept, checked when read.

    checkpoints/00000030/       round 30
        meta.json               format, config hash, round; name, shape, dtype and CRC-32 of every
                                leaf; its own checksum
        files/                  metrics.csv, rounds.csv, … as they were then, their sizes and
                                checksums in meta.json
        state/                  orbax: {name: array} of every leaf but the large stacks
        rows/NAME-00000000/ …   orbax: the large `[N, …]` leaves, BLOCK bytes of rows at a time

A leaf's name is its path in the State, e.g. `server.net.params.fc.kernel` or
`clients.resident.params.fc.bias`: leaves are matched by name, and `load_parts` copies some of them
into the State of another run. A checkpoint is written under a hidden name and renamed when
complete. Large stacks are written and read block by block, into the State's own buffers, so no
second copy of them is ever in memory. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedjax_sim import __version__, options
from fedjax_sim.errors import UserError
from fedjax_sim.experiment.tree import other_format
from fedjax_sim.runner.files import PARTIAL, cause, checksum, stamp, write_bytes, write_json
from fedjax_sim.runner.run_directory import FORMAT, clear_checkpoints, saved_rounds
from fedjax_sim.types import State, Tree

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

Leaf = jax.Array | np.ndarray

BLOCK = 256 * 2**20  # bytes of rows per block
WHOLE = 16 * 2**20  # bytes; smaller leaves are written together, which copies them several times


def _checkpointer() -> ocp.Checkpointer:
    import logging

    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # failures are raised as UserErrors here
    me = jax.process_index()  # each process reads and writes alone and waits for no other
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"p{me}"
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone
    )


def _hush() -> None:
    """Silence the storage layer's threads, which print "Event loop is closed" after a failed
    write."""
    usual = sys.unraisablehook

    def hook(what: sys.UnraisableHookArgs) -> None:
        if not (what.exc_type is RuntimeError and str(what.exc_value) == "Event loop is closed"):
            usual(what)

    if getattr(usual, "__qualname__", "") != hook.__qualname__:
        sys.unraisablehook = hook


def leaf_names(tree: Tree) -> list[str]:
    """The leaves' paths, in the order of `jax.tree.leaves`.

    >>> leaf_names({"net": {"fc": [1, 2]}, "t": 0})
    ['net.fc.0', 'net.fc.1', 't']
    """
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def _rows_per_block(leaf: Leaf) -> int:
    return max(1, BLOCK // max(1, leaf.nbytes // max(1, leaf.shape[0])))


def _large(name: str, leaf: Leaf) -> bool:
    """Whether a leaf is written in rows: a big one of the stacked client state."""
    stacked = name.partition(".")[0] == "clients" and leaf.ndim > 0
    return stacked and leaf.nbytes > min(WHOLE, BLOCK)


def _host(array: Leaf) -> np.ndarray:
    """`array` on the host; one spread over processes is gathered (every process must call this)."""
    if (
        isinstance(array, jax.Array)
        and not array.is_fully_addressable
        and not array.is_fully_replicated
    ):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _rows(leaf: Leaf, first: int, last: int) -> np.ndarray:
    """Rows first..last on the host, each from the device it lives on.

    Slicing the sharded array instead would add zeros from the other devices, which turns −0 into 0.
    """
    if (
        isinstance(leaf, np.ndarray)
        or not leaf.is_fully_addressable
        or len(leaf.sharding.device_set) == 1
    ):
        return _host(leaf[first:last])
    out = np.empty((last - first, *leaf.shape[1:]), leaf.dtype)
    for shard in leaf.addressable_shards:
        start, stop, _ = shard.index[0].indices(leaf.shape[0])
        low, high = max(first, start), min(last, stop)
        if low < high:
            out[(slice(low - first, high - first), *shard.index[1:])] = np.asarray(
                shard.data[low - start : high - start]
            )
    return out


def _crc(array: np.ndarray, start: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), start)  # type: ignore[arg-type]


def save(
    folder: pathlib.Path,
    state: State,
    config_hash: str,
    keep: int = 2,
    files: Mapping[str, bytes] | None = None,
) -> pathlib.Path:
    """Write the checkpoint of `state` under `folder`, with `files` beside it; only process 0
    writes. Returns its path."""
    names, leaves = leaf_names(state), jax.tree.leaves(state)
    if len(set(names)) < len(names):
        raise UserError(
            f"two leaves of the State are both called '{max(names, key=names.count)}'; rename one"
            " of them"
        )
    round_ = int(_host(state.t))
    target, work = folder / f"{round_:08d}", folder / f".{round_:08d}{PARTIAL}"
    if jax.process_index() != 0:
        _write(None, work, names, leaves)  # all processes gather what is spread over them
        return target
    try:
        clear_checkpoints(folder)
        work.mkdir(parents=True)
        _hush()
        record = _write(_checkpointer(), work, names, leaves)
        stamps = {}
        for name, content in (files or {}).items():
            (work / "files").mkdir(exist_ok=True)
            write_bytes(work / "files" / name, content)
            stamps[name] = stamp(content)
        meta = dict(format=FORMAT, version=__version__, config_hash=config_hash, round=round_)
        meta |= dict(leaves=record, files=stamps)
        write_json(work / "meta.json", meta | dict(checksum=checksum(meta)))
        _delete(target)
        os.replace(work, target)
    except BaseException as problem:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(problem, UserError) or not isinstance(problem, Exception):
            raise
        raise UserError(
            f"checkpoint '{target}' cannot be written: {options.shown(cause(problem), 200)}"
        ) from None
    for old in saved_rounds(folder)[:-keep]:
        _delete(folder / f"{old:08d}")
    return target


def _write(
    out: ocp.Checkpointer | None, work: pathlib.Path, names: Sequence[str], leaves: Sequence[Leaf]
) -> list[dict[str, Any]]:
    """Write the leaves to files under `work` (out None: write nothing); return their records."""
    small: dict[str, np.ndarray] = {}
    record: list[dict[str, Any]] = []
    for name, leaf in zip(names, leaves, strict=True):
        crc, large = 0, _large(name, leaf)
        if large:
            step = _rows_per_block(leaf)
            for first in range(0, leaf.shape[0], step):
                block = _rows(leaf, first, min(first + step, leaf.shape[0]))
                crc = _crc(block, crc)
                if out is not None:
                    out.save((work / "rows" / f"{name}-{first:08d}").absolute(), {"rows": block})
        elif leaf.size:  # orbax refuses empty arrays
            small[name] = _host(leaf)
            crc = _crc(small[name])
        record.append(
            dict(name=name, shape=list(leaf.shape), dtype=str(leaf.dtype), crc=crc, large=large)
        )
    if out is not None:
        out.save((work / "state").absolute(), small)
    return record


def _delete(path: pathlib.Path) -> None:
    """Delete a checkpoint: rename it to a hidden name first, which the next save clears after a
    kill."""
    if path.exists():
        hidden = path.with_name(f".{path.name}.old{PARTIAL}")
        shutil.rmtree(hidden, ignore_errors=True)
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def read_meta(path: pathlib.Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta.json").read_text())
        if int(meta["format"]) != FORMAT:
            raise other_format(f"checkpoint '{path}'", meta, FORMAT)
        if meta["checksum"] != checksum(meta):
            raise ValueError
        return {key: meta[key] for key in ("config_hash", "round", "leaves", "files")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        if isinstance(problem, UserError):
            raise
        raise UserError(
            f"checkpoint '{path}' is damaged: its meta.json cannot be read; delete it to resume"
            " from an older one"
        ) from None


def read_files(path: pathlib.Path) -> dict[str, bytes]:
    """The files that were saved with the checkpoint, every byte as it was."""
    found = {}
    for name, wanted in read_meta(path)["files"].items():
        try:
            found[name] = (path / "files" / name).read_bytes()
        except OSError:
            found[name] = b""
        if stamp(found[name]) != wanted:
            raise UserError(
                f"checkpoint '{path}' is damaged: its {name} does not match its checksum; delete it"
                " to resume from an older one"
            )
    return found


def load(
    path: pathlib.Path, state: State, config_hash: str | None = None, clients: int | None = None
) -> State:
    """The State stored at `path`, in the buffers and with the sharding of the freshly initialised
    `state`.

    clients: the number of clients; further rows of the stacked client state are padding for the
    devices, and their number depends on that of the devices.
    """
    meta = read_meta(path)
    if config_hash is not None and meta["config_hash"] != config_hash:
        raise UserError(
            f"checkpoint '{path}' belongs to configuration {meta['config_hash']}, but this run is "
            f"{config_hash}; resume with the unchanged configuration"
        )
    stored = {record["name"] for record in meta["leaves"]}
    for name in leaf_names(state):
        if name not in stored:
            raise UserError(f"checkpoint '{path}' does not fit this run: it has no '{name}'")
    return _fill(path, state, meta["leaves"], f"checkpoint '{path}' does not fit this run", clients)


def _fits(record: dict[str, Any], here: Leaf, clients: int | None) -> bool:
    if record["dtype"] != str(here.dtype):
        return False
    there, shape = list(record["shape"]), list(here.shape)
    if clients is not None and record["name"].startswith("clients.") and there and shape:
        return there[1:] == shape[1:] and min(there[0], shape[0]) >= clients
    return there == shape


def _fill(
    path: pathlib.Path,
    state: State,
    records: Sequence[dict[str, Any]],
    problem: str,
    clients: int | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> State:
    """`state` with the leaves in `records` read from `path`, or from `arrays`. problem: the start
    of the error message when one does not fit."""
    leaves, tree = jax.tree.flatten(state)
    place = {name: i for i, name in enumerate(leaf_names(state))}
    for record in records:
        if record["name"] not in place:
            raise UserError(f"{problem}: this run's state has no '{record['name']}'")
        here = leaves[place[record["name"]]]
        if not _fits(record, here, clients):
            raise UserError(
                f"{problem}: '{record['name']}' is {record['dtype']}{record['shape']} there and "
                f"{here.dtype}{list(here.shape)} here"
            )
    try:
        reader = _checkpointer()
        small = reader.restore((path / "state").absolute()) if arrays is None else arrays
        for record in records:
            i = place[record["name"]]
            if leaves[i].size:
                crc = 0
                for first, block in _blocks(reader, path, small, record):
                    crc = _crc(block, crc)
                    leaves[i] = _put(leaves[i], first, block, record["large"])
                if crc != record["crc"]:
                    raise ValueError("checksum")
    except Exception:  # orbax and its storage layer raise many kinds
        raise UserError(
            f"checkpoint '{path}' is damaged: stored values do not match their checksum; delete it"
            " to resume from an older one"
        ) from None
    return jax.tree.unflatten(tree, leaves)


def _blocks(
    reader: ocp.Checkpointer,
    path: pathlib.Path,
    small: Mapping[str, Any],
    record: Mapping[str, Any],
) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of one stored leaf: all of it, or a large one block by block."""
    name = record["name"]
    if not record["large"]:
        array = np.asarray(small[name]).astype(record["dtype"], copy=False)
        yield 0, array.reshape(record["shape"])
        return
    for block in sorted((path / "rows").iterdir()):
        if block.name.rpartition("-")[0] == name:
            rows = reader.restore(block.absolute())["rows"]
            yield int(block.name.rpartition("-")[2]), np.asarray(rows)


_set_rows = jax.jit(
    lambda rows, block, first: jax.lax.dynamic_update_slice_in_dim(rows, block, first, 0),
    donate_argnums=0,
)


def _put(leaf: Leaf, first: int, block: np.ndarray, large: bool) -> Leaf:
    """`leaf` with the rows of `block` from `first` on, in its own buffer where it is large; rows
    beyond its end are padding and are dropped."""
    if large:
        block = block[: max(0, leaf.shape[0] - first)]
        if not isinstance(leaf, np.ndarray):
            return _set_rows(leaf, block, first)
        leaf[first : first + len(block)] = block  # rows kept on the host
        return leaf
    if block.shape != leaf.shape:
        more = max(0, leaf.shape[0] - len(block))
        block = np.concatenate([block[: leaf.shape[0]], np.repeat(block[-1:], more, 0)])
    return np.array(block) if isinstance(leaf, np.ndarray) else jax.device_put(block, leaf.sharding)


def arrays(path: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Some leaves of a checkpoint by name, on the host; names without a leaf are left out."""
    reader = _checkpointer()
    small = reader.restore((path / "state").absolute())
    found = {}
    for record in (r for r in read_meta(path)["leaves"] if r["name"] in names):
        blocks = [block for _, block in _blocks(reader, path, small, record)]
        found[record["name"]] = np.concatenate(blocks) if record["large"] else blocks[0]
    return found


# ---- parts of another run ------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Parts:
    """Some leaves of a checkpoint, to start another run from."""

    run: pathlib.Path
    path: pathlib.Path  # of the checkpoint
    records: tuple[dict[str, Any], ...]  # as in meta.json
    names: tuple[str, ...]  # the prefixes asked for
    arrays: Mapping[str, np.ndarray] | None = None  # of a controller in the package

    def fingerprint(self) -> str:
        """Names and checksum of the leaves; it does not depend on their path."""
        facts = [(r["name"], r["shape"], r["dtype"], r["crc"]) for r in self.records]
        return f"{','.join(self.names)}@{zlib.crc32(json.dumps(facts).encode()):08x}"


def find_parts(text: str) -> Parts:
    """'RUN:agent,server.net' -> those leaves of the newest checkpoint of the run directory RUN.
    Nothing is loaded."""
    where, colon, wanted = str(text).rpartition(":")
    names = options.names(wanted)
    if not (colon and where and names):
        raise UserError(
            f"start-from '{text}' cannot be read; use RUN:PART,PART, e.g. runs/first:agent,server"
        )
    if where.startswith(PRETRAINED):
        return pretrained_parts(where, tuple(sorted(names)))
    run = pathlib.Path(where)
    if not run.is_dir():
        raise UserError(f"start-from: there is no run directory '{where}'")
    if not saved_rounds(run / "checkpoints"):
        raise UserError(f"start-from: '{where}' holds no complete checkpoint")
    path = latest(run / "checkpoints")
    # not the round and the key of the other run
    stored = [r for r in read_meta(path)["leaves"] if r["name"] not in ("t", "key")]
    known = [r["name"] for r in stored]
    kept = _selected(where, known, names, lambda part: _near(known, part))
    return Parts(run, path, tuple(r for r in stored if r["name"] in kept), tuple(sorted(names)))


def _selected(
    where: str, known: Sequence[str], parts: Sequence[str], near: Callable[[str], list[str]]
) -> set[str]:
    """Those of the `known` leaves that are in one of the parts; near: what is allowed instead of a
    part without any."""
    inside = {p: {n for n in known if n == p or n.startswith(f"{p}.")} for p in parts}
    for part, found in inside.items():
        if not found:
            raise UserError(
                f"start-from: '{where}' has no part '{part}'; allowed: {', '.join(near(part))}"
            )
    return set().union(*inside.values())


PRETRAINED = "pretrained:"  # a controller that comes with the package


def pretrained_parts(where: str, names: tuple[str, ...]) -> Parts:
    """'pretrained:NAME' -> those leaves of a controller in the package; see
    `presets.controllers`."""
    from fedjax_sim.presets import controllers

    path, stored = controllers.read(where.removeprefix(PRETRAINED))
    kept = _selected(where, list(stored), names, lambda part: sorted(stored))
    arrays = {n: a for n, a in stored.items() if n in kept}
    return Parts(pathlib.Path(where), path, _records(arrays), names, arrays)


def _records(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], ...]:
    """Arrays as in meta.json."""
    about = lambda a: dict(shape=list(a.shape), dtype=str(a.dtype), crc=_crc(a), large=False)
    return tuple(dict(name=name) | about(a) for name, a in arrays.items())


def _near(names: Sequence[str], part: str) -> list[str]:
    """Suggestions for `part`: the next level below its longest prefix that exists.

    >>> _near(["server.net.fc", "server.c", "agent.policy"], "server.nets")
    ['server.c', 'server.net']
    >>> _near(["server.net.fc", "server.c", "agent.policy"], "srv.net")
    ['agent', 'server']
    """
    known: list[str] = []
    for key in part.split("."):
        if not any(n.split(".")[: len(known) + 1] == [*known, key] for n in names):
            break
        known.append(key)
    return sorted(
        {
            ".".join(n.split(".")[: len(known) + 1])
            for n in names
            if n.split(".")[: len(known)] == known
        }
    )


def load_parts(parts: Parts, state: State) -> State:
    """`state` with the parts in place of its own leaves of the same names."""
    problem = f"start-from '{parts.run}' does not fit this run"
    if parts.arrays is None:
        return _fill(parts.path, state, parts.records, problem)
    # a controller of the package goes with runs of any precision
    types = {n: a.dtype for n, a in zip(leaf_names(state), jax.tree.leaves(state), strict=True)}
    arrays = {n: np.asarray(a, types.get(n, a.dtype)) for n, a in parts.arrays.items()}
    return _fill(parts.path, state, _records(arrays), problem, arrays=arrays)


def latest(folder: pathlib.Path) -> pathlib.Path:
    found = saved_rounds(folder)
    if not found:
        raise UserError(
            f"'{folder}' holds no complete checkpoint; start the run again with fedjax-sim run"
        )
    return folder / f"{found[-1]:08d}"
