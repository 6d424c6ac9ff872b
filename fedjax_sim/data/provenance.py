"""Where a federation comes from: a sentence that travels with it, and a fingerprint of what it
contains."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from fedjax_sim.data.arrays import blocks

if TYPE_CHECKING:
    from fedjax_sim.data.federation import Federation


class Origin:
    """A description that rides along in a pytree without being part of it.

    All origins are equal and have one hash, so that two federations of the same shapes run the same
    compiled program however they were made. Compare `text` where the description matters.

    >>> Origin("arrays") == Origin("digits, iid"), Origin("arrays").text == Origin(
    ...     "digits, iid"
    ... ).text
    (True, False)
    """

    def __init__(self, text: str, vocabulary: tuple[str, ...] = (), columns: str = ""):
        self.text = text
        self.vocabulary = vocabulary  # what tokens stand for
        self.columns = columns  # of a table: which is what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)

    def __repr__(self) -> str:
        return f"Origin({self.text!r})"


def fingerprint(fed: Federation) -> str:
    """sha256 of everything a client or the server can learn from: examples, labels, rows,
    normalisation, classes.

    Floats count as float32 and integers as they are, so that a federation has one fingerprint on
    the host and on a device, whatever `dtype` a run uses. Where the arrays are stored, and the
    name, do not count.
    """
    total = hashlib.sha256(f"federation 1, {fed.classes} classes, augment '{fed.augment}'".encode())

    def add(name: str, value: object) -> None:
        array = np.asarray(value)
        kind = "float" if array.dtype.kind == "f" else array.dtype.name
        total.update(f"\n{name} {kind} {array.shape} ".encode())
        for _, block in blocks(array if array.ndim else array.reshape(1)):
            block = block.astype(np.float32) if kind == "float" else block
            total.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    if fed.task != "classification":
        total.update(f"\ntask {fed.task}".encode())
    add("x", fed.x)
    add("y", fed.y)
    for name, tables in (("rows", fed.rows), ("size", fed.size), ("held", fed.server_rows)):
        for split in sorted(tables):
            add(f"{name} {split}", tables[split])
    for name in ("mean", "std", "scale"):
        add(name, getattr(fed, name))
    return total.hexdigest()
