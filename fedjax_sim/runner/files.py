"""Atomic files (written beside the target and renamed), and locks: one process at a time in a
folder. A file that cannot be written raises a UserError."""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import math
import os
import pathlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import filelock
import numpy as np

from fedjax_sim.errors import UserError

PARTIAL = ".partial"  # suffix of files and folders that are being written
LOCK = ".lock"


def reason(problem: OSError) -> str:
    """The operating system's message.

    >>> reason(OSError(28, "No space left on device"))
    'No space left on device'
    """
    return problem.strerror or str(problem) or type(problem).__name__


def cause(problem: BaseException) -> str:
    """Why a library could not write, in one line: the operating system's message if it is quoted.

    >>> cause(
    ...     ValueError(
    ...         "RESOURCE_EXHAUSTED: Error writing x: Failed to write 3 bytes [os_error_code='28']"
    ...     )
    ... )
    'No space left on device'
    """
    if isinstance(problem, OSError):
        return reason(problem)
    found = re.search(r"os_error_code='(\d+)'", str(problem))
    first = (str(problem).splitlines() or [repr(problem)])[0]
    return os.strerror(int(found[1])) if found else first


def exists(path: pathlib.Path) -> bool:
    """Whether `path` exists; a name that no file can have raises a UserError."""
    try:
        os.fspath(path).encode()  # a lone surrogate has no bytes
        if "\0" in os.fspath(path):
            raise ValueError("it has a null character")
        return path.exists()
    except (OSError, ValueError) as problem:
        why = reason(problem) if isinstance(problem, OSError) else str(problem).splitlines()[0]
        shown = "".join(c if c.isprintable() else "?" for c in str(path)[:100]) + (
            "…" if len(str(path)) > 100 else ""
        )
        raise UserError(f"'{shown}' cannot be the name of a directory: {why}") from None


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    # an unpredictable name, and never an existing file or link
    name = path.parent / f".{path.name[:100]}.{secrets.token_hex(8)}{PARTIAL}"
    try:
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as problem:
        raise UserError(f"'{path}' cannot be written: {reason(problem)}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(problem, OSError):
            raise UserError(f"'{path}' cannot be written: {reason(problem)}") from None
        raise


def json_bytes(data: Any) -> bytes:
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def write_json(path: pathlib.Path, data: Any) -> None:
    write_bytes(path, json_bytes(data))


def checksum(data: Mapping[str, Any]) -> str:
    """Checksum of a record for a JSON file, without its own `checksum`; the order of entries does
    not matter.

    >>> checksum({"a": (1, 2), "b": 0.5}) == checksum({"b": 0.5, "a": [1, 2], "checksum": "…"})
    True
    """
    rest = {k: v for k, v in data.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:32]


def stamp(content: bytes) -> dict[str, Any]:
    """Size and checksum of a file, as in a manifest."""
    return dict(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def csv_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    out = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore", restval="")
    out.writeheader()
    out.writerows(rows)
    return text.getvalue().encode()


def csv_rows(content: bytes) -> list[dict[str, str]]:
    """The rows of a CSV file; ValueError if it is not one."""
    try:
        return list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    except csv.Error as problem:
        raise ValueError(str(problem)) from None


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def number(value: Any) -> str:
    """A number as text for a CSV: the same text for the same bits, empty for NaN."""
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    value = float(value)
    if value != value:
        return ""
    return f"{value + 0.0:.8g}"  # + 0: minus zero is written as zero


def value(text: str) -> int | float:
    """The number that `number` wrote."""
    return math.nan if text == "" else int(text) if text.lstrip("-").isdigit() else float(text)


def as_stored(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it is read back from a CSV, without empty cells.

    >>> as_stored({"round": 3, "global_acc": 0.12345678901, "val_acc": math.nan})
    {'round': 3, 'global_acc': 0.12345679}
    """
    return {name: value(text) for name, text in ((k, number(v)) for k, v in row.items()) if text}


class InUse(UserError):
    """Another process holds the lock."""


class Lock:
    """One process at a time in a folder, from `take` to `release`; both may be called again.

    The system releases it when the process ends, also by a kill: a left-over file does not block.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.file = filelock.FileLock(folder / LOCK, thread_local=False)

    def take(self) -> None:
        if self.file.is_locked:
            return
        try:
            self.file.acquire(timeout=0.1)  # long enough for a holder that is just removing it
        except filelock.Timeout:
            raise InUse(
                f"'{self.folder}' is in use by another process; wait for it to end, or use another"
                " directory"
            ) from None
        except OSError as problem:
            if problem.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a file system without locks
                raise UserError(f"'{self.folder}' cannot be written: {reason(problem)}") from None

    def release(self) -> None:
        if self.file.is_locked:
            with contextlib.suppress(OSError):
                os.unlink(self.file.lock_file)  # before the release: nobody has locked a new one
            self.file.release()
