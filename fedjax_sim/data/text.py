"""Text as a dataset of next-token prediction: one client per speaker, file or value of a column;
windows of tokens.

`text:PATH`   a folder of .txt files: a client each.  A .txt file of speeches, NAME: on a line of
              its own and the speech below it, as plays are printed: a client per name.  A .csv
              with a column of texts and one of speakers.
options       `text:PATH,window=64,unit=characters` (or bytes); for a .csv also speaker=COLUMN and
              text=COLUMN.

A client's text is cut into windows that do not overlap; a window predicts each of its tokens from
those before it. The end of a text that does not fill a window is padded, and the padding does not
count. Every fifth window of each client, in a fixed random order, is for testing.

`plays.txt`: speeches of 18 speakers in The Winter's Tale (from IV.4) and Measure for Measure (to
II.2), by William Shakespeare; public domain.
"""

from __future__ import annotations

import csv
import logging
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.data.npz import reason
from fedjax_sim.data.spec import Converter, parse_options, positive_int, shown
from fedjax_sim.data.spec import text as word
from fedjax_sim.data.tables import held_out
from fedjax_sim.errors import UserError

log = logging.getLogger(__name__)
PLAYS = pathlib.Path(__file__).with_name("plays.txt")
UNITS = ("characters", "bytes")
SPEAKERS = ("speaker", "client", "user", "author", "character")
TEXTS = ("text", "line", "sentence", "speech")
WINDOW = 64


def unit(value: str) -> str:
    if value not in UNITS:
        raise ValueError(f"use {' or '.join(UNITS)}")
    return value


OPTIONS: dict[str, Converter] = {
    "window": positive_int,
    "unit": unit,
    "speaker": word,
    "text": word,
}


class Windows(NamedTuple):
    """Texts as tokens."""

    x: np.ndarray  # [n, T] int32
    y: np.ndarray  # [n, T] int32, -1 where there is none
    client: np.ndarray  # [n] int32
    names: tuple[str, ...]  # of the clients
    vocabulary: tuple[str, ...]
    is_test: np.ndarray  # [n] bool


def read(path: pathlib.Path, window: int = WINDOW, unit: str = UNITS[0], **columns: str) -> Windows:
    """The windows of a text, see the module."""
    try:
        spoken = said(path, columns)
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"'{shown(path)}' cannot be read as text ({reason(error)})") from None
    return windows(shown(path), spoken, window, unit)


def said(path: pathlib.Path, columns: Mapping[str, str]) -> dict[str, str]:
    """{client: all its text}."""
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise UserError(
                f"the folder '{shown(path)}' has no .txt file; a text file per client is expected"
            )
        return {file.stem: file.read_text(encoding="utf-8") for file in files}
    if not path.is_file():
        raise UserError(f"there is no file or folder '{shown(path)}'; write text:PATH")
    if path.suffix == ".csv":
        return in_columns(path, columns)
    if columns:
        raise UserError(
            f"'{shown(path)}' is no .csv, so it has no column"
            f" '{shown(next(iter(columns.values())))}'"
        )
    return speeches(shown(path), path.read_text(encoding="utf-8"))


def speeches(where: str, text: str) -> dict[str, str]:
    """Speeches of a play: paragraphs that begin with NAME: on a line of its own.

    >>> speeches("a play", "ANN:\\nOh!\\n\\nBOB:\\nAh.\\n\\nANN:\\nNo.")
    {'ANN': 'Oh!\\nNo.', 'BOB': 'Ah.'}
    """
    spoken: dict[str, list[str]] = {}
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        name, colon, words = paragraph.strip().partition(":\n")
        if colon and "\n" not in name:
            spoken.setdefault(name.strip(), []).append(words.strip())
    if not spoken:
        raise UserError(
            f"'{where}' has no speeches: a line NAME: and below it what is said, a blank line"
            " between; for a text file per client give their folder"
        )
    return {name: "\n".join(parts) for name, parts in spoken.items()}


def in_columns(path: pathlib.Path, columns: Mapping[str, str]) -> dict[str, str]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0]) if rows else []
    found = {}
    for role, usual in (("speaker", SPEAKERS), ("text", TEXTS)):
        fit = [columns[role]] if role in columns else [n for n in names if n and n.lower() in usual]
        if len(fit) != 1 or fit[0] not in names:
            raise UserError(
                f"'{shown(path)}' needs {role}=COLUMN; its columns are"
                f" {shown(', '.join(map(str, names))) or 'none'}"
            )
        found[role] = fit[0]
    spoken: dict[str, list[str]] = {}
    for row in rows:
        spoken.setdefault(str(row[found["speaker"]]), []).append(str(row[found["text"]] or ""))
    return {name: "\n".join(parts) for name, parts in spoken.items()}


def windows(where: str, spoken: Mapping[str, str], window: int, unit: str) -> Windows:
    """Texts by client as windows of tokens; clients with fewer than three windows are left out and
    named."""
    texts = {
        name: list(text.encode()) if unit == "bytes" else list(text)
        for name, text in spoken.items()
    }
    large = {name: text for name, text in texts.items() if len(text) > 2 * window + 1}
    if len(large) < len(texts):
        log.warning(
            "'%s': %d of %d clients have no three windows of %d and are left out",
            where,
            len(texts) - len(large),
            len(texts),
            window,
        )
    if not large:
        raise UserError(
            f"'{where}': no client has text for three windows of {window}; use a smaller window"
        )
    if unit == "bytes":
        vocabulary: list[Any] = list(range(256))
    else:
        vocabulary = sorted(set().union(*large.values()))
    number = {token: i for i, token in enumerate(vocabulary)}
    x, y, client = [], [], []
    for i, text in enumerate(large.values()):
        ids = np.array([number[token] for token in text], np.int32)
        pad = -(len(ids) - 1) % window
        inputs, targets = np.pad(ids[:-1], (0, pad)), np.pad(ids[1:], (0, pad), constant_values=-1)
        x.append(inputs.reshape(-1, window))
        y.append(targets.reshape(-1, window))
        client += [i] * len(x[-1])
    owner = np.array(client, np.int32)
    shownas = tuple(chr(v) if unit == "bytes" else v for v in vocabulary)
    return Windows(
        np.concatenate(x), np.concatenate(y), owner, tuple(large), shownas, held_out(owner)
    )


def parse(body: str) -> tuple[str, dict[str, Any]]:
    """PATH,key=value,… -> (path, options).

    >>> parse("a/b.txt,window=32,unit=bytes")
    ('a/b.txt', {'window': 32, 'unit': 'bytes'})
    """
    path, *rest = body.split(",")
    while rest and "=" not in rest[0]:
        path += f",{rest.pop(0)}"
    return path, parse_options(f"text:{body}", ",".join(rest), OPTIONS, None)
