"""Controllers of the package, trained across federations: `--start-from pretrained:NAME:agent`.
Each is a small .npz: arrays by their names in a State, and `about`: its command and scores."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

from fedjax_sim.errors import lookup

FOLDER = pathlib.Path(__file__).parent


def names() -> dict[str, pathlib.Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.npz"))}


def read(name: str) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
    """(its file, its arrays by name)."""
    path = lookup("pretrained controller", name, names())
    with np.load(path, allow_pickle=False) as file:
        return path, {key: file[key] for key in file.files if key != "about"}


def about(name: str) -> dict[str, Any]:
    """Its command, the federations it was trained on, its scores on others."""
    with np.load(lookup("pretrained controller", name, names()), allow_pickle=False) as file:
        return json.loads(str(file["about"]))
