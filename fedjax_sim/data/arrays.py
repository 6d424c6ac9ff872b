"""Checks of images, labels and other arrays, with error messages for users. No JAX here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedjax_sim.data.spec import shown
from fedjax_sim.errors import UserError
from fedjax_sim.tasks import CLASS, LABELS, REAL, TOKENS, task_called

MOST_CLASSES = 100_000  # a table of clients x classes must stay a table
BLOCK = 1 << 22  # values looked at together: no copy of a large pool
FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


def check_images(x: Any, what: str, least: int = 1) -> np.ndarray:
    """Images as [D, H, W, C] uint8 or float, native bytes, finite; D >= `least`.

    [D, H, W] gets a channel. A table [D, F] becomes [D, 1, 1, F], so that its features are
    normalised one by one as channels are. bool becomes 0 and 255, which is 0 and 1 after scaling.

    >>> check_images(np.zeros((5, 3)), "x").shape, int(
    ...     check_images(np.ones((5, 2, 2), bool), "x").max()
    ... )
    ((5, 1, 1, 3), 255)
    """
    x = _plain(x, what)
    if x.ndim == 2:
        x = x[:, None, None, :]
    elif x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or len(x) < least or min(x.shape[1:]) < 1:
        raise UserError(
            f"{what} must be images [D, H, W] or [D, H, W, C], or a table [D, F], with D >= {least}"
            f" and no side of 0, got shape {shown(x.shape)}"
        )
    if x.dtype == bool:
        x = x.astype(np.uint8) * np.uint8(255)
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    if x.dtype != np.uint8 and x.dtype not in FLOATS:
        raise UserError(
            f"{what} must be uint8 or floating point (float16, float32, float64) or bool, got"
            f" {shown(x.dtype)}"
        )
    if x.dtype != np.uint8:
        _refuse_non_finite(x, what)
    return x


def check_labels(y: Any, what: str) -> np.ndarray:
    """Labels as [D] int32, from 0 to below MOST_CLASSES."""
    y = _plain(y, what)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise UserError(
            f"{what} must be a vector of integer labels >= 0, got {shown(y.dtype)} of shape"
            f" {y.shape}"
        )
    if len(y) and (y.min() < 0 or y.max() >= MOST_CLASSES):
        wrong = np.flatnonzero((y < 0) | (y >= MOST_CLASSES))[0]
        raise UserError(
            f"{what} must be integer labels >= 0 and below {MOST_CLASSES}, but row {wrong} has"
            f" {y[wrong]}"
        )
    return y.astype(np.int32)


def check_inputs(x: Any, what: str, task: str, least: int = 1) -> np.ndarray:
    """Images or a table as `check_images` has them; tokens [D, T] as int32: whole numbers that are
    not uint8, or any whole numbers of a sequence task.

    >>> check_inputs(np.array([[3, 1]]), "x", "sequence").dtype.name, check_inputs(
    ...     np.ones((1, 2)), "x", "regression"
    ... ).shape
    ('int32', (1, 1, 1, 2))
    """
    x = _plain(x, what)
    if (
        x.dtype.kind not in "iu"
        or x.ndim != 2
        or (x.dtype == np.uint8 and task_called(task).target != TOKENS)
    ):
        return check_images(x, what, least)
    if len(x) < least or x.shape[1] < 1:
        raise UserError(
            f"{what} must be tokens [D, T] with D >= {least} and T >= 1, got shape {shown(x.shape)}"
        )
    return _ids(x, what, 0)


def check_targets(y: Any, what: str, task: str) -> np.ndarray:
    """Targets of a task: classes [D] int32, numbers [D, K] float32, labels [D, K] uint8, or tokens
    [D, T] int32 with −1 where a place does not count."""
    target = task_called(task).target
    if target == CLASS:
        return check_labels(y, what)
    y = _plain(y, what)
    if target == TOKENS:
        if y.ndim != 2 or y.dtype.kind not in "iu":
            raise UserError(
                f"{what} must be tokens [D, T], -1 where none counts, got {shown(y.dtype)} of shape"
                f" {y.shape}"
            )
        return _ids(y, what, -1)
    y = y[:, None] if y.ndim == 1 else y
    if y.ndim != 2 or y.shape[1] < 1 or y.dtype.kind not in "biuf":
        raise UserError(
            f"{what} must be numbers [D] or [D, K] for task {task}, got {shown(y.dtype)} of shape"
            f" {y.shape}"
        )
    if target == REAL:
        y = y.astype(np.float64 if y.dtype == np.float64 else np.float32)
        _refuse_non_finite(y, what)
        return y
    if not np.isin(y, (0, 1)).all():
        wrong = np.argwhere(~np.isin(y, (0, 1)))[0]
        raise UserError(
            f"{what} must be 0 or 1 for every label, but row {wrong[0]} has {y[tuple(wrong)]} at"
            f" {wrong[1]}"
        )
    return y.astype(np.uint8)


def _ids(values: np.ndarray, what: str, least: int) -> np.ndarray:
    if values.size and (values.min() < least or values.max() >= MOST_CLASSES):
        wrong = values[(values < least) | (values >= MOST_CLASSES)][0]
        raise UserError(
            f"{what} must be tokens from {least} to {MOST_CLASSES - 1}, but has {wrong}"
        )
    return values.astype(np.int32)


def outputs_of(task: str, x: np.ndarray, y: np.ndarray) -> int:
    """What a model of these data has to tell apart: classes, numbers, labels, or tokens."""
    target = task_called(task).target
    if target in (REAL, LABELS):
        return int(y.shape[1])
    return max(int(y.max(initial=-1)), int(x.max()) if target == TOKENS and x.ndim == 2 else -1) + 1


def place_in_class(y: np.ndarray, order: np.ndarray) -> np.ndarray:
    """[n] how many examples of its class come before each example, in this order of all.

    >>> place_in_class(np.array([5, 7, 5]), np.arange(3)).tolist()
    [0, 0, 1]
    """
    order = order[np.argsort(y[order], kind="stable")]
    _, start, count = np.unique(y[order], return_index=True, return_counts=True)
    place = np.empty(len(y), int)
    place[order] = np.arange(len(y)) - np.repeat(start, count)
    return place


def blocks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, some rows) after each other, each block of about BLOCK values."""
    step = max(1, BLOCK // max(1, x[:1].size))
    for start in range(0, len(x), step):
        yield start, x[start : start + step]


def _plain(value: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except Exception as error:  # ragged lists, objects with an __array__ of their own
        raise UserError(f"{what} is not an array ({shown(error)})") from None
    if array.dtype.hasobject or array.dtype.names:
        raise UserError(f"{what} must be a plain array of numbers, got {shown(array.dtype)}")
    return array


def _refuse_non_finite(x: np.ndarray, what: str) -> None:
    """One NaN would make mean and std NaN, and with them every weight; beyond float32 is infinite
    in training."""
    largest = np.finfo(np.float32).max
    for start, block in blocks(x):
        good = np.abs(block) <= largest if block.dtype == np.float64 else np.isfinite(block)
        if not good.all():
            row, *place = (int(i) for i in np.argwhere(~good)[0])
            raise UserError(
                f"{what} must be finite, but row {start + row} has {block[(row, *place)]} (as"
                f" float32) at {place}"
            )
