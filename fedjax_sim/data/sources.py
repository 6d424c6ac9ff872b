"""Datasets by name: arrays in memory, uint8 NHWC, with an official train and test set."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedjax_sim.data import digits, frames, tables
from fedjax_sim.data import synthetic as synthetic_images
from fedjax_sim.data import text as texts
from fedjax_sim.data.arrays import (
    check_inputs,
    check_labels,
    check_targets,
    outputs_of,
    place_in_class,
)
from fedjax_sim.data.folder import KEYS, exists, read_idx_folder, read_named, read_npz, user_path
from fedjax_sim.data.images import resize_bilinear, to_uint8
from fedjax_sim.data.npz import reason
from fedjax_sim.data.pictures import picture_size, read_pictures
from fedjax_sim.data.spec import (
    Converter,
    image_shape,
    natural,
    parse_options,
    positive_float,
    positive_int,
    shown,
    split_spec,
)
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.named import first_sentence
from fedjax_sim.tasks import task_of

Folder = str | os.PathLike[str] | None


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images and labels as published; `extra` has facts of every example, train then test (domain,
    ...)."""

    name: str
    x_train: np.ndarray  # [n, H, W, C] uint8 (or float)
    y_train: np.ndarray  # [n] int32
    x_test: np.ndarray  # [m, H, W, C]
    y_test: np.ndarray  # [m] int32
    classes: int
    # [C] after scaling; None: computed from the clients' training rows
    mean: np.ndarray | None = None
    std: np.ndarray | None = None  # [C]
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [n + m]
    columns: str = ""  # of a table: which is what
    task: str = "classification"
    vocabulary: tuple[str, ...] = ()  # of tokens


@dataclasses.dataclass(frozen=True)
class Source:
    """A registered dataset: how to make it from (data_dir, download, **options), and one line of
    help."""

    help: str
    make: Callable[..., Dataset]
    options: Mapping[str, Converter] = dataclasses.field(default_factory=dict)
    by_path: bool = False  # all that follows NAME: is the path


# ---- without any files ------------------------------------------------------------


def _digits(data_dir: Folder, download: bool) -> Dataset:
    x, y, is_test = digits.arrays()
    return Dataset("digits", x[~is_test], y[~is_test], x[is_test], y[is_test], 10)


def _synthetic(data_dir: Folder, download: bool, **options: Any) -> Dataset:
    x_train, y_train, x_test, y_test = synthetic_images.generate(**options)
    return Dataset("synthetic", x_train, y_train, x_test, y_test, options.get("classes", 10))


def _text_dataset(name: str, found: texts.Windows) -> Dataset:
    test = found.is_test
    order = np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)])
    parts = found.x[~test], found.y[~test], found.x[test], found.y[test]
    data = Dataset(name, *parts, len(found.vocabulary), extra={"client": found.client[order]})
    return dataclasses.replace(data, task="sequence", vocabulary=found.vocabulary)


def _plays(data_dir: Folder, download: bool, **options: Any) -> Dataset:
    return _text_dataset("plays", texts.read(texts.PLAYS, **options))


def _text_file(data_dir: Folder, download: bool, path: str = "") -> Dataset:
    file, options = texts.parse(path)
    where = user_path(file)
    return _text_dataset(shown(where.stem), texts.read(where, **options))


