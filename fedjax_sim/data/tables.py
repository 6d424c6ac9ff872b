"""A `.csv` table as a dataset: a label column, facts about each row (its client, its split), and
numbers as features."""

from __future__ import annotations

import csv
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.data.arrays import place_in_class
from fedjax_sim.data.memory import refuse_if_too_large
from fedjax_sim.data.npz import Arrays, reason
from fedjax_sim.data.spec import shown
from fedjax_sim.errors import UserError

log = logging.getLogger(__name__)

LABELS = ("label", "y")
SPLIT = "split"
# words in the name of a column that tell who or which, not how much: never a feature, even where it
# has numbers
FACTS = (
    *("client", "user", "group", "domain", "id", "uid", "uuid", "idx", "index"),
    *("subject", "person", "patient", "customer"),
    *("device", "writer", "speaker", "site", "hospital", "house", "household"),
)
OPTIONS: dict[str, Callable[[str], Any]] = {
    "label": str,
    "client": str,
    "split": str,
    "features": lambda text: [name for name in text.split("+") if name],
}
# without a split column, every fifth row of each class (in a fixed random order) is for testing
HELD_OUT = 5


def is_fact(name: str) -> bool:
    """Whether a column's name says who or which.

    >>> [is_fact(name) for name in ("id", "user_id", "userId", "Patient No", "idle", "width")]
    [True, True, True, True, False, False]
    """
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return any(word in FACTS for word in re.split(r"[^a-z0-9]+", words.lower()))


def _read_rows(path: pathlib.Path) -> tuple[list[str], list[list[str]]]:
    """(names of the columns, the rows below them), all of one length."""
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
            raise UserError(
                f"'{shown(path)}': row {number} has {len(row)} cells, but there are {len(names)}"
                " columns"
            )
    if len(set(names)) < len(names):
        doubled = next(name for name in names if names.count(name) > 1)
        raise UserError(f"'{shown(path)}' has the column '{shown(doubled)}' twice")
    if not rows:
        raise UserError(f"'{shown(path)}' has no rows below its header")
    return names, rows


def read_csv(
    path: pathlib.Path,
    label: str | None = None,
    client: str | None = None,
    split: str | None = None,
    features: Sequence[str] | None = None,
) -> tuple[Arrays, str]:
    """(x_*, y_* and one pair FACT_train, FACT_test for every column that is not a feature; which
    column is what).

    The first line names the columns; they are separated by commas, semicolons or tabs. label
    (default: `label` or `y`): whole numbers from 0 up, or words, which are numbered in alphabetical
    order. split (default: `split`, where there is one): train or test. client: the column that
    tells the clients, no feature. features: default: all other columns of numbers but those whose
    names say who or which (`is_fact`), float32 [n, F]. The rest are facts.
    """
    names, rows = _read_rows(path)
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    roles = _roles(shown(path), columns, label, client, split, features)
    is_test = held_out(roles.y) if roles.is_test is None else roles.is_test
    return _arrays(columns, roles, is_test), columns_text(
        features=roles.features,
        label=[roles.label],
        split=[roles.split],
        client=[client],
        facts=[name for name in roles.facts if name != client],
    )


def columns_text(**roles: Iterable[str | None]) -> str:
    """Which column is what.

    >>> columns_text(features=["a", "b"], label=["y"], split=[None])
    'features: a, b; label: y'
    """
    named = {role: ", ".join(filter(None, names)) for role, names in roles.items()}
    return "; ".join(f"{role}: {shown(names, 200)}" for role, names in named.items() if names)


class Roles(NamedTuple):
    """What each column is."""

    label: str
    y: np.ndarray  # [n] classes
    split: str | None
    is_test: np.ndarray | None  # [n]
    features: dict[str, np.ndarray]  # name -> float32 [n]
    facts: list[str]


