"""Values computed by PyTorch: stored ones where torch is not installed, live ones where it is, and
then both agree."""

from __future__ import annotations

import functools
import importlib
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent


@functools.cache
def torch_values(name: str, tolerance: float = 1e-9) -> dict[str, np.ndarray]:
    """{what: array} of `make_<name>.py`, inputs and results, never skipped.

    With torch installed the generator runs again, and the file beside it must hold the same within
    `tolerance`.
    """
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        stored = {key: file[key] for key in file.files}
    try:
        import torch  # noqa: F401
    except ImportError:
        return stored
    live = importlib.import_module(f"golden.make_{name}").values()
    again = (
        f"tests/golden/{name}.npz is not what PyTorch says now; check why, then run"
        f" tests/golden/make_{name}.py"
    )
    assert set(live) == set(stored), again
    for key in live:
        np.testing.assert_allclose(
            live[key], stored[key], rtol=tolerance, atol=tolerance, err_msg=f"{key}: {again}"
        )
    return live


def write(name: str, values: dict[str, np.ndarray]) -> None:
    """For the generators: `<name>.npz` beside them."""
    file = FOLDER / f"{name}.npz"
    np.savez_compressed(file, **values)  # type: ignore[arg-type]
    print(f"{file.name}: {len(values)} arrays, {file.stat().st_size / 1024:.0f} kB")