# ---- published datasets ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Published:
    """What is known of a published dataset: shape of an image as the models see it, classes, mean
    and std."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


PUBLISHED: dict[str, Published] = {
    "mnist": Published((28, 28, 1), 10, (0.1307,), (0.3081,)),
    "fashion_mnist": Published((28, 28, 1), 10, (0.2860,), (0.3530,)),
    "cifar10": Published((32, 32, 3), 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Published((32, 32, 3), 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cinic10": Published((32, 32, 3), 10, (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
    "tiny_imagenet": Published(
        (64, 64, 3), 200, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    ),
    "usps": Published((28, 28, 1), 10, (0.5,), (0.5,)),
    "mnist_m": Published((28, 28, 3), 10, (0.5,) * 3, (0.5,) * 3),
    "omniglot": Published((105, 105, 1), 50, (0.0,), (1.0,)),  # ink 1 on paper 0
}


def _published(
    name: str, data_dir: Folder, download: bool, train: int | None = None, test: int | None = None
) -> Dataset:
    facts = PUBLISHED[name]
    arrays = _checked(name, read_named(name, data_dir, download))
    if name == "omniglot":
        arrays = _omniglot(arrays)
    elif name == "usps":  # 16x16
        arrays |= {k: to_uint8(resize_bilinear(arrays[k], 28, 28)) for k in ("x_train", "x_test")}
    elif name == "mnist_m":  # MNIST padded by 2 to 32x32: the middle is the digit
        large = [k for k in ("x_train", "x_test") if arrays[k].shape[1:3] == (32, 32)]
        arrays |= {k: arrays[k][:, 2:-2, 2:-2] for k in large}
    data = _from_arrays(name, arrays, facts.classes)
    if data.x_train.dtype != np.uint8 or data.x_train.shape[1:] != facts.shape:
        raise UserError(
            f"{name} should have uint8 images of shape {facts.shape}, but its file has "
            f"{data.x_train.dtype} images of shape {data.x_train.shape[1:]}"
        )
    return dataclasses.replace(
        subset(data, train, test), mean=np.array(facts.mean), std=np.array(facts.std)
    )


def subset(data: Dataset, train: int | None = None, test: int | None = None) -> Dataset:
    """`train` and `test` examples of a dataset, None for all: always the same ones, and fewer are
    among more.

    >>> few, more = (subset(load("digits"), train=n) for n in (5, 50))
    >>> len(few.y_train), len(few.y_test), all(
    ...     any((x == y).all() for y in more.x_train) for x in few.x_train
    ... )
    (5, 355, True)
    """
    keep = []
    for part, wanted, y in (("train", train, data.y_train), ("test", test, data.y_test)):
        if wanted is not None and wanted > len(y):
            raise UserError(
                f"{data.name} has {len(y)} {part} examples, not {wanted}; allowed: {part}=1 to"
                f" {part}={len(y)}"
            )
        some = np.random.default_rng(len(y)).permutation(len(y))[:wanted]
        keep.append(np.arange(len(y)) if wanted is None else np.sort(some))
    a, b = keep
    both = np.concatenate([a, len(data.y_train) + b])
    return dataclasses.replace(
        data,
        x_train=data.x_train[a],
        y_train=data.y_train[a],
        x_test=data.x_test[b],
        y_test=data.y_test[b],
        extra={key: values[both] for key, values in data.extra.items()},
    )


def _omniglot(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Label = alphabet (50); the character and the drawing's number 0..19 stay as extras."""
    out: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        if f"alphabet_{split}" not in arrays:
            raise UserError(
                f"omniglot needs the array alphabet_{split} beside its images: the label of a"
                " drawing is its alphabet"
            )
        x, character = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.shape[-1] > 1:  # tensorflow-datasets: black ink on white, three equal channels
            x = (x[..., :1] < 128).astype(np.uint8)
        if x.max(initial=0) <= 1:
            x = x * np.uint8(255)
        drawer = arrays.get(f"drawer_{split}")
        if drawer is None:
            # drawers are not linked across alphabets: any order of the 20 drawings will do
            drawer = place_in_class(character, np.arange(len(character))).astype(np.int32)
        else:
            drawer = check_labels(drawer, f"omniglot: drawer_{split}")
            drawer -= drawer.min(initial=1)
        out |= {f"x_{split}": x, f"y_{split}": arrays[f"alphabet_{split}"]}
        out |= {f"drawer_{split}": drawer, f"character_{split}": character}
    return out


