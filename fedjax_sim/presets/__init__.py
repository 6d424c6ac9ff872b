"""The settings of published experiments, by name: `fedjax-sim run --preset NAME`. One file per
paper; read with the package.

method = "NAME"              the paper's method, run where no other is named
[common]                     settings of all of its presets; "METHOD.OPTION" is for that method
                             alone
[presets.NAME]               about, and what differs
"""

from __future__ import annotations

import importlib.resources
import tomllib
from typing import Any, NamedTuple

from fedjax_sim.errors import lookup


class Preset(NamedTuple):
    name: str
    method: str
    help: str
    settings: dict[str, Any]

    def of(self, method: str) -> dict[str, Any]:
        """What it sets for a run of `method`: not the options of the paper's own method, unless it
        is that.

        >>> PRESETS["fedpam-mnist"].of("fedavg") == PRESETS["fedpam-mnist"].of("fedpam")
        False
        """
        return {
            k: v
            for k, v in self.settings.items()
            if method == self.method or not k.startswith(f"{self.method}.")
        }


def _read() -> dict[str, Preset]:
    out = {}
    files = (f for f in importlib.resources.files(__name__).iterdir() if f.name.endswith(".toml"))
    for file in sorted(files, key=lambda f: f.name):
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, own in data["presets"].items():
            settings = {**data["common"], **{k: v for k, v in own.items() if k != "about"}}
            out[name] = Preset(name, data["method"], own["about"], settings)
    return out


PRESETS: dict[str, Preset] = _read()


def preset(name: str) -> Preset:
    return lookup("preset", name, PRESETS)
