"""Compiled programs of this process: what is written down in the same words is compiled once.

Runs that differ in real settings alone (`engine.round.Numbers`) lower to the same text, so
`compare`, a notebook's loop or a second `run` takes over the executable. The text has everything,
constants included, and is the key: nothing that differs can be mistaken for the same. Other
processes find it in the compilation cache on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax

from fedjax_sim.runner import interrupts

MOST = 8  # programs kept
_kept: dict[tuple, Any] = {}


def compile_once(program: Any, tick: Callable[[float], None] = lambda seconds: None) -> Any:
    """`program.compile()` of a lowered function, or what came of the same text before. tick: see
    `interrupts.aside`.

    >>> import jax.numpy as jnp
    >>> one, other = (jax.jit(lambda a: a + 1).lower(jnp.ones(2)) for _ in range(2))
    >>> compile_once(one) is compile_once(other)
    True
    """
    if jax.config.values.get(
        "jax_use_simplified_jaxpr_constants"
    ):  # constants then travel beside the text
        return interrupts.aside(program.compile, tick)
    text = hashlib.sha256(program.as_text().encode()).hexdigest()
    key = (text, program.in_tree, program.out_tree, *jax.devices())
    compiled = _kept.pop(key, None) or interrupts.aside(program.compile, tick)
    _kept[key] = compiled  # the newest last
    while len(_kept) > MOST:
        del _kept[next(iter(_kept))]
    return compiled


def forget() -> None:
    """Let go of all programs, as `jax.clear_caches` does of JAX's own."""
    _kept.clear()
