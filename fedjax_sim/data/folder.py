"""Reading datasets from disk: plain `.npz`, idx `.gz`, and datasets that tensorflow-datasets has
prepared.

Every reader returns `{"x_train", "y_train", "x_test", "y_test", ...}` as arrays, or None where
there is nothing to read. Nothing here ever unpickles.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_sim.data.memory import refuse_if_too_large
from fedjax_sim.data.npz import read_arrays, reason
from fedjax_sim.data.spec import shown
from fedjax_sim.errors import UserError

Arrays = dict[str, np.ndarray]
DATA_VARIABLE = "FEDJAX_SIM_DATA"
KEYS = ("x_train", "y_train", "x_test", "y_test")
IDX_FILES = {
    "x_train": "train-images-idx3-ubyte.gz",
    "y_train": "train-labels-idx1-ubyte.gz",
    "x_test": "t10k-images-idx3-ubyte.gz",
    "y_test": "t10k-labels-idx1-ubyte.gz",
}
# the package dataset-fashion-mnist
DEBIAN_FOLDERS = {"fashion_mnist": "/usr/share/datasets/fashion-mnist"}
TFDS_NAMES = ("mnist", "fashion_mnist", "cifar10", "cifar100", "omniglot")


def data_folder(data_dir: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """The data folder: the argument, else the environment variable FEDJAX_SIM_DATA, else none."""
    chosen = data_dir if data_dir is not None else os.environ.get(DATA_VARIABLE) or None
    if chosen is None:
        return None
    folder = user_path(chosen)
    if not exists(folder, pathlib.Path.is_dir):
        raise UserError(f"the data folder '{shown(chosen)}' does not exist")
    return folder


def user_path(text: str | os.PathLike[str]) -> pathlib.Path:
    """A path as the user wrote it, with `~` replaced; one sentence where there is no such user."""
    try:
        return pathlib.Path(text).expanduser()
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"'{shown(text)}' is not a path ({reason(error)})") from None


def exists(path: pathlib.Path, kind: Callable[[pathlib.Path], bool] = pathlib.Path.is_file) -> bool:
    """Whether there is such a file or folder; a name that no file can have (too long, a zero byte)
    does not exist."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def read_named(name: str, data_dir: str | os.PathLike[str] | None, download: bool) -> Arrays:
    """The arrays of a named dataset: data folder, then where Debian puts it, then
    tensorflow-datasets."""
    folder = data_folder(data_dir)
    if folder is not None:
        if exists(folder / f"{name}.npz"):
            return read_npz(folder / f"{name}.npz")
        for inside in (folder / name, folder / name.replace("_", "-")):
            if exists(inside / IDX_FILES["x_train"]):
                return read_idx_folder(inside)
    if name in DEBIAN_FOLDERS and exists(pathlib.Path(DEBIAN_FOLDERS[name]) / IDX_FILES["x_train"]):
        return read_idx_folder(pathlib.Path(DEBIAN_FOLDERS[name]))
    if name in TFDS_NAMES:
        arrays = read_tfds(name, folder, download)
        if arrays is not None:
            return arrays
    raise missing(name, folder)


def missing(name: str, folder: pathlib.Path | None) -> UserError:
    """One sentence with the ways to get a dataset."""
    place = f"the data folder '{shown(folder)}'" if folder else "the folder named by --data-dir"
    ways = [f"put {name}.npz with {', '.join(KEYS)} into {place}"]
    if name in DEBIAN_FOLDERS:
        ways.append("install Debian's dataset-" + name.replace("_", "-"))
    elif name == "mnist":
        ways.append("put its four idx .gz files into the subfolder mnist there")
    elif folder is None:
        ways.append(f"set {DATA_VARIABLE} to a folder that has that file")
    else:
        ways.append("name another folder with --data-dir")
    if name in TFDS_NAMES:
        ways.append(
            "let tensorflow-datasets fetch it with --download (pip install 'fedjax-sim[prepare]')"
        )
    else:
        ways.append("pass the path of a .npz file of your own as the dataset")
    return UserError(f"the dataset {name} is not here; three ways to get it: " + "; or ".join(ways))


