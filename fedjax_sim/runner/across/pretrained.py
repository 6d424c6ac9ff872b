"""What `train --over` left, as a controller that comes with the package (`presets.controllers`)."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from fedjax_sim.runner.files import npz_bytes, write_bytes

KEPT = ("over", "held_out")  # of result.json


def pack(folder: pathlib.Path, path: pathlib.Path, command: str) -> None:
    """Writes the policy of `folder` to `path`, with the command that made it and what it won."""
    result = json.loads((folder / "result.json").read_text())
    about = {"command": command, **{name: result[name] for name in KEPT}}
    about |= {name: result["baseline"][name] for name in ("lr", "schedule")}
    arrays = {
        result["parts"]: np.asarray(result["parameters"], np.float32),
        "about": np.array(json.dumps(about)),
    }
    write_bytes(path, npz_bytes(arrays))