def _mnist_star(data_dir: Folder, download: bool) -> Dataset:
    """MNIST (domain 0), USPS (1) and MNIST-M (2) together, all 28x28x3."""
    domains = [_published(name, data_dir, download) for name in ("mnist", "usps", "mnist_m")]

    def joined(field: str) -> np.ndarray:
        parts = [getattr(d, field) for d in domains]
        if field.startswith("x"):
            parts = [np.broadcast_to(p, (*p.shape[:3], 3)) for p in parts]
        return np.concatenate(parts)

    domain = [
        np.repeat(np.arange(3, dtype=np.int32), [len(getattr(d, f"y_{split}")) for d in domains])
        for split in ("train", "test")
    ]
    half = np.full(3, 0.5)
    extra = {"domain": np.concatenate(domain)}
    x_train, y_train, x_test, y_test = map(joined, KEYS)
    return Dataset("mnist_star", x_train, y_train, x_test, y_test, 10, half, half, extra)


def _checked(
    name: str, arrays: Mapping[str, np.ndarray], task: str = "classification"
) -> dict[str, np.ndarray]:
    """The arrays with inputs and targets [n, …] of the task that fit each other."""
    out = dict(arrays)
    for split in ("train", "test"):
        out[f"x_{split}"] = check_inputs(
            arrays[f"x_{split}"], f"{name}: x_{split}", task, least=split == "train"
        )
        out[f"y_{split}"] = check_targets(arrays[f"y_{split}"], f"{name}: y_{split}", task)
        x, y = out[f"x_{split}"], out[f"y_{split}"]
        if len(x) != len(y):
            kind = "integer labels" if task == "classification" else "targets"
            raise UserError(
                f"{name}: x_{split} has {len(x)} examples, but y_{split} has {len(y)} {kind}"
            )
    x_train, x_test = out["x_train"], out["x_test"]
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise UserError(
            f"{name}: training images {x_train.dtype}{list(x_train.shape[1:])} and test images "
            f"{x_test.dtype}{list(x_test.shape[1:])} differ"
        )
    return out


def _from_arrays(
    name: str, arrays: Mapping[str, np.ndarray], classes: int | None = None
) -> Dataset:
    """Checked arrays as a Dataset; other pairs KEY_train, KEY_test with one entry per example are
    extras."""
    task = (
        "classification" if classes is not None else task_of(arrays["x_train"], arrays["y_train"])
    )
    arrays = _checked(name, arrays, task)
    length = {split: arrays[f"y_{split}"].shape[:1] for split in ("train", "test")}
    both = [np.concatenate([arrays[f"{part}_train"], arrays[f"{part}_test"]]) for part in "xy"]
    top = outputs_of(task, *both) - 1
    if classes is not None and top >= classes:
        raise UserError(f"{name}: labels go up to {top}, but should go from 0 to {classes} - 1")
    keys = {k.removesuffix("_train") for k in arrays if k.endswith("_train")} - {"x", "y"}
    extra: dict[str, np.ndarray] = {}
    for key in sorted(keys):
        train, test = arrays[f"{key}_train"], arrays.get(f"{key}_test")
        if test is not None and (train.shape, test.shape) == (length["train"], length["test"]):
            extra[key] = np.concatenate([train, test])
    x_train, y_train, x_test, y_test = (arrays[key] for key in KEYS)
    most = classes or top + 1
    return Dataset(name, x_train, y_train, x_test, y_test, most, extra=extra, task=task)


