"""A `.csv` table as a dataset: a label column, facts about each row (its client, its split), and numbers as features."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Sequence

import numpy as np

from fedjax_sim.data.memory import refuse_if_too_large
from fedjax_sim.data.npz import Arrays, reason
from fedjax_sim.data.spec import shown
from fedjax_sim.errors import UserError

LABELS = ("label", "y")
SPLIT = "split"
FACTS = ("client", "user", "group", "domain", "id")  # never features, even where they are numbers
HELD_OUT = 5  # without a split column, every fifth row of each class (in a fixed random order) is for testing


def read_csv(path: pathlib.Path) -> Arrays:
    """x_*, y_* and one pair FACT_train, FACT_test for every column that is not a feature.

    The first line names the columns; they are separated by commas, semicolons or tabs. `label` or `y`: whole numbers
    from 0 up, or words, which are numbered in alphabetical order; other numbers are a target of regression. `split`
    (optional): train or test. Columns of words and those called client, user, group, domain or id are
    facts. All others are features, float32 [n, F].
    """
    try:
        refuse_if_too_large(20 * path.stat().st_size, f"'{shown(path)}'", "use a .npz file")
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
            names = [name.strip() for name in next(lines, [])]
            rows = [row for row in lines if row]
    except FileNotFoundError:
        raise UserError(f"there is no file '{shown(path)}'") from None
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"'{shown(path)}' is not a readable .csv file ({reason(error)})") from None
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise UserError(f"'{shown(path)}': row {number} has {len(row)} cells, but there are {len(names)} columns")
    doubled = [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
    if doubled or not rows:
        what = f"has the column '{shown(doubled[0])}' twice" if doubled else "has no rows below its header"
        raise UserError(f"'{shown(path)}' {what}")
    return _arrays(shown(path), dict(zip(names, zip(*rows, strict=True), strict=True)))


def _arrays(where: str, columns: dict[str, Sequence[str]]) -> Arrays:
    found = [name for name in LABELS if name in columns]
    if len(found) != 1:
        raise UserError(f"'{where}' needs one column called label or y; it has {shown(', '.join(columns))}")
    y = _classes(where, columns.pop(found[0]))
    split = columns.pop(SPLIT, None)
    is_test = held_out(y) if split is None else _is_test(where, split)
    numbers = {name: None if name in FACTS else _numbers(where, name, cells) for name, cells in columns.items()}
    features = [values for values in numbers.values() if values is not None]
    if not features:
        raise UserError(f"'{where}' has no column of numbers that could be a feature; it has {shown(', '.join(numbers))}")
    x = np.stack(features, axis=1)  # [n, F]
    facts = {name: _fact(columns[name]) for name, values in numbers.items() if values is None}
    pairs = {"x": x, "y": y} | {name: values for name, values in facts.items() if name not in ("x", "y")}
    return {
        f"{name}_{part}": values[chosen]
        for name, values in pairs.items()
        for part, chosen in (("train", ~is_test), ("test", is_test))
    }


def held_out(y: np.ndarray) -> np.ndarray:
    """[n] bool: a fixed fifth of every class, for datasets that come without a test set.

    >>> int(held_out(np.zeros(10, int)).sum()), int(held_out(np.zeros(4, int)).sum())
    (2, 0)
    """
    y = y if y.ndim == 1 and y.dtype.kind != "f" else np.zeros(len(y), int)  # no classes: of all rows
    order = np.random.default_rng(0).permutation(len(y))  # fixed: the split is part of the dataset
    order = order[np.argsort(y[order], kind="stable")]
    _, start, count = np.unique(y[order], return_index=True, return_counts=True)
    place = np.empty(len(y), int)  # place of each example inside its class
    place[order] = np.arange(len(y)) - np.repeat(start, count)
    return place % HELD_OUT == HELD_OUT - 1


def _classes(where: str, cells: Sequence[str]) -> np.ndarray:
    """Whole numbers as they are, other numbers for regression; words numbered in alphabetical order."""
    words = [cell.strip() for cell in cells]
    if "" in words:
        raise UserError(f"'{where}': row {words.index('')} has no label")
    if all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        return np.array([int(word) for word in words], np.int64)
    try:
        float(words[0])
    except ValueError:
        return np.unique(words, return_inverse=True)[1]
    if all(map(_is_number, words)) and not all(float(word).is_integer() for word in words):  # a target of regression
        return np.array([float(word) for word in words], np.float32)
    raise UserError(f"'{where}': labels must be whole numbers from 0 up, or words, got '{shown(words[0])}' and others")


def _is_test(where: str, cells: Sequence[str]) -> np.ndarray:
    words = [cell.strip().lower() for cell in cells]
    for number, word in enumerate(words):
        if word not in ("train", "test"):
            raise UserError(f"'{where}': row {number} has the split '{shown(word)}'; allowed: train, test")
    return np.array([word == "test" for word in words])


def _numbers(where: str, name: str, cells: Sequence[str]) -> np.ndarray | None:
    """float32 [n], or None for a column of words; a gap in a column of numbers is an error."""
    good = [_is_number(cell) for cell in cells]
    if all(good):
        return np.array([float(cell) for cell in cells], np.float32)
    if 2 * sum(good) > len(cells):  # meant as numbers
        row = good.index(False)
        raise UserError(f"'{where}': row {row} has '{shown(cells[row])}' in the column '{shown(name)}' of numbers")
    return None


def _is_number(cell: str) -> bool:
    """Whether it is a number that float32 can hold."""
    try:
        return abs(float(cell)) <= float(np.finfo(np.float32).max)
    except ValueError:
        return False


def _fact(cells: Sequence[str]) -> np.ndarray:
    """Whole numbers if all are, else text."""
    words = [cell.strip() for cell in cells]
    if all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        return np.array([int(word) for word in words], np.int64)
    return np.array(words)
