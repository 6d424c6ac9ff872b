"""Tables through pandas: `.parquet` files, and tables with several target columns.

`FILE.parquet:label=A+B,client=C,split=S,features=X+Y`; so for a `.csv` with several labels. label
(default: `label` or `y`): one column of whole numbers or words is classification, one or several of
other numbers regression, several of 0 and 1 multi-label. split (default: `split`, where there is
one) says train or test, otherwise a fixed fifth of the rows is for testing. client: who has a row;
no feature. features: by default all other columns of numbers.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_sim.data.memory import refuse_if_too_large
from fedjax_sim.data.npz import Arrays, reason
from fedjax_sim.data.spec import parse_options, shown, text
from fedjax_sim.data.tables import LABELS, SPLIT, columns_text, held_out, in_test, train_and_test
from fedjax_sim.errors import UserError

CLIENTS = ("client", "user", "group", "domain", "id", "user_id", "client_id")
OPTIONS = {"label": text, "client": text, "split": text, "features": text}
ENDINGS = (".parquet", ".csv")


def is_frame(name: str) -> bool:
    """Whether a dataset is a table for pandas.

    >>> [
    ...     is_frame(t)
    ...     for t in (
    ...         "a.parquet",
    ...         "a.parquet:label=b",
    ...         "a.csv:label=a+b,client=c",
    ...         "a.csv",
    ...         "digits",
    ...     )
    ... ]
    [True, True, True, False, False]
    """
    return (
        name.endswith(".parquet")
        or ".parquet:" in name
        or bool(re.search(r"\.csv:(.*,)?label=[^,]*\+", name))
    )


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """FILE:OPTION=VALUE,… -> (file, options).

    >>> parse("a/b.parquet:label=p+q")
    ('a/b.parquet', {'label': 'p+q'})
    """
    for ending in ENDINGS:
        file, found, body = name.partition(f"{ending}:")
        if found:
            return file + ending, parse_options(name, body, OPTIONS, None)
    return name, {}


def read_frame(path: pathlib.Path, given: Mapping[str, str]) -> tuple[Arrays, str]:
    """(x_*, y_* and one pair FACT_train, FACT_test for the client and every other column that is no
    feature; which column is what)."""
    frame, where = load_frame(path), shown(path)
    column = lambda names: [name for name in names if name in frame.columns]
    named = {role: value.split("+") for role, value in given.items()}
    for role, names in named.items():
        for name in names:
            if name not in frame.columns:
                raise UserError(
                    f"'{where}' has no column '{shown(name)}' ({role}); it has"
                    f" {shown(', '.join(frame.columns))}"
                )
    labels = named.get("label") or column(LABELS)
    if len(labels) != 1 and "label" not in named:
        raise UserError(f"'{where}' needs label=COLUMN; it has {shown(', '.join(frame.columns))}")
    y = targets(where, frame[labels])
    split = (named.get("split") or column([SPLIT]) or [None])[0]
    clients = named.get("client", []) or column(CLIENTS)
    rest = [name for name in frame.columns if name not in (*labels, split, *clients)]
    features = named.get("features") or [name for name in rest if frame[name].dtype.kind in "biuf"]
    words = [name for name in features if frame[name].dtype.kind not in "biuf"]
    if words or not features:
        what = "no column of numbers"
        if words:
            what = f"the column '{shown(words[0])}' has no numbers and cannot be a feature"
        raise UserError(f"'{where}': {what}; features=A+B names the features")
    others = [name for name in rest if name not in features]
    roles = dict(features=features, label=labels, split=[split], client=clients, facts=others)
    facts = {
        name: fact(frame[name]) for name in (*clients, *rest) if name not in (*features, "x", "y")
    }
    facts |= {"client": facts[clients[0]]} if len(clients) == 1 and clients[0] in facts else {}
    x = frame[features].to_numpy(np.float32)
    is_test = held_out(y) if split is None else in_test(where, frame[split])
    return train_and_test(is_test, {"x": x, "y": y, **facts}), columns_text(**roles)


def load_frame(path: pathlib.Path) -> Any:
    try:
        import pandas as pd
    except ImportError:
        raise UserError(
            f"'{shown(path)}' is read through pandas, which is not here: pip install pandas pyarrow"
        ) from None
    try:
        refuse_if_too_large(20 * path.stat().st_size, f"'{shown(path)}'", "use a .npz file")
        frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    except FileNotFoundError:
        raise UserError(f"there is no file '{shown(path)}'") from None
    except UserError:
        raise
    except Exception as error:  # pandas and pyarrow have errors of their own
        raise UserError(
            f"'{shown(path)}' is not a readable {path.suffix} file ({reason(error)})"
        ) from None
    if not len(frame):
        raise UserError(f"'{shown(path)}' has no rows")
    missing = frame.columns[frame.isna().any()]
    if len(missing):
        row = int(np.flatnonzero(frame[missing[0]].isna())[0])
        raise UserError(
            f"'{shown(path)}': row {row} has nothing in the column '{shown(missing[0])}'"
        )
    frame.columns = [str(name) for name in frame.columns]
    return frame


def targets(where: str, frame: Any) -> np.ndarray:
    """One column of whole numbers or words: classes [n]; else numbers [n, K], or labels where all
    are 0 or 1."""
    kinds = {name: frame[name].dtype.kind for name in frame.columns}
    if len(kinds) == 1:
        name, kind = next(iter(kinds.items()))
        values = frame[name].to_numpy()
        if kind in "biu":
            return values.astype(np.int64)
        if kind == "f":
            return values.astype(np.float32)
        return np.unique(values.astype(str), return_inverse=True)[1]
    words = [name for name, kind in kinds.items() if kind not in "biuf"]
    if words:
        raise UserError(
            f"'{where}': the label '{shown(words[0])}' has words, and several labels must be"
            " numbers"
        )
    values = frame.to_numpy(np.float32)
    return values.astype(np.int64) if np.isin(values, (0, 1)).all() else values


def fact(column: Any) -> np.ndarray:
    """Whole numbers as they are, all else as text."""
    values = column.to_numpy()
    return values.astype(np.int64) if values.dtype.kind in "biu" else values.astype(str)
