"""Reading untrusted `.npz` files: nothing is unpickled, and no array is allocated by its header
alone.

A `.npz` is a zip of `.npy` members; each begins with a header that claims a dtype and a shape.
Before an array is made, the claim is compared with the bytes that the member really has, and these
with the file and the free memory.
"""

from __future__ import annotations

import math
import pathlib
import warnings
import zipfile
from collections.abc import Callable
from typing import IO

import numpy as np

from fedjax_sim.data.memory import in_words, refuse_if_too_large
from fedjax_sim.data.spec import shown
from fedjax_sim.errors import UserError

Arrays = dict[str, np.ndarray]
# what NumPy writes -> the most one byte can become
METHODS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1100}
KINDS = "biufUS"  # bool, integers, floats, text: what an example or a fact of it can be
BLOCK = 1 << 24


def read_arrays(path: pathlib.Path, wanted: Callable[[str], bool] = lambda key: True) -> Arrays:
    """The arrays of `path` whose name is `wanted`, in native byte order; a bad file is one
    sentence.

    The broad `except` is the boundary: zipfile, zlib and NumPy's header parser raise a dozen types
    on damaged bytes.
    """
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path, size, wanted)
            total = sum(info.file_size for info in members.values())
            refuse_if_too_large(2 * total, f"'{shown(path)}'", "use fewer or smaller examples")
            return {
                key: _read(archive, info, f"{key} in '{shown(path)}'")
                for key, info in members.items()
            }
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file '{shown(path)}'") from None
    except Exception as error:
        raise UserError(
            f"'{shown(path)}' is not a readable .npz file of plain arrays ({reason(error)})"
        ) from None


def reason(error: BaseException) -> str:
    """The first line of an error, for the brackets of a sentence."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return shown(text.splitlines()[0] if text else type(error).__name__, 120)


def _members(
    archive: zipfile.ZipFile, path: pathlib.Path, size: int, wanted: Callable[[str], bool]
) -> dict:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        key = info.filename.removesuffix(".npy")
        if not wanted(key):
            continue
        where = f"{shown(key)} in '{shown(path)}'"
        if key in members:
            raise UserError(f"{where} is there twice")
        if info.flag_bits & 0x1:
            raise UserError(f"{where} is encrypted; a dataset file is not")
        if info.compress_type not in METHODS:
            raise UserError(
                f"{where} is compressed by method {info.compress_type}; use numpy.savez or"
                " savez_compressed"
            )
        if (
            info.compress_size > size
            or info.file_size > METHODS[info.compress_type] * info.compress_size + 64
        ):
            raise UserError(
                f"{where} claims {in_words(info.file_size)} out of {in_words(info.compress_size)}, "
                f"in a file of {in_words(size)}"
            )
        members[key] = info
    return members


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> np.ndarray:
    """One member as an array. With its last byte zipfile compares the member's checksum."""
    with archive.open(info) as file:
        dtype, shape, fortran = _header(file, where)
        count = math.prod(shape)
        actual = info.file_size - file.tell()
        if count * dtype.itemsize != actual:
            raise UserError(
                f"{where} claims {dtype.str}{list(shape)}, which is"
                f" {in_words(count * dtype.itemsize)}, but holds {in_words(actual)}"
            )
        flat = np.empty(count, dtype)
        raw = flat.view(np.uint8) if count else np.empty(0, np.uint8)
        start = 0
        while start < len(raw):
            block = file.read(min(BLOCK, len(raw) - start))
            if not block:
                raise UserError(f"{where} ends after {in_words(start)} of {in_words(actual)}")
            raw[start : start + len(block)] = np.frombuffer(block, np.uint8)
            start += len(block)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    native = dtype.newbyteorder("=")
    return np.ascontiguousarray(array, native) if shape else array.astype(native)


def _header(file: IO[bytes], where: str) -> tuple[np.dtype, tuple[int, ...], bool]:
    """dtype, shape and order of a `.npy`, checked."""
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        with warnings.catch_warnings():  # headers of Python 2 are read, without a word
            warnings.simplefilter("ignore")
            shape, fortran, dtype = read(file)
    except zipfile.BadZipFile:
        raise
    except Exception:
        raise UserError(f"{where} is not a plain NumPy array (.npy)") from None
    compound = dtype.hasobject or dtype.names or dtype.subdtype
    if compound or dtype.kind not in KINDS or dtype.itemsize == 0:
        raise UserError(
            f"{where} has the dtype {shown(dtype)}; allowed: numbers, bool and text, as plain"
            " arrays"
        )
    if dtype.kind == "f" and dtype.itemsize > 8:
        raise UserError(f"{where} has the dtype {dtype}; allowed floats: float16, float32, float64")
    if min(shape, default=0) < 0 or len(shape) > 8:
        raise UserError(f"{where} claims the shape {shown(list(shape))}")
    return dtype, tuple(int(n) for n in shape), bool(fortran)
