"""The files of one run directory; every one is whole or absent.

`manifest.json` has the size and checksum of every file. The checkpoints keep copies of the rows as
they were, so a run goes on from those: a file that was cut, edited or exchanged is said and written
anew. A run that was killed before its first checkpoint is begun again in its directory; nothing is
ever removed there but what it wrote itself.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_sim import __version__
from fedjax_sim.errors import UserError
from fedjax_sim.experiment.tree import FLAT_FORMAT, FORMAT, Stored, other_format, read_config
from fedjax_sim.runner import checkpoint, manifest
from fedjax_sim.runner.files import (
    PARTIAL,
    checksum,
    csv_bytes,
    exists,
    json_bytes,
    npz_bytes,
    number,
    reason,
    stamp,
    value,
    write_bytes,
)
from fedjax_sim.runner.lock import Lock
from fedjax_sim.runner.recorder import Recorder

if TYPE_CHECKING:
    from fedjax_sim.runner.prepare import Setup


class RunDirectory:
    """The files of one run; every one is whole or absent."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.lock = Lock(path)
        self.rows: dict[str, bytes] = {}  # the files of rows, as last written
        self.stamps: dict[str, dict[str, Any]] = {}  # size and checksum of every file
        self.ended: dict[str, Any] | None = (
            None  # the summary of a run that had all of its rounds when it was opened
        )

    def check_free(self, hash: str) -> None:
        """Nothing is there, or nothing but what the same run left before its first checkpoint."""
        if not exists(self.path) or manifest.empty(self.path):
            return
        if not manifest.unfinished(self.path):
            raise UserError(
                f"output directory '{self.path}' exists already; choose another --out, or resume it"
                f" with fedjax-sim resume {self.path}"
            )
        self.check_same(hash)

    def check_same(self, hash: str) -> None:
        """What was begun here is the run whose configuration has this hash."""
        stored = self.read_config().hash
        if stored != hash:
            raise UserError(
                f"'{self.path}' holds another configuration (hash {stored}, this command:"
                f" {hash}); choose another --out, or repeat the command that began it"
            )

    def create(self, setup: Setup, say: Callable[[str], None] = lambda text: None) -> None:
        """Make it, or take it over from a run that had not come to its first checkpoint, and keep
        others out."""
        self.check_free(setup.hash)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(
                f"output directory '{self.path}' cannot be made: {reason(problem)}"
            ) from None
        mine = False
        try:
            self.lock.take()
            self.check_free(setup.hash)  # again: nobody else changes it now
            mine = True
            checkpoint.clear(self.path / manifest.CHECKPOINTS)
            gone = manifest.clear(self.path)
            if gone:
                say(
                    f"'{self.path}' had no checkpoint yet and begins again; removed what it had:"
                    f" {', '.join(gone)}"
                )
            self.write_config(setup)
        except BaseException:
            with contextlib.suppress(OSError):
                if mine:
                    manifest.clear(self.path)
            self.lock.release()
            with contextlib.suppress(OSError):
                self.path.rmdir()  # if nothing else is in it
            raise

    def open(self) -> None:
        """Keep others out, and clear what a killed run left half-written."""
        self.lock.take()
        for left in self.path.glob(f".*{PARTIAL}"):
            with contextlib.suppress(OSError):
                left.unlink()

    def read_end(self, rounds: int) -> None:
        """Keep the summary of a run that has ended after `rounds`, if every file is as it was
        written."""
        with contextlib.suppress(UserError, ValueError, KeyError, TypeError, RecursionError):
            told = json.loads(manifest.verified(self.path)[manifest.SUMMARY])
            self.ended = told if told["rounds"] == rounds else None

    # ---- the configuration -----------------------------------------------------------------------
    def write_config(self, setup: Setup) -> None:
        data = dict(
            format=FORMAT,
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

    def read_config(self) -> Stored:
        try:
            data = json.loads((self.path / "config.json").read_text())
            if int(data["format"]) not in (FLAT_FORMAT, FORMAT):
                raise other_format(f"run directory '{self.path}'", data)
            changed = data["checksum"] != checksum(data)
            if not changed:
                experiment, found = read_config(data)
                stored = Stored(experiment, found, dict(data["resolved"]), data["config_hash"])
                changed = experiment.hash(found) != stored.hash
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as problem:
            if isinstance(problem, UserError):
                raise
            if manifest.empty(self.path):
                raise UserError(
                    f"'{self.path}' is not a run directory: it is empty; repeat the command that"
                    " made it"
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
    def write(self, recorder: Recorder, timings: list[dict[str, Any]]) -> None:
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

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.put({"summary.json": json_bytes(summary)})

    def put(self, contents: dict[str, bytes]) -> None:
        """Write what is new, then the manifest."""
        fresh = {name: stamp(content) for name, content in contents.items()}
        new = [name for name in fresh if fresh[name] != self.stamps.get(name)]
        for name in new:
            write_bytes(self.path / name, contents[name])
        if new:
            self.stamps |= fresh
            manifest.write(self.path, self.stamps)

    def read(
        self, recorder: Recorder, files: dict[str, bytes], round_: int
    ) -> list[dict[str, Any]]:
        """Bring a recorder back to what it was at `round_`, from the rows that the checkpoint kept;
        returns the timings."""

        def rows(name: str) -> list[dict[str, Any]]:
            lines = (
                csv.DictReader(io.StringIO(files[name].decode(), newline=""))
                if name in files
                else ()
            )
            return [{k: value(v) for k, v in row.items()} for row in lines]

        try:
            recorder.rows, recorder.rounds, timings = (
                rows("metrics.csv"),
                rows("rounds.csv"),
                rows("timings.csv"),
            )
            with np.load(io.BytesIO(files["clients.npz"]), allow_pickle=False) as file:
                recorder.clients = {
                    k: [file[k]] if k.endswith("_count") else list(file[k]) for k in file.files
                }
            if [r["round"] for r in recorder.rounds] != list(range(1, round_ + 1)):
                raise ValueError(f"its checkpoint has no rows for all of its {round_} rounds")
        except (OSError, ValueError, KeyError) as problem:
            raise UserError(f"'{self.path}' cannot be resumed: {problem}") from None
        return timings
