"""Class-conditional images from a seed: any shape, number of classes, size and difficulty."""

from __future__ import annotations

import math

import numpy as np

from fedjax_sim.data.arrays import MOST_CLASSES
from fedjax_sim.data.images import interpolation_matrix
from fedjax_sim.data.memory import refuse_if_too_large
from fedjax_sim.data.spec import check_whole
from fedjax_sim.errors import UserError

GRID = 4  # images are smooth fields given by GRID x GRID coefficients per channel
# root mean square distance of two class centres at difficulty 1, in standard deviations
SEPARATION = 4.0
CHUNK = 4096  # examples made at a time: memory stays small for large sets


def generate(
    shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    train: int = 10_000,
    test: int = 2_000,
    difficulty: float = 1.0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x_train, y_train, x_test, y_test (uint8 NHWC, int32), labels balanced to within one example.

    An example of class k is the smooth field with coefficients c_k + difficulty e, e ~ N(0, I),
    plus a little pixel noise; the class centres c_k are Gaussian with root mean square distance
    SEPARATION. So the best possible classifier is linear, and its error grows with `difficulty`,
    whatever the shape.

    >>> x, y, _, _ = generate(shape=(8, 8, 3), classes=3, train=9, test=3)
    >>> x.shape, x.dtype.name, np.bincount(y).tolist()
    ((9, 8, 8, 3), 'uint8', [3, 3, 3])
    """
    _check(shape, classes, train, test, difficulty, seed)
    _refuse_if_too_large(shape, classes, train, test)
    height, width, channels = shape
    rng = np.random.default_rng([seed, 0x5EED])
    rows, columns = min(GRID, height), min(GRID, width)
    centres = rng.standard_normal((classes, rows * columns, channels))
    centres *= SEPARATION / np.sqrt(2 * rows * columns * channels)
    # [H W, coefficients]
    basis = np.kron(interpolation_matrix(rows, height), interpolation_matrix(columns, width))
    basis = (48 / np.hypot(1.0, difficulty) * basis).astype(np.float32)  # pixels keep their range

    def images(y: np.ndarray) -> np.ndarray:
        out = np.empty((len(y), *shape), np.uint8)
        for start in range(0, len(y), CHUNK):
            labels = y[start : start + CHUNK]
            field = centres[labels] + difficulty * rng.standard_normal(
                (len(labels), *centres.shape[1:])
            )
            pixels = basis @ field.astype(np.float32)  # [chunk, H W, C]
            pixels += 128
            # cheap noise, standard deviation 6
            pixels += rng.integers(-10, 11, pixels.shape, np.int8)
            np.rint(np.clip(pixels, 0, 255, out=pixels), out=pixels)
            out[start : start + CHUNK] = pixels.reshape(-1, *shape)
        return out

    def labels(number: int) -> np.ndarray:
        return rng.permutation(np.arange(number) % classes).astype(np.int32)

    y_train, y_test = labels(train), labels(test)
    return images(y_train), y_train, images(y_test), y_test


def _check(
    shape: tuple[int, int, int], classes: int, train: int, test: int, difficulty: float, seed: int
) -> None:
    """Refuse settings outside their ranges."""
    for what, value, least in (
        ("seed", seed, 0),
        ("classes", classes, 1),
        ("train", train, 1),
        ("test", test, 0),
    ):
        check_whole(f"synthetic: {what}", value, least)
    if len(shape) != 3 or min(check_whole("synthetic: a side of shape", n) for n in shape) < 1:
        raise UserError(f"synthetic: shape must be three positive numbers, got {shape}")
    if not 0 < difficulty < 1e6:
        raise UserError(
            f"synthetic: difficulty must be a number above 0 and below 1,000,000, got {difficulty}"
        )
    if classes > MOST_CLASSES:
        raise UserError(f"synthetic: classes={classes} are more than the {MOST_CLASSES} allowed")
    if train < classes:
        raise UserError(
            f"synthetic: train={train} is fewer than one example for each of the {classes} classes"
        )


def _refuse_if_too_large(shape: tuple[int, int, int], classes: int, train: int, test: int) -> None:
    """Images of both sets, one chunk of them in floats, the basis and the centres."""
    pixels, coefficients = math.prod(shape), GRID * GRID
    chunk = min(CHUNK, max(train, test))
    labels = 40 * (train + test)
    total = (
        pixels * (train + test)
        + 8 * chunk * pixels
        + 12 * shape[0] * shape[1] * coefficients
        + labels
    )
    total += 8 * coefficients * shape[2] * (classes + 3 * chunk)
    refuse_if_too_large(
        total,
        f"synthetic: {train} + {test} images of {'x'.join(map(str, shape))}",
        "use fewer or smaller images",
    )
