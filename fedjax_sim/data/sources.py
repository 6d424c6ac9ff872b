"""Datasets by name: arrays in memory, uint8 NHWC, with an official train and test set."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedjax_sim.data import synthetic as synthetic_images
from fedjax_sim.data.images import resize_bilinear
from fedjax_sim.data.spec import Converter, image_shape, parse_options, positive_float, positive_int, split_spec
from fedjax_sim.errors import UserError, unknown


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images and labels as published. `extra` holds per-example facts over train then test (domain, drawer, ...)."""

    name: str
    x_train: np.ndarray  # [n, H, W, C] uint8 (or float)
    y_train: np.ndarray  # [n] int32
    x_test: np.ndarray   # [m, H, W, C]
    y_test: np.ndarray   # [m] int32
    classes: int
    mean: np.ndarray | None = None  # [C]; None: computed from the clients' training rows
    std: np.ndarray | None = None   # [C]
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [n + m]


@functools.lru_cache(maxsize=1)
def _digits_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    x = resize_bilinear(data.images[..., None] * (255.0 / 16.0), 28, 28)  # 8x8 grey levels 0..16
    x = np.rint(np.clip(x, 0, 255)).astype(np.uint8)
    y = data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(y))
    rank = np.zeros(len(y), int)  # place of each example inside its class, in random order
    for k in range(10):
        members = order[y[order] == k]
        rank[members] = np.arange(len(members))
    is_test = rank % 5 == 4
    for array in (x, y, is_test):
        array.flags.writeable = False
    return x, y, is_test


def digits() -> Dataset:
    """scikit-learn's embedded handwritten digits (1,797 real images), 28x28x1, fixed stratified 80/20 split."""
    x, y, is_test = _digits_arrays()
    return Dataset("digits", x[~is_test], y[~is_test], x[is_test], y[is_test], 10)


def synthetic(**options: Any) -> Dataset:
    x_train, y_train, x_test, y_test = synthetic_images.generate(**options)
    return Dataset("synthetic", x_train, y_train, x_test, y_test, options.get("classes", 10))


@dataclasses.dataclass(frozen=True)
class Source:
    """A registered dataset: how to load it and one line of help."""

    help: str
    make: Callable[..., Dataset]
    options: Mapping[str, Converter] = dataclasses.field(default_factory=dict)


DATASETS: dict[str, Source] = {
    "digits": Source("scikit-learn's handwritten digits, 28x28x1, 10 classes, 1,442 + 355 images, embedded", digits),
    "synthetic": Source(
        "class-conditional images from a seed; synthetic:shape=32x32x3,classes=10,train=50000,test=1000,difficulty=1.0",
        synthetic,
        {"shape": image_shape, "classes": positive_int, "train": positive_int, "test": positive_int,
         "difficulty": positive_float, "seed": int}),
}


def load(name: str, data_dir: str | None = None, download: bool = False, **options: Any) -> Dataset:
    """A dataset by name, by spec string (`synthetic:classes=5`), or by the path of a `.npz` file.

    >>> data = load("digits")
    >>> data.x_train.shape, data.x_test.shape, data.classes
    ((1442, 28, 28, 1), (355, 28, 28, 1), 10)
    """
    base, body = split_spec(name)
    if base not in DATASETS:
        raise unknown("dataset", name, DATASETS)
    source = DATASETS[base]
    written = parse_options(name, body, source.options, None)
    for key in options:
        if key not in source.options:
            raise UserError(f"the dataset {base} has no option '{key}'; allowed: {', '.join(source.options) or 'none'}")
    return source.make(**{**written, **options})