def _roles(
    where: str,
    columns: Mapping[str, Sequence[str]],
    label: str | None,
    client: str | None,
    split: str | None,
    features: Sequence[str] | None,
) -> Roles:
    named = [*filter(None, (label, client, split)), *(features or ())]
    for name in named:
        if name not in columns:
            raise UserError(
                f"'{where}' has no column '{shown(name)}'; it has {shown(', '.join(columns))}"
            )
        if named.count(name) > 1:
            raise UserError(f"'{where}': the column '{shown(name)}' cannot be two things at once")
    found = [label] if label else [name for name in LABELS if name in columns and name not in named]
    if len(found) != 1:
        raise UserError(
            f"'{where}' needs one column called label or y, or label=NAME; it has"
            f" {shown(', '.join(columns))}"
        )
    y = _classes(where, columns[found[0]])
    parts = split or (SPLIT if SPLIT in columns and SPLIT not in named else None)
    is_test = None if parts is None else in_test(where, columns[parts])
    rest = [name for name in columns if name not in (found[0], parts, client)]
    given = {
        name: _numbers(where, name, columns[name])
        for name in (rest if features is None else features)
        if features is not None or not is_fact(name)
    }
    for name in features or ():
        if given[name] is None:
            raise UserError(
                f"'{where}': the column '{shown(name)}' has words and cannot be a feature"
            )
    numbers = {name: values for name, values in given.items() if values is not None}
    if not numbers:
        raise UserError(
            f"'{where}' has no column of numbers that could be a feature; it has"
            f" {shown(', '.join(rest))}"
        )
    for name in rest:
        if features is None and is_fact(name) and all(map(_is_number, columns[name])):
            log.warning(
                "'%s': the column '%s' of numbers is taken for a fact, not for a feature, because"
                " of its name; features=A+B names the features, client=NAME the clients' column",
                *(where, shown(name)),
            )
    facts = [*filter(None, [client]), *(name for name in rest if name not in numbers)]
    return Roles(found[0], y, parts, is_test, numbers, facts)


def _arrays(columns: Mapping[str, Sequence[str]], roles: Roles, is_test: np.ndarray) -> Arrays:
    facts = {name: _fact(columns[name]) for name in roles.facts if name not in ("x", "y")}
    pairs = {"x": np.stack(list(roles.features.values()), axis=1), "y": roles.y} | facts  # x [n, F]
    return train_and_test(is_test, pairs)


def held_out(y: np.ndarray) -> np.ndarray:
    """[n] bool: a fixed fifth of every class, for datasets that come without a test set.

    >>> int(held_out(np.zeros(10, int)).sum()), int(held_out(np.zeros(4, int)).sum())
    (2, 0)
    """
    # no classes: of all rows
    y = y if y.ndim == 1 and y.dtype.kind != "f" else np.zeros(len(y), int)
    order = np.random.default_rng(0).permutation(len(y))  # fixed: the split is part of the dataset
    return place_in_class(y, order) % HELD_OUT == HELD_OUT - 1


def train_and_test(is_test: np.ndarray, pairs: Mapping[str, np.ndarray]) -> Arrays:
    """{name: [n, …]} as NAME_train and NAME_test."""
    parts = ("train", ~is_test), ("test", is_test)
    return {f"{name}_{part}": values[on] for name, values in pairs.items() for part, on in parts}


def _classes(where: str, cells: Sequence[str]) -> np.ndarray:
    """Whole numbers as they are, other numbers for regression; words numbered in alphabetical
    order."""
    words = [cell.strip() for cell in cells]
    if "" in words:
        raise UserError(f"'{where}': row {words.index('')} has no label")
    if all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        return np.array([int(word) for word in words], np.int64)
    try:
        float(words[0])
    except ValueError:
        return np.unique(words, return_inverse=True)[1]
    if all(map(_is_number, words)) and not all(float(word).is_integer() for word in words):
        # a target of regression
        return np.array([float(word) for word in words], np.float32)
    raise UserError(
        f"'{where}': labels must be whole numbers from 0 up, or words, got '{shown(words[0])}' and"
        " others"
    )


def in_test(where: str, cells: Iterable[object]) -> np.ndarray:
    """[n] bool, from the words of a split column."""
    words = [str(cell).strip().lower() for cell in cells]
    for number, word in enumerate(words):
        if word not in ("train", "test"):
            raise UserError(
                f"'{where}': row {number} has the split '{shown(word)}'; allowed: train, test"
            )
    return np.array([word == "test" for word in words])


def _numbers(where: str, name: str, cells: Sequence[str]) -> np.ndarray | None:
    """float32 [n], or None for a column of words; a gap in a column of numbers is an error."""
    good = [_is_number(cell) for cell in cells]
    if all(good):
        return np.array([float(cell) for cell in cells], np.float32)
    if 2 * sum(good) > len(cells):  # meant as numbers
        row = good.index(False)
        raise UserError(
            f"'{where}': row {row} has '{shown(cells[row])}' in the column '{shown(name)}' of"
            " numbers"
        )
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
