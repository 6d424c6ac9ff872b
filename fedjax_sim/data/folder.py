"""Reading datasets from disk: plain `.npz`, idx `.gz`, and datasets that tensorflow-datasets has prepared.

Every reader returns `{"x_train", "y_train", "x_test", "y_test", ...}` as arrays, or None where there is
nothing to read. Nothing here ever unpickles.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import pathlib
import zipfile
import zlib
from typing import Any

import numpy as np

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
DEBIAN_FOLDERS = {"fashion_mnist": "/usr/share/datasets/fashion-mnist"}  # the package dataset-fashion-mnist
TFDS_NAMES = ("mnist", "fashion_mnist", "cifar10", "cifar100", "omniglot")


def data_folder(data_dir: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """The data folder: the argument, else the environment variable FEDJAX_SIM_DATA, else none."""
    chosen = data_dir if data_dir is not None else os.environ.get(DATA_VARIABLE) or None
    if chosen is None:
        return None
    folder = pathlib.Path(chosen).expanduser()
    if not folder.is_dir():
        raise UserError(f"the data folder '{chosen}' does not exist")
    return folder


def read_named(name: str, data_dir: str | os.PathLike[str] | None, download: bool) -> Arrays:
    """The arrays of a named dataset: data folder, then where Debian puts it, then tensorflow-datasets."""
    folder = data_folder(data_dir)
    if folder is not None:
        if (folder / f"{name}.npz").is_file():
            return read_npz(folder / f"{name}.npz")
        for inside in (folder / name, folder / name.replace("_", "-")):
            if (inside / IDX_FILES["x_train"]).is_file():
                return read_idx_folder(inside)
    if name in DEBIAN_FOLDERS and (pathlib.Path(DEBIAN_FOLDERS[name]) / IDX_FILES["x_train"]).is_file():
        return read_idx_folder(pathlib.Path(DEBIAN_FOLDERS[name]))
    if name in TFDS_NAMES:
        arrays = read_tfds(name, folder, download)
        if arrays is not None:
            return arrays
    raise missing(name, folder)


def missing(name: str, folder: pathlib.Path | None) -> UserError:
    """One sentence with the ways to get a dataset."""
    place = f"the data folder '{folder}'" if folder is not None else "the folder named by --data-dir"
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
        ways.append("let tensorflow-datasets fetch it with --download (pip install 'fedjax-sim[prepare]')")
    else:
        ways.append("pass the path of a .npz file of your own as the dataset")
    return UserError(f"the dataset {name} is not here; three ways to get it: " + "; or ".join(ways))


def read_npz(path: pathlib.Path) -> Arrays:
    """All arrays of a plain `.npz` with at least x_train, y_train, x_test, y_test."""
    try:
        with np.load(path, allow_pickle=False) as file:
            absent = [key for key in KEYS if key not in file.files]
            if absent:
                raise UserError(
                    f"'{path}' lacks {', '.join(absent)}: a dataset file has the arrays "
                    f"{', '.join(KEYS)}; it has {', '.join(sorted(file.files)) or 'none'}"
                )
            return {key: file[key] for key in file.files}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"'{path}' is not a readable .npz file of plain arrays ({reason})") from None


def read_idx(path: pathlib.Path) -> np.ndarray:
    """One gzipped idx file of unsigned bytes: 0, 0, 8 (uint8), ndim, big-endian sizes, data."""
    try:
        with gzip.open(path) as file:
            raw = file.read()
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'") from None
    except (OSError, EOFError, zlib.error):
        raise UserError(f"'{path}' is not a readable gzip file") from None
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise UserError(f"'{path}' is not an idx file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if len(raw) - start != int(np.prod(shape)):
        raise UserError(f"'{path}' should hold {int(np.prod(shape))} bytes of data but holds {len(raw) - start}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_idx_folder(folder: pathlib.Path) -> Arrays:
    return {key: read_idx(folder / file) for key, file in IDX_FILES.items()}


def read_tfds(name: str, folder: pathlib.Path | None, download: bool) -> Arrays | None:
    """A dataset prepared by tensorflow-datasets, read without TensorFlow; prepared first if `download`."""
    default = pathlib.Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    prepared = [
        info.parent
        for root in (folder, default)
        if root is not None
        for info in sorted((root / name).glob("**/dataset_info.json"))
    ]
    if not prepared and not download:
        return None
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise UserError(f"reading {name} through tensorflow-datasets needs: pip install 'fedjax-sim[tfds]'")
    import tensorflow_datasets as tfds

    if prepared:
        builder = tfds.builder_from_directory(prepared[-1])
    else:
        builder = _prepare(tfds, name, folder or default)
    try:
        sources = {split: builder.as_data_source(split=split) for split in ("train", "test")}
    except (NotImplementedError, ImportError) as error:
        raise UserError(
            f"{name} at '{builder.data_dir}' cannot be read ({str(error).splitlines()[0]}); "
            f"prepare it with file_format='array_record'"
        ) from None
    arrays: Arrays = {}
    for split, source in sources.items():
        records = [source[i] for i in range(len(source))]
        for key in records[0]:
            if key != "id":
                arrays[f"{_TFDS_KEYS.get(key, key)}_{split}"] = np.stack([record[key] for record in records])
    return arrays


_TFDS_KEYS = {"image": "x", "label": "y"}


def _prepare(tfds: Any, name: str, root: pathlib.Path) -> Any:
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(f"downloading {name} needs TensorFlow to prepare it: pip install 'fedjax-sim[prepare]'")
    try:
        builder = tfds.builder(name, data_dir=str(root), file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:  # network, disk and checksum errors of many types, all of them the user's to see
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"could not download and prepare {name} ({reason})") from error
    return builder