def _at(
    kind: str, read: Callable[..., Mapping[str, np.ndarray]], resizes: bool = False
) -> Callable[..., Dataset]:
    """The maker of a dataset that is a folder of the user's; resizes: `read` takes the size that
    all are to have."""

    def make(data_dir: Folder, download: bool, path: str = "") -> Dataset:
        folder, more = user_path(path), {}
        if (
            resizes
            and not exists(folder, pathlib.Path.is_dir)
            and (match := re.fullmatch(r"(.*),size=([^,]*)", path))
        ):
            folder, more = user_path(match[1]), {"size": picture_size(match[2])}
        if not path or not exists(folder, pathlib.Path.is_dir):
            hint = f", or {kind}:FOLDER,size=32 to resize its pictures" if resizes else ""
            raise UserError(f"'{shown(path)}' is not a folder; write {kind}:FOLDER{hint}")
        try:
            return _from_arrays(shown(folder.resolve().name), read(folder, **more))
        except OSError as error:
            raise UserError(f"'{shown(path)}' cannot be read ({reason(error)})") from None

    return make


def _named(name: str, help: str) -> Source:
    return Source(
        help, functools.partial(_published, name), {"train": positive_int, "test": positive_int}
    )


DATASETS: dict[str, Source] = {
    "digits": Source(
        "UCI's optical handwritten digits, 28x28x1, 10 classes, 1,442 + 355 images, embedded",
        _digits,
    ),
    "synthetic": Source(
        "class-conditional:"
        " synthetic:shape=32x32x3,classes=10,train=50000,test=1000,difficulty=1.0,seed=0",
        _synthetic,
        {
            "shape": image_shape,
            "classes": positive_int,
            "train": positive_int,
            "test": positive_int,
            "difficulty": positive_float,
            "seed": natural,
        },
    ),
    "plays": Source(
        "next character in scenes by Shakespeare, 18 speakers, 78,000 characters, embedded;"
        " options window, unit",
        _plays,
        {"window": positive_int, "unit": texts.unit},
    ),
    "text": Source(
        "text:PATH, a text file per client, a play, or a .csv with a speaker",
        _text_file,
        by_path=True,
    ),
    "mnist": _named("mnist", "handwritten digits, 28x28x1, 10 classes, 60,000 + 10,000"),
    "fashion_mnist": _named("fashion_mnist", "clothes, 28x28x1, 10 classes, 60,000 + 10,000"),
    "cifar10": _named("cifar10", "photographs, 32x32x3, 10 classes, 50,000 + 10,000"),
    "cifar100": _named("cifar100", "photographs, 32x32x3, 100 classes, 50,000 + 10,000"),
    "cinic10": _named("cinic10", "photographs, 32x32x3, 10 classes, 90,000 + 90,000"),
    "tiny_imagenet": _named("tiny_imagenet", "photographs, 64x64x3, 200 classes, 100,000 + 10,000"),
    "usps": _named(
        "usps", "handwritten digits, 16x16 resized to 28x28x1, 10 classes, 7,291 + 2,007"
    ),
    "mnist_m": _named(
        "mnist_m", "MNIST over photographs, 28x28x3, 10 classes, about 59,000 + 9,000"
    ),
    "omniglot": _named(
        "omniglot", "drawn characters, 105x105x1, 50 alphabets, 19,280 + 13,180, 20 drawers"
    ),
    "mnist_star": Source(
        "MNIST + USPS + MNIST-M, all 28x28x3, 10 classes, three domains", _mnist_star
    ),
    "folder": Source(
        "folder:PATH, pictures in one subfolder per class; folder:PATH,size=32 or size=32x48"
        " (height x width) resizes them",
        _at("folder", read_pictures, resizes=True),
        by_path=True,
    ),
    "idx": Source(
        "idx:PATH, four idx files in MNIST's format, gzipped or not",
        _at("idx", read_idx_folder),
        by_path=True,
    ),
}


def register_dataset(name: str, make: Callable[[], Any], help: str = "") -> None:
    """Register a dataset of your own by name: make() -> (x_train, y_train, x_test, y_test), or a
    `Dataset`."""

    def load_it(data_dir: Folder, download: bool) -> Dataset:
        given = make()
        if isinstance(given, Dataset):
            return dataclasses.replace(given, name=name)
        if not isinstance(given, (tuple, list)) or len(given) != 4:
            raise UserError(
                f"dataset '{name}' must be made as (x_train, y_train, x_test, y_test), not"
                f" {type(given).__name__}"
            )
        return _from_arrays(name, dict(zip(KEYS, map(np.asarray, given), strict=True)))

    DATASETS[name] = Source(help or first_sentence(make), load_it)


