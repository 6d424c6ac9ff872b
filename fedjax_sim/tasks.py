"""Tasks: what a target is, what is learned and measured unless the run says otherwise, and how a
prediction is read.

| task           | target                       | the model's outputs  | loss | primary metric  |
|----------------|------------------------------|----------------------|------|-----------------|
| classification | a class [D]                  | logits [B, C]        | ce   | accuracy        |
| regression     | real numbers [D] or [D, K]   | numbers [B, K]       | mse  | mean squared error |
| multilabel     | 0 or 1 for each label [D, K] | logits [B, K]        | bce  | F1 (micro)      |
| sequence       | a token per place [D, T]     | logits [B, T, V]     | ce   | accuracy of tokens |

A place of a sequence whose target is −1 does not count. The task of a federation is that of its
arrays (`task_of`), unless it is named. No JAX here: the functions use operators that arrays of both
kinds have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_sim.errors import UserError, lookup

CLASS, REAL, LABELS, TOKENS = TARGETS = ("class", "real", "labels", "tokens")


def _class_hits(outputs: Any, target: Any) -> Any:
    return outputs.argmax(-1) == target


def _label_hits(outputs: Any, target: Any) -> Any:
    return ((outputs > 0) == (target > 0)).mean(-1)


def _token_hits(outputs: Any, target: Any) -> Any:
    real = target >= 0
    number = real.sum(-1)
    return ((outputs.argmax(-1) == target) & real).sum(-1) / (number + (number == 0))


def _no_hits(outputs: Any, target: Any) -> Any:
    return outputs.sum(-1) * math.nan  # there is no share that is right


@dataclasses.dataclass(frozen=True)
class Task:
    """A task; see the module."""

    name: str
    help: str
    target: str = CLASS  # one of TARGETS: what `Federation.y` holds
    loss: str = "ce"
    # the primary one first, and one called loss
    metrics: tuple[str, ...] = ("accuracy", "loss", "worst_decile")
    # (outputs [B, …], target [B, …]) -> [B] share that is right
    hits: Callable[[Any, Any], Any] = _class_hits
    # outputs [B, …] -> predictions
    read: Callable[[np.ndarray], np.ndarray] = lambda outputs: outputs.argmax(-1)

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise UserError(
                f"the target of task '{self.name}' is {self.target!r}; allowed:"
                f" {', '.join(TARGETS)}"
            )

    @property
    def has_classes(self) -> bool:
        """Whether every output is one of C classes, of an example or of a place in it."""
        return self.target in (CLASS, TOKENS)


TASKS: dict[str, Task] = {
    "classification": Task("classification", "one class per example"),
    "regression": Task(
        "regression",
        "real numbers per example",
        REAL,
        "mse",
        ("mse", "regression_loss", "worst_decile", "mae"),
        _no_hits,
        lambda outputs: outputs,
    ),
    "multilabel": Task(
        "multilabel",
        "any number of labels per example",
        LABELS,
        "bce",
        ("f1", "multilabel_loss", "worst_decile"),
        _label_hits,
        lambda outputs: outputs > 0,
    ),
    "sequence": Task(
        "sequence",
        "a token for every place of a sequence, such as the next one",
        TOKENS,
        "ce",
        ("token_accuracy", "token_loss", "worst_decile"),
        _token_hits,
    ),
}


def register_task(task: Task) -> Task:
    """Register a task of your own; its loss and its metrics must be registered too."""
    TASKS[task.name] = task
    return task


def task_called(name: str) -> Task:
    return lookup("task", name, TASKS)


def task_of(x: np.ndarray, y: Any) -> str:
    """The task of arrays, if none was given.

    >>> images, tokens = np.zeros((2, 4, 4)), np.zeros((2, 5), int)
    >>> task_of(images, np.array([0, 1])), task_of(images, np.array([0.5, 1])), task_of(
    ...     tokens, None
    ... )
    ('classification', 'regression', 'sequence')
    >>> task_of(images, np.zeros((2, 3), int)), task_of(tokens, np.zeros((2, 5), int))
    ('multilabel', 'sequence')
    """
    if y is None:
        return "sequence"
    try:
        kind = np.asarray(y)
    except ValueError:  # ragged: said where it is looked at
        return "classification"
    if kind.dtype.kind == "f":
        return "regression"
    if kind.ndim != 2:
        return "classification"
    x = np.asarray(x)
    return "sequence" if kind.shape == x.shape and x.dtype.kind in "iu" else "multilabel"
