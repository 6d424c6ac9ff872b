"""Golden arrays of the data tests:  python tests/golden/make_data.py  writes data_resize.npz with
PyTorch.

`torch.nn.functional.interpolate(mode="bilinear")`, without antialiasing, of random images in
float64: what `fedjax_sim.data.images.resize_bilinear` must equal. With `digits` as argument it
writes the embedded digits, fedjax_sim/data/digits.npz, from scikit-learn's copy of the UCI set (see
`digits` below).
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
# (old height, width) -> (new height, width)
RESIZES = (((8, 8), (28, 28)), ((16, 16), (28, 28)), ((7, 5), (3, 9)))
USPS = 6  # images of 16x16 in the test of usps


def resize_input(old: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).random((3, *old, 2))


def usps_input() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (USPS, 16, 16), dtype=np.uint8)


def with_torch(x: np.ndarray, new: tuple[int, int]) -> np.ndarray:
    """[n, H, W, C] -> [n, *new, C], by PyTorch in float64."""
    import torch

    planes = torch.tensor(np.asarray(x, np.float64)).permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(planes, new, mode="bilinear").permute(0, 2, 3, 1).numpy()


def resized() -> dict[str, np.ndarray]:
    arrays = {f"{old[0]}x{old[1]}": with_torch(resize_input(old), new) for old, new in RESIZES}
    return arrays | {"usps": with_torch(usps_input()[..., None], (28, 28))[..., 0]}


def digits() -> dict[str, np.ndarray]:
    """The embedded digits: 8x8 levels 0..16, labels, which are test images, and where 127.5 was
    rounded down.

    They were first resized by floating-point matrix products, where a value of exactly 127.5 fell
    to either side; these pixels are listed, so that the exact arithmetic of today gives the same
    images on every machine.
    """
    from sklearn.datasets import load_digits

    from fedjax_sim.data.digits import enlarged
    from fedjax_sim.data.images import resize_bilinear, to_uint8

    data = load_digits()
    y = data.target
    order = np.random.default_rng(0).permutation(len(y))  # fixed: the split is part of the dataset
    place = np.zeros(len(y), int)  # place of each example inside its class, in random order
    for k in range(10):
        members = order[y[order] == k]
        place[members] = np.arange(len(members))
    levels = data.images.astype(np.uint8)
    floating = to_uint8(resize_bilinear(data.images[..., None] * (255.0 / 16.0), 28, 28))
    low = np.flatnonzero(floating != enlarged(levels))
    assert (floating.reshape(-1)[low] == 127).all()
    return {
        "levels": levels,
        "y": y.astype(np.uint8),
        "is_test": place % 5 == 4,
        "low": low.astype(np.uint32),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["digits"]:
        np.savez_compressed(HERE.parents[1] / "fedjax_sim" / "data" / "digits.npz", **digits())
    else:
        np.savez_compressed(HERE / "data_resize.npz", **resized())
