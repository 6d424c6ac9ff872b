"""Initial weights: drawn from the seed, read from a file, or given by the caller."""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import models
from fedjax_sim.engine.keys import seed_key, weights_key
from fedjax_sim.errors import UserError
from fedjax_sim.models.record import initial_weights
from fedjax_sim.runner.files import npz_bytes, write_bytes
from fedjax_sim.types import Tree


def initial_net(model: models.Model, seed: int) -> Tree:
    """Initial weights: a function of the model and the seed only, so every method starts from the
    same."""
    return initial_weights(model, weights_key(seed_key(seed)))


def by_name(net: Tree) -> dict[str, Any]:
    """Leaves by their paths, e.g. 'params/conv1/kernel'."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): value for path, value in jax.tree_util.tree_flatten_with_path(net)[0]}


def save_net(path: str | pathlib.Path, net: Tree) -> None:
    """Weights as a plain .npz: one array per leaf, named by its path, e.g.
    'params/conv1/kernel'."""
    arrays = {name: np.asarray(value) for name, value in by_name(net).items()}
    write_bytes(pathlib.Path(path), npz_bytes(arrays))


def read_arrays(path: str | pathlib.Path) -> tuple[dict[str, np.ndarray], str]:
    """(arrays by name, the text `about`) of a file that `save_net` or `export` wrote: .npz, or
    flax's .msgpack."""
    packed = pathlib.Path(path).suffix == ".msgpack"
    try:
        if packed:
            from flax.serialization import msgpack_restore

            content = msgpack_restore(pathlib.Path(path).read_bytes())
            arrays = {str(name): np.asarray(value) for name, value in content["arrays"].items()}
            return arrays, str(content["about"])
        with np.load(path, allow_pickle=False) as file:
            about = str(file["about"]) if "about" in file.files else ""
            return {name: file[name] for name in file.files if name != "about"}, about
    except Exception:  # missing, empty, cut or another format: many kinds of errors
        raise UserError(
            f"initial weights '{path}' cannot be read as {'.msgpack' if packed else '.npz'}"
        ) from None


def load_net(path: str | pathlib.Path, like: Tree) -> Tree:
    """Weights written by `save_net` or `export`; must have exactly the shapes of `like`."""
    return fitting(f"initial weights '{path}'", read_arrays(path)[0], like)


def given_net(net: Tree, like: Tree) -> Tree:
    """Weights from the caller; must have exactly the shapes of `like`."""
    try:
        arrays = {name: np.asarray(value) for name, value in by_name(net).items()}
        return fitting("the weights given as net", arrays, like)
    except UserError:
        raise
    except (TypeError, ValueError):
        raise UserError(
            f"the weights given as net are not a tree of arrays but {type(net).__name__}"
        ) from None


def fitting(what: str, stored: Mapping[str, np.ndarray], like: Tree) -> Tree:
    """`stored` as a net with the names, shapes and types of `like`; all numbers must be finite."""
    wanted = by_name(like)
    for name, leaf in wanted.items():
        if name not in stored or stored[name].shape != leaf.shape:
            has = f"has shape {stored[name].shape}" if name in stored else "is missing"
            raise UserError(f"{what}: '{name}' {has}; the model wants shape {leaf.shape}")
        if stored[name].dtype.kind not in "fiub" and str(stored[name].dtype) != str(leaf.dtype):
            raise UserError(
                f"{what}: '{name}' is {stored[name].dtype}; the model wants {leaf.dtype}"
            )
        with np.errstate(over="ignore"):
            if not np.isfinite(stored[name].astype(leaf.dtype).astype(np.float64)).all():
                raise UserError(f"{what}: '{name}' has numbers that are not finite as {leaf.dtype}")
    for name in stored:
        if name not in wanted:
            raise UserError(f"{what}: the model has no '{name}'; it has {', '.join(wanted)}")
    values = [jnp.asarray(stored[name], leaf.dtype) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def checksum(net: Tree) -> str:
    """Eight hex digits over names, types and values."""
    crc = 0
    for name, value in by_name(net).items():
        array = np.ascontiguousarray(np.asarray(value))
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8), crc)  # type: ignore[arg-type]
    return f"{crc:08x}"
