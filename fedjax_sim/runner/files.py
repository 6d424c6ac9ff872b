"""Files that are either whole or not there: written beside the target and renamed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_json(path: pathlib.Path, data: Any) -> None:
    write_bytes(path, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())


def write_csv(path: pathlib.Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    out = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore", restval="")
    out.writeheader()
    out.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_npz(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_bytes(path, buffer.getvalue())


def number(value: Any) -> str:
    """A number as it stands in a CSV: the same text for the same bits, empty for not-a-number."""
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    value = float(value)
    if value != value:
        return ""
    return f"{value + 0.0:.8g}"  # + 0: minus zero is written as zero, as it is read back