def read_npz(path: pathlib.Path) -> Arrays:
    """The arrays of a `.npz` with at least x_train, y_train, x_test, y_test, and all others named
    KEY_train, KEY_test."""
    names: list[str] = []

    def wanted(key: str) -> bool:
        names.append(key)
        return key.endswith(("_train", "_test"))

    arrays = read_arrays(path, wanted)
    absent = [key for key in KEYS if key not in arrays]
    if absent:
        raise UserError(
            f"'{shown(path)}' lacks {', '.join(absent)}: a dataset file has the arrays "
            f"{', '.join(KEYS)}; it has {shown(', '.join(sorted(names))) or 'none'}"
        )
    return arrays


def read_idx(path: pathlib.Path) -> np.ndarray:
    """One idx file of unsigned bytes, gzipped or not: 0, 0, 8 (uint8), ndim, big-endian sizes,
    data."""
    try:
        with path.open("rb") as start:
            zipped = start.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped or path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != b"\0\0\x08":
                raise UserError(f"'{shown(path)}' is not an idx file of unsigned bytes")
            sizes = file.read(4 * head[3])
            shape = [int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4)]
            expected = math.prod(shape)
            if len(sizes) < 4 * head[3] or expected > 1100 * path.stat().st_size:
                # gzip packs at most 1,032 bytes into one
                raise UserError(
                    f"'{shown(path)}' is not an idx file: it claims the shape {shown(shape)}"
                )
            refuse_if_too_large(2 * expected, f"'{shown(path)}'", "use fewer examples")
            raw = file.read(expected + 1)
    except FileNotFoundError:
        raise UserError(f"there is no file '{shown(path)}'") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"'{shown(path)}' is not a readable gzip file") from None
    if len(raw) != expected:
        found = f"{len(raw)}" if len(raw) < expected else "more"
        raise UserError(f"'{shown(path)}' should hold {expected} bytes of data but holds {found}")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def read_idx_folder(folder: pathlib.Path) -> Arrays:
    """The four idx files of a folder, gzipped or unpacked."""
    plain = {key: folder / file.removesuffix(".gz") for key, file in IDX_FILES.items()}
    return {
        key: read_idx(plain[key] if exists(plain[key]) else folder / file)
        for key, file in IDX_FILES.items()
    }


def read_tfds(name: str, folder: pathlib.Path | None, download: bool) -> Arrays | None:
    """A dataset prepared by tensorflow-datasets, read without TensorFlow; prepared first if
    `download`."""
    default = user_path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    roots = filter(None, (folder, default))
    found = [sorted((root / name).glob("**/dataset_info.json")) for root in roots]
    prepared = [info.parent for infos in found for info in infos]
    if not prepared and not download:
        return None
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise UserError(
            f"reading {name} through tensorflow-datasets needs: pip install 'fedjax-sim[tfds]'"
        )
    import tensorflow_datasets as tfds

    if prepared:
        return _read_prepared(tfds, name, prepared[-1])
    return _read_prepared(
        tfds, name, pathlib.Path(_prepare(tfds, name, folder or default).data_dir)
    )


def _read_prepared(tfds: Any, name: str, place: pathlib.Path) -> Arrays:
    """The broad `except` is the boundary: damaged records raise errors of many libraries."""
    arrays: Arrays = {}
    try:
        builder = tfds.builder_from_directory(place)
        for split in ("train", "test"):
            source = builder.as_data_source(split=split)
            records = [source[i] for i in range(len(source))]
            for key in records[0]:
                if key != "id":
                    arrays[f"{_TFDS_KEYS.get(key, key)}_{split}"] = np.stack(
                        [record[key] for record in records]
                    )
        return {key: arrays[key] for key in KEYS} | arrays
    except Exception as error:
        raise UserError(
            f"{name} at '{shown(place)}' cannot be read ({reason(error)}); prepare it again with"
            " file_format='array_record'"
        ) from None


_TFDS_KEYS = {"image": "x", "label": "y"}


def _prepare(tfds: Any, name: str, root: pathlib.Path) -> Any:
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            f"downloading {name} needs TensorFlow to prepare it: pip install 'fedjax-sim[prepare]'"
        )
    try:
        builder = tfds.builder(name, data_dir=str(root), file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:
        # network, disk and checksum errors of many types, all of them the user's to see
        raise UserError(f"could not download and prepare {name} ({reason(error)})") from error
    return builder
