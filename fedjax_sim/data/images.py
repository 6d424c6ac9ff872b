"""The image operations the sources need: bilinear resizing and rounding, in NumPy."""

from __future__ import annotations

import numpy as np


def interpolation_matrix(old: int, new: int) -> np.ndarray:
    """[new, old] weights of linear interpolation with pixel centres at (i + 1/2), clamped at the
    border.

    >>> interpolation_matrix(2, 4).tolist()
    [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]]
    """
    centre = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.minimum(centre.astype(int), max(old - 2, 0))
    weight = centre - low
    matrix = np.zeros((new, old))
    matrix[np.arange(new), low] += 1 - weight
    matrix[np.arange(new), np.minimum(low + 1, old - 1)] += weight
    return matrix


def resize_bilinear(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """[n, H, W, C] -> [n, height, width, C] float (no antialiasing)."""
    x = np.tensordot(interpolation_matrix(x.shape[1], height), x, (1, 1))  # [height, n, W, C]
    x = np.tensordot(interpolation_matrix(x.shape[2], width), x, (1, 2))  # [width, height, n, C]
    return np.ascontiguousarray(x.transpose(2, 1, 0, 3))


def to_uint8(x: np.ndarray) -> np.ndarray:
    """Rounded and clipped to 0..255."""
    return np.rint(np.clip(x, 0, 255)).astype(np.uint8)
