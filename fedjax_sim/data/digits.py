"""The embedded digits: 1,797 handwritten digits of 13 people, 8x8 pixels with levels 0..16, shown
as 28x28.

They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0), in the order in
which scikit-learn distributes them. `digits.npz` holds the levels, the labels and a fixed
stratified split (a fifth of each class for testing).
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from fedjax_sim.data.images import interpolation_matrix

FILE = pathlib.Path(__file__).with_name("digits.npz")


def enlarged(levels: np.ndarray) -> np.ndarray:
    """Levels 0..16 [n, 8, 8] -> uint8 [n, 28, 28, 1]: bilinear, times 255/16, rounded, in integers
    (halves go up).

    From 8 to 28 pixels all interpolation weights are fourteenths, so the sums are exact on every
    machine.
    """
    weights = np.rint(14 * interpolation_matrix(8, 28)).astype(np.int32)  # [28, 8]
    # [n, 28, 28], 14 * 14 times the interpolated level
    sums = weights @ levels.astype(np.int32) @ weights.T
    denominator = 14 * 14 * 16
    return ((255 * sums + denominator // 2) // denominator).astype(np.uint8)[..., None]


@functools.lru_cache(maxsize=1)
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images [1797, 28, 28, 1] uint8, labels [1797] int32, is_test [1797] bool; read-only, made
    once.

    `low` lists the pixels of exactly 127.5 that are 127 and not 128: the images were once made in
    floating point, and a seed must keep giving the same results.
    """
    with np.load(FILE, allow_pickle=False) as file:
        x, y, is_test = enlarged(file["levels"]), file["y"].astype(np.int32), file["is_test"]
        x.reshape(-1)[file["low"]] = 127
    for array in (x, y, is_test):
        array.flags.writeable = False
    return x, y, is_test
