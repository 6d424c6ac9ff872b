"""Class-conditional images from a seed: any shape, number of classes, size and difficulty."""
from __future__ import annotations

import numpy as np

from fedjax_sim.data.images import interpolation_matrix
from fedjax_sim.errors import UserError

GRID = 4            # images are smooth fields given by GRID x GRID coefficients per channel
SEPARATION = 4.0    # mean distance of two class centres at difficulty 1, in standard deviations of an example
CHUNK = 4096        # examples made at a time: memory stays small for large sets


def generate(
    shape: tuple[int, int, int] = (28, 28, 1), classes: int = 10, train: int = 10_000, test: int = 2_000,
    difficulty: float = 1.0, seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x_train, y_train, x_test, y_test (uint8 NHWC, int32), labels balanced to within one example.

    An example of class k is the smooth field with coefficients c_k + difficulty e, e ~ N(0, I), plus a little pixel
    noise; the class centres c_k ~ N(0, s^2 I) have mean distance SEPARATION. So the best possible classifier is linear
    and its error grows with `difficulty`, whatever the shape.

    >>> x, y, _, _ = generate(shape=(8, 8, 3), classes=3, train=9, test=3)
    >>> x.shape, x.dtype.name, np.bincount(y).tolist()
    ((9, 8, 8, 3), 'uint8', [3, 3, 3])
    """
    height, width, channels = shape
    if train < classes:
        raise UserError(f"synthetic: train={train} is fewer than one example for each of the {classes} classes")
    rng = np.random.default_rng([seed, 0x5EED])
    rows, columns = min(GRID, height), min(GRID, width)
    coefficients = rows * columns * channels
    centres = rng.standard_normal((classes, rows, columns, channels)) * SEPARATION / np.sqrt(2 * coefficients)
    up, across = (interpolation_matrix(rows, height).astype(np.float32),
                  interpolation_matrix(columns, width).astype(np.float32))

    def images(y: np.ndarray) -> np.ndarray:
        out = np.empty((len(y), *shape), np.uint8)
        for start in range(0, len(y), CHUNK):
            labels = y[start : start + CHUNK]
            field = centres[labels] + difficulty * rng.standard_normal((len(labels), *centres.shape[1:]))
            field = field.astype(np.float32) / np.float32(np.hypot(1.0, difficulty))  # pixels keep their range
            smooth = np.einsum("ha,nabc,wb->nhwc", up, field, across, optimize=True)
            noise = rng.standard_normal(smooth.shape, np.float32)
            out[start : start + CHUNK] = np.clip(np.rint(128 + 48 * smooth + 6 * noise), 0, 255)
        return out

    def labels(number: int) -> np.ndarray:
        return rng.permutation(np.arange(number) % classes).astype(np.int32)

    y_train, y_test = labels(train), labels(test)
    return images(y_train), y_train, images(y_test), y_test
