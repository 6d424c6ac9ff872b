"""Finished runs of a long table, a line of JSON each, so that a stopped table resumes where it
was."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The finished runs; a line that a kill cut short does not count."""
    runs = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            runs.append(json.loads(line))
        except ValueError:
            print(f"{path}: a line that is cut short was skipped", file=sys.stderr)
    return runs


def append(path: pathlib.Path, found: dict[str, Any]) -> None:
    """One line more, a line of its own also after one that was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * cut + json.dumps(found) + "\n")
