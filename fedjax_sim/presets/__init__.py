"""The settings of published experiments, by name: `fedjax-sim run --preset NAME`. One file per
paper.

method = "NAME"              the paper's method, the default
[common]                     settings of all of its presets; "METHOD.OPTION" is for that method
                             only, e.g. a baseline. OPTION may also be a setting of the run, e.g.
                             "fedfomo.val_fraction"
[presets.NAME]               about, and the settings that differ
"""

from __future__ import annotations

import importlib.resources
import tomllib
from typing import Any, NamedTuple

from fedjax_sim.errors import lookup

PARTS = ("model", "loss")  # their options are for every method


class Preset(NamedTuple):
    name: str
    method: str
    help: str
    settings: dict[str, Any]

    def of(self, method: str) -> dict[str, Any]:
        """Its settings for a run of `method`, without options of other methods.

        >>> PRESETS["fedpam-mnist"].of("fedavg") == PRESETS["fedpam-mnist"].of("fedpam")
        False
        >>> PRESETS["fedpam-mnist"].of("ditto")["ditto.lam"]
        1.0
        """
        concerns = lambda name: "." not in name or name.partition(".")[0] in (method, *PARTS)
        return {name: value for name, value in self.settings.items() if concerns(name)}


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
