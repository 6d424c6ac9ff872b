"""Pack the result of `train --over` as a controller of the package (`presets.controllers`)."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from fedjax_sim.runner.files import npz_bytes, write_bytes

KEPT = ("over", "held_out")  # of result.json


def pack(folder: pathlib.Path, path: pathlib.Path, command: str) -> None:
    """Write the policy in `folder` to `path`, with its command and its scores."""
    result = json.loads((folder / "result.json").read_text())
    about = {"command": command, **{name: result[name] for name in KEPT}}
    about |= {name: result["baseline"][name] for name in ("lr", "schedule")}
    arrays = {
        result["parts"]: np.asarray(result["parameters"], np.float32),
        "about": np.array(json.dumps(about)),
    }
    write_bytes(path, npz_bytes(arrays))
