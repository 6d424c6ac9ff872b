"""One run directory: its files, and whether they are unchanged. Plain files, no JAX.

Every file is whole or absent. `manifest.json` has size and checksum of every file of the run, and a
checksum of itself; readers use only files that match it (`verified`). A checkpoint keeps a copy of
the rows, and a run is resumed from it: a file that was cut, edited or exchanged is reported and
written again. A run that was killed before its first checkpoint starts over in its directory;
only files that it wrote itself are ever removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_sim import __version__
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import tree
from fedjax_sim.options import shown
from fedjax_sim.runner.files import (
    LOCK,
    PARTIAL,
    Lock,
    checksum,
    csv_bytes,
    csv_rows,
    exists,
    json_bytes,
    npz_bytes,
    number,
    reason,
    stamp,
    value,
    write_bytes,
)

if TYPE_CHECKING:
    from fedjax_sim.runner.figures import Row, Summary
    from fedjax_sim.runner.prepare import Setup
    from fedjax_sim.runner.recorder import Recorder

FORMAT = 4  # of manifests and checkpoints
MANIFEST, CONFIG, SUMMARY = "manifest.json", "config.json", "summary.json"
CHECKPOINTS = "checkpoints"
ROWS = ("metrics.csv", "rounds.csv", "timings.csv", "clients.npz")
FILES = (CONFIG, "labels.npz", *ROWS, SUMMARY)  # everything that a manifest may name
TRIES, PAUSE = 10, 0.2  # a running process writes its rows, and a moment later the manifest


def write_manifest(path: pathlib.Path, stamps: dict[str, dict[str, Any]]) -> None:
    record = dict(format=FORMAT, files=dict(sorted(stamps.items())))
    write_bytes(path / MANIFEST, json_bytes(record | dict(checksum=checksum(record))))


def read_manifest(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """{file: its size and checksum}; ValueError for a manifest that is missing, cut, edited, or
    names other files."""
    try:
        record = json.loads((path / MANIFEST).read_bytes())
        files = {str(name): dict(entry) for name, entry in record["files"].items()}
        right = checksum(record)
        if record.get("checksum", right) != right or not set(files) <= set(FILES):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(MANIFEST) from None
    return files


def changed(path: pathlib.Path) -> list[str]:
    """Files that do not match the manifest, after an edit or a kill between two files; [] without a
    manifest."""
    if not (path / MANIFEST).exists():
        return []
    try:
        stamps = read_manifest(path)
    except ValueError:
        return [MANIFEST]
    return [name for name, entry in stamps.items() if _content(path / name, entry) is None]


def _content(file: pathlib.Path, entry: dict[str, Any]) -> bytes | None:
    """The bytes of a file if they match its entry in the manifest."""
    try:
        found = file.read_bytes() if file.stat().st_size == entry.get("size") else b""
    except (OSError, ValueError):
        return None
    return found if stamp(found) == entry else None


def verified(path: pathlib.Path) -> dict[str, bytes]:
    """The bytes of every file of the run; a UserError names files that do not match the
    manifest."""
    wrong: list[str] = []
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        try:
            found = {
                name: _content(path / name, entry) for name, entry in read_manifest(path).items()
            }
            wrong = [name for name, content in found.items() if content is None]
            wrong += [] if CONFIG in found else [MANIFEST]
        except ValueError:
            found, wrong = {}, [MANIFEST]
        if not wrong:
            return {name: content for name, content in found.items() if content is not None}
        if not (path / LOCK).exists():
            break
    name = shown(str(path), 200)
    if wrong == [MANIFEST] and not (path / MANIFEST).exists():
        raise UserError(f"'{name}' is not a run directory: it has no {MANIFEST}")
    raise UserError(
        f"'{name}' is damaged: {', '.join(wrong)} {'are' if len(wrong) > 1 else 'is'} not as"
        f" written (see {MANIFEST}); fedjax-sim resume writes it again from its checkpoint"
    )


# ---- the progress of a run -----------------------------------------------------------------------
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
    """Whether `path` is a lock or a half-written hidden file of a killed process."""
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(PARTIAL))


def empty(path: pathlib.Path) -> bool:
    """Whether `path` is a directory with nothing but left-overs in it."""
    return path.is_dir() and all(map(leftover, path.iterdir()))


def unfinished(path: pathlib.Path) -> bool:
    """Whether a run was started here and has neither a checkpoint nor a summary."""
    if (
        not (path / CONFIG).is_file()
        or (path / SUMMARY).exists()
        or saved_rounds(path / CHECKPOINTS)
    ):
        return False
    with contextlib.suppress(ValueError):
        return SUMMARY not in read_manifest(path)
    return not (path / MANIFEST).exists()


def clear(path: pathlib.Path) -> list[str]:
    """Remove the files that the program wrote into an unfinished run directory, and nothing else;
    return their names."""
    written = [path / name for name in (*FILES, MANIFEST)]
    left = [p for p in path.iterdir() if leftover(p)]
    removed = [file.name for file in written if file.is_file()]
    for file in (*written, *left):
        if file.is_file() and file.name != LOCK:
            file.unlink()
    with contextlib.suppress(OSError):
        os.rmdir(path / CHECKPOINTS)
    return removed


def clear_checkpoints(folder: pathlib.Path) -> None:
    """Remove half-written and half-deleted checkpoints of killed runs."""
    if folder.is_dir():
        for path in folder.iterdir():
            half = is_checkpoint(path) and not (path / "meta.json").is_file()
            if half or leftover(path):
                shutil.rmtree(path, ignore_errors=True)


# ---- writing and reading one ---------------------------------------------------------------------
class RunDirectory:
    """The files of one run; every one is whole or absent."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.lock = Lock(path)
        self.rows: dict[str, bytes] = {}  # the files of rows, as last written
        self.stamps: dict[str, dict[str, Any]] = {}  # size and checksum of every file
        self.ended: dict[str, Any] | None = None  # the summary, if all rounds were done when opened

    def check_free(self, hash: str) -> None:
        """Refuse a directory in use, except by the same run before its first checkpoint."""
        if not exists(self.path) or empty(self.path):
            return
        if not unfinished(self.path):
            raise UserError(
                f"output directory '{self.path}' exists already; choose another --out, or resume it"
                f" with fedjax-sim resume {self.path}"
            )
        self.check_same(hash)

    def check_same(self, hash: str) -> None:
        """Refuse a directory of another configuration."""
        stored = self.read_config().hash
        if stored != hash:
            raise UserError(
                f"'{self.path}' holds another configuration (hash {stored}, this command:"
                f" {hash}); choose another --out, or repeat the command that started it"
            )

    def create(self, setup: Setup, say: Callable[[str], None] = lambda text: None) -> None:
        """Create and lock the directory, or take it over from a run that was killed before its
        first checkpoint."""
        self.check_free(setup.hash)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(
                f"output directory '{self.path}' cannot be created: {reason(problem)}"
            ) from None
        mine = False
        try:
            self.lock.take()
            self.check_free(setup.hash)  # again, now that it is locked
            mine = True
            clear_checkpoints(self.path / CHECKPOINTS)
            removed = clear(self.path)
            if removed:
                say(
                    f"'{self.path}' had no checkpoint yet and starts over; removed:"
                    f" {', '.join(removed)}"
                )
            self.write_config(setup)
        except BaseException:
            with contextlib.suppress(OSError):
                if mine:
                    clear(self.path)
            self.lock.release()
            with contextlib.suppress(OSError):
                self.path.rmdir()  # if nothing else is in it
            raise

    def open(self) -> None:
        """Lock the directory, and remove half-written files of a killed run."""
        self.lock.take()
        for left in self.path.glob(f".*{PARTIAL}"):
            with contextlib.suppress(OSError):
                left.unlink()

    def read_end(self, rounds: int) -> None:
        """Keep the summary of a run that has ended after `rounds`, if no file was changed."""
        with contextlib.suppress(UserError, ValueError, KeyError, TypeError, RecursionError):
            summary = json.loads(verified(self.path)[SUMMARY])
            self.ended = summary if summary["rounds"] == rounds else None

    # ---- the configuration -----------------------------------------------------------------------
    def write_config(self, setup: Setup) -> None:
        data = dict(
            format=tree.FORMAT,
            version=__version__,
            config_hash=setup.hash,
            experiment=setup.experiment.to_json(),
            found=dataclasses.asdict(setup.found),
            resolved=setup.resolved,
        )
        self.put({"config.json": json_bytes(data | dict(checksum=checksum(data)))})

    def write_labels(self, counts: np.ndarray) -> None:
        """[N, classes]: how many training examples of each class each client has."""
        self.put({"labels.npz": npz_bytes({"label_counts": counts.astype(np.int32)})})

    def read_config(self) -> tree.Stored:
        try:
            data = json.loads((self.path / "config.json").read_text())
            if int(data["format"]) not in (tree.FLAT_FORMAT, tree.FORMAT):
                raise tree.other_format(f"run directory '{self.path}'", data)
            changed = data["checksum"] != checksum(data)
            if not changed:
                experiment, found = tree.read_config(data)
                stored = tree.Stored(experiment, found, dict(data["resolved"]), data["config_hash"])
                changed = experiment.hash(found) != stored.hash
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if empty(self.path):
                raise UserError(
                    f"'{self.path}' is not a run directory: it is empty; repeat the command that"
                    " created it"
                ) from None
            raise UserError(
                f"'{self.path}' is not a run directory: its config.json cannot be read"
            ) from None
        if changed:
            raise UserError(
                f"the configuration in '{self.path}' was changed: config.json does not match its"
                " checksum; restore it to resume"
            )
        return stored

    # ---- rows ------------------------------------------------------------------------------------
    def write(self, recorder: Recorder, timings: list[Row]) -> None:
        table = lambda rows: [{k: number(v) for k, v in row.items()} for row in rows]
        columns = lambda rows, first: first + sorted({k for row in rows for k in row} - set(first))
        rows = {
            "metrics.csv": csv_bytes(columns(recorder.rows, recorder.columns), table(recorder.rows))
        }
        if recorder.rounds:
            rows["rounds.csv"] = csv_bytes(
                columns(recorder.rounds, ["round"]), table(recorder.rounds)
            )
        spans = ["first_round", "last_round", "seconds", "seconds_per_round"]
        rows["timings.csv"] = csv_bytes(spans, table(timings))
        rows["clients.npz"] = npz_bytes(recorder.arrays())
        self.rows = rows
        self.put(rows)

    def write_summary(self, summary: Summary) -> None:
        self.put({"summary.json": json_bytes(summary)})

    def put(self, contents: dict[str, bytes]) -> None:
        """Write the files that changed, then the manifest."""
        fresh = {name: stamp(content) for name, content in contents.items()}
        new = [name for name in fresh if fresh[name] != self.stamps.get(name)]
        for name in new:
            write_bytes(self.path / name, contents[name])
        if new:
            self.stamps |= fresh
            write_manifest(self.path, self.stamps)

    def read(self, recorder: Recorder, files: dict[str, bytes], round_: int) -> list[Row]:
        """Restore a recorder to `round_` from the files kept in the checkpoint; returns the
        timings."""

        def rows(name: str) -> list[Row]:
            lines = csv_rows(files.get(name, b""))
            return [{k: value(v) for k, v in row.items()} for row in lines]

        try:
            recorder.rows, recorder.rounds = rows("metrics.csv"), rows("rounds.csv")
            timings = rows("timings.csv")
            with np.load(io.BytesIO(files["clients.npz"]), allow_pickle=False) as file:
                recorder.clients = {
                    k: [file[k]] if k.endswith("_count") else list(file[k]) for k in file.files
                }
            if [r["round"] for r in recorder.rounds] != list(range(1, round_ + 1)):
                raise ValueError(f"its checkpoint has no rows for all of its {round_} rounds")
        except (OSError, ValueError, KeyError) as problem:
            raise UserError(f"'{self.path}' cannot be resumed: {problem}") from None
        return timings