def load(
    name: str | os.PathLike[str], data_dir: Folder = None, download: bool = False, **options: Any
) -> Dataset:
    """A dataset by name, by spec string (`synthetic:classes=5`, `folder:PATH`), or by the path of a
    `.npz` or `.csv` file.

    data_dir: where the published datasets are (`NAME.npz`, or the idx files in a subfolder), else
    the environment variable FEDJAX_SIM_DATA. download: allow tensorflow-datasets to fetch it. A
    `.npz` has x_train, y_train, x_test, y_test; other pairs like domain_train, domain_test become
    `extra["domain"]`. Columns of a `.csv` are named by
    `FILE.csv:label=…,client=…,split=…,features=A+B`, or by these keywords; see `tables.read_csv`.

    >>> data = load("digits")
    >>> data.x_train.shape, data.x_test.shape, data.classes
    ((1442, 28, 28, 1), (355, 28, 28, 1), 10)
    >>> load("synthetic:shape=8x8x3,classes=3,train=30,test=6").x_train.shape
    (30, 8, 8, 3)
    """
    text = _text(name)
    base, body = split_spec(text)
    if base not in DATASETS and frames.is_frame(text):
        file, written = frames.parse(text)
        path = user_path(file)
        arrays, columns = frames.read_frame(path, {**written, **options})
        return dataclasses.replace(_from_arrays(shown(path.stem), arrays), columns=columns)
    if base not in DATASETS and is_csv(text):
        return _table(text, options)
    if base not in DATASETS and text.endswith(".npz"):
        path = user_path(text)
        return _from_arrays(shown(path.stem), read_npz(_without_options(text, path, options)))
    if base not in DATASETS:
        known = [*DATASETS, "the path of a .npz, .csv or .parquet file"]
        raise unknown("dataset", shown(text), known)
    source = DATASETS[base]
    if source.by_path:
        return source.make(data_dir, download, path=body)
    written = parse_options(text, body, source.options, None)
    for key in options:
        if key not in source.options:
            raise UserError(
                f"the dataset {base} has no option '{shown(key)}'; allowed:"
                f" {', '.join(source.options) or 'none'}"
            )
    return source.make(data_dir, download, **{**written, **options})


def is_csv(text: str) -> bool:
    """
    >>> is_csv("a/b.csv"), is_csv("b.csv:label=ill,client=ward"), is_csv("digits"), is_csv(
    ...     "a.csv/b.npz"
    ... )
    (True, True, False, False)
    """
    return text.endswith(".csv") or ".csv:" in text


def _table(text: str, options: Mapping[str, Any]) -> Dataset:
    file, _, body = text.partition(".csv:")
    file = file if file.endswith(".csv") else f"{file}.csv"
    written = parse_options(text, body, tables.OPTIONS, None)
    for key in options:
        if key not in tables.OPTIONS:
            raise unknown(f"option of '{shown(text)}'", shown(key), tables.OPTIONS)
    path = user_path(file)
    arrays, columns = tables.read_csv(path, **{**options, **written})
    return dataclasses.replace(_from_arrays(shown(path.stem), arrays), columns=columns)


def _text(name: str | os.PathLike[str]) -> str:
    try:
        return str(os.fspath(name))
    except TypeError:
        raise UserError(f"a dataset is a name or a path, got {shown(repr(name))}") from None


def _without_options(text: str, path: pathlib.Path, options: Mapping[str, Any]) -> pathlib.Path:
    if options:
        raise UserError(
            f"the dataset '{shown(text)}' has no option '{shown(next(iter(options)))}'; allowed:"
            " none"
        )
    return path
