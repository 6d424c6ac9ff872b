"""The files of one run directory; every one is whole or absent."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np

from fedjax_sim import __version__
from fedjax_sim.errors import UserError
from fedjax_sim.runner import figures
from fedjax_sim.runner.config import FORMAT, Config, other_format
from fedjax_sim.runner.files import number, read_csv, write_csv, write_json, write_npz
from fedjax_sim.runner.recorder import Recorder


class RunDirectory:
    """The files of one run; every one is whole or absent."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def check_free(self) -> None:
        if self.path.exists():
            raise UserError(
                f"output directory '{self.path}' exists already; choose another --out, or resume it with "
                f"fedjax-sim resume {self.path}"
            )

    def create(self, config: Config, resolved: dict[str, Any]) -> None:
        self.check_free()
        try:
            self.path.mkdir(parents=True)
        except OSError as problem:
            raise UserError(f"output directory '{self.path}' cannot be made: {problem.strerror}") from None
        self.write_config(config, resolved)

    def write_config(self, config: Config, resolved: dict[str, Any]) -> None:
        write_json(
            self.path / "config.json",
            dict(format=FORMAT, version=__version__, config_hash=config.hash(), config=config.to_json(), resolved=resolved),
        )

    def read_config(self) -> tuple[Config, dict[str, Any], str]:
        try:
            data = json.loads((self.path / "config.json").read_text())
            if int(data["format"]) != FORMAT:
                raise other_format(f"run directory '{self.path}'", data)
            config, resolved, stored = Config.from_json(data["config"]), data["resolved"], data["config_hash"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            if isinstance(problem, UserError):
                raise
            raise UserError(f"'{self.path}' is not a run directory: its config.json cannot be read") from None
        if config.hash() != stored:
            raise UserError(
                f"the configuration in '{self.path}' was changed (hash {config.hash()}, stored {stored}); "
                f"restore config.json to resume"
            )
        return config, resolved, stored

    def write(self, recorder: Recorder, timings: list[dict[str, Any]]) -> None:
        table = lambda rows: [{k: number(v) for k, v in row.items()} for row in rows]
        columns = lambda rows, first: first + sorted({k for row in rows for k in row} - set(first))
        write_csv(self.path / "metrics.csv", columns(recorder.rows, figures.COLUMNS), table(recorder.rows))
        if recorder.rounds:
            write_csv(self.path / "rounds.csv", columns(recorder.rounds, ["round"]), table(recorder.rounds))
        write_csv(self.path / "timings.csv", ["first_round", "last_round", "seconds", "seconds_per_round"], table(timings))
        write_npz(self.path / "clients.npz", recorder.arrays())

    def read(self, recorder: Recorder, round_: int) -> list[dict[str, Any]]:
        """Bring a recorder back to what it was at `round_`."""
        value = lambda text: math.nan if text == "" else int(text) if text.lstrip("-").isdigit() else float(text)
        rows = lambda name: [{k: value(v) for k, v in row.items()} for row in read_csv(self.path / name)]
        try:
            recorder.rows, recorder.rounds = rows("metrics.csv"), rows("rounds.csv")
            timings = [t for t in rows("timings.csv") if t["last_round"] <= round_]
            with np.load(self.path / "clients.npz", allow_pickle=False) as file:
                recorder.clients = {k: [file[k]] if k.endswith("_count") else list(file[k]) for k in file.files}
        except (OSError, ValueError, KeyError) as problem:
            raise UserError(f"'{self.path}' cannot be resumed: {problem}") from None
        recorder.truncate(round_)
        return timings
