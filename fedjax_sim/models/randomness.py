"""Random numbers for layers that need them (Dropout), around a model that is a function of weights
and images alone.

A training step says its key once, and code that evaluates the model inside it, method or engine,
need not hand it on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from fedjax_sim.types import Key

_KEY: ContextVar[Key | None] = ContextVar("randomness", default=None)
_DROPOUT = 0xD409  # the step's own key is for augmentation and the objective


@contextlib.contextmanager
def randomness(key: Key) -> Iterator[None]:
    """While this is traced, models draw from `key`."""
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


def dropout_key() -> Key:
    """The key for Dropout; a fixed one where only shapes or costs are asked for, outside any
    step."""
    key = _KEY.get()
    return jax.random.key(0) if key is None else jax.random.fold_in(key, _DROPOUT)
