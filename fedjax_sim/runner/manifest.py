"""What lies in a run directory, and whether it is as it was written. Reads plain files only, no
JAX.

`manifest.json` has size and checksum of every file of the run, and a checksum of itself. Nobody who
reads a run takes a file that it does not name, or that is not as it says: `verified` hands over
checked bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from typing import Any

from fedjax_sim.errors import UserError
from fedjax_sim.options import shown
from fedjax_sim.runner import lock
from fedjax_sim.runner.files import PARTIAL, checksum, json_bytes, stamp, write_bytes

FORMAT = 4  # of manifests and checkpoints
MANIFEST, CONFIG, SUMMARY, CHECKPOINTS = (
    "manifest.json",
    "config.json",
    "summary.json",
    "checkpoints",
)
ROWS = ("metrics.csv", "rounds.csv", "timings.csv", "clients.npz")
FILES = (CONFIG, "labels.npz", *ROWS, SUMMARY)  # everything that a manifest may name
TRIES, PAUSE = 10, 0.2  # a run that goes on writes its rows, and a moment later the manifest


def write(path: pathlib.Path, stamps: dict[str, dict[str, Any]]) -> None:
    told = dict(format=FORMAT, files=dict(sorted(stamps.items())))
    write_bytes(path / MANIFEST, json_bytes(told | dict(checksum=checksum(told))))


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """File -> its size and checksum; ValueError for a manifest that is not there, cut, edited, or
    of other files."""
    try:
        told = json.loads((path / MANIFEST).read_bytes())
        files = {str(name): dict(entry) for name, entry in told["files"].items()}
        if told.get("checksum", checksum(told)) != checksum(told) or not set(files) <= set(FILES):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(MANIFEST) from None
    return files


def changed(path: pathlib.Path) -> list[str]:
    """Files that are not as the manifest says: after an edit, or a kill between two files; [] where
    nothing was written."""
    if not (path / MANIFEST).exists():
        return []
    try:
        told = read(path)
    except ValueError:
        return [MANIFEST]
    return [name for name, entry in told.items() if _content(path / name, entry) is None]


def _content(file: pathlib.Path, entry: dict[str, Any]) -> bytes | None:
    """The bytes of a file that is as its entry says."""
    try:
        found = file.read_bytes() if file.stat().st_size == entry.get("size") else b""
    except (OSError, ValueError):
        return None
    return found if stamp(found) == entry else None


def verified(path: pathlib.Path) -> dict[str, bytes]:
    """Every file of the run, as the manifest says, or a sentence with those that are not."""
    wrong: list[str] = []
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        try:
            found = {name: _content(path / name, entry) for name, entry in read(path).items()}
            wrong = [name for name, content in found.items() if content is None]
            wrong += [] if CONFIG in found else [MANIFEST]
        except ValueError:
            found, wrong = {}, [MANIFEST]
        if not wrong:
            return {name: content for name, content in found.items() if content is not None}
        if not (path / lock.NAME).exists():
            break
    name = shown(str(path), 200)
    if wrong == [MANIFEST] and not (path / MANIFEST).exists():
        raise UserError(f"'{name}' is not a run directory: it has no {MANIFEST}")
    raise UserError(
        f"'{name}' is damaged: {', '.join(wrong)} {'are' if len(wrong) > 1 else 'is'} not as"
        f" written (see {MANIFEST}); fedjax-sim resume writes it anew from its checkpoint"
    )


# ---- how far a run directory is ------------------------------------------------------------------
def saved_rounds(path: pathlib.Path) -> list[int]:
    """Rounds with a complete checkpoint, ascending; path: a folder of checkpoints."""
    if not path.is_dir():
        return []
    return sorted(
        int(p.name) for p in path.iterdir() if is_checkpoint(p) and (p / "meta.json").is_file()
    )


def is_checkpoint(path: pathlib.Path) -> bool:
    return path.name.isdigit() and len(path.name) >= 8


def leftover(path: pathlib.Path) -> bool:
    """What is hidden and was being written, or the lock, when its process was killed."""
    return path.name == lock.NAME or (path.name.startswith(".") and path.name.endswith(PARTIAL))


def empty(path: pathlib.Path) -> bool:
    """A directory with nothing in it that anybody would miss."""
    return path.is_dir() and all(map(leftover, path.iterdir()))


def unfinished(path: pathlib.Path) -> bool:
    """A run that was begun and has nothing to go on from: neither a checkpoint nor its end."""
    if (
        not (path / CONFIG).is_file()
        or (path / SUMMARY).exists()
        or saved_rounds(path / CHECKPOINTS)
    ):
        return False
    with contextlib.suppress(ValueError):
        return SUMMARY not in read(path)
    return not (path / MANIFEST).exists()


def clear(path: pathlib.Path) -> list[str]:
    """Remove what the program wrote into an unfinished run directory, and nothing else; the names
    of what is gone."""
    own, left = (
        [path / name for name in (*FILES, MANIFEST)],
        [p for p in path.iterdir() if leftover(p)],
    )
    gone = [file.name for file in own if file.is_file()]
    for file in (*own, *left):
        if file.is_file() and file.name != lock.NAME:
            file.unlink()
    with contextlib.suppress(OSError):
        os.rmdir(path / CHECKPOINTS)
    return gone
