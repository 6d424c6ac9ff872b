"""The kind of device for which a function is traced, and quick compilation of programs that run
once.

Some functions have two forms with equal values, one for CPUs and one for accelerators. They ask
`target()` while they are traced. `jax.default_backend()` is the wrong question there: `jax.export`
can lower for a device this machine does not have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from fedjax_sim.errors import unknown

# as `jax.export` names a platform -> as `jax.default_backend()` does
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu"}

# A program that runs once: the code generator's lowest level that still contracts a·b + c as usual,
# so that the values are those of a full compilation (level 0 rounds twice), without its expensive
# passes. 4-5 times less to compile.
QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}

_override: ContextVar[str | None] = ContextVar("lowering_for", default=None)


def target() -> str:
    """The platform that is being compiled for, "cpu", "gpu" or "tpu": the default backend, or what
    `lowering_for` says.

    >>> with lowering_for("tpu"):
    ...     target()
    'tpu'
    """
    return _override.get() or jax.default_backend()


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Trace for `platform` (as `jax.export` names it) instead of this machine's: wrap
    `jax.export.export(…)(…)` in it.

    JAX remembers traces by function and shapes and does not know of this: give it a function that
    has not been traced before, such as a new lambda or closure, or call `jax.clear_caches()` first.

    >>> with lowering_for("cuda"):
    ...     target()
    'gpu'
    """
    if platform not in PLATFORMS:
        raise unknown("platform", platform, PLATFORMS)
    token = _override.set(PLATFORMS[platform])
    try:
        yield
    finally:
        _override.reset(token)


@contextlib.contextmanager
def floats(dtype: Any) -> Iterator[None]:
    """JAX's 64-bit mode as numbers of this type need it, and afterwards as it was: no run changes
    the next one.

    >>> with floats("float64"):
    ...     str(jax.numpy.zeros(1).dtype)
    'float64'
    """
    before = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", jax.numpy.dtype(dtype) == jax.numpy.float64)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def multiplying(precision: str, fn: Callable) -> Callable:
    """`fn`, whose float32 products have this precision on accelerators: `default`, `high`,
    `highest`.

    A property of what is traced, not of the process: what is traced before, after or around it
    keeps its own.
    """

    @functools.wraps(fn)
    def in_precision(*arguments: Any, **options: Any) -> Any:
        with jax.default_matmul_precision(None if precision == "default" else precision):
            return fn(*arguments, **options)

    return in_precision


def exact(fn: Callable) -> Callable:
    """`fn` with float32 products as they are on a CPU: for sums that must not be rounded, whatever
    the run's precision."""
    return fn if target() == "cpu" else multiplying("highest", fn)


def run_once(fn: Callable, *arguments: Any, **options: Any) -> Any:
    """`jax.jit(fn, **options)(*arguments)` with the same values, for a program that runs once: see
    `QUICK`.

    >>> import jax.numpy as jnp
    >>> float(run_once(lambda a: a + 1, jnp.float32(2)))
    3.0
    """
    program = jax.jit(fn, **options).lower(*arguments)
    if jax.default_backend() != "cpu":
        return program.compile()(*arguments)
    try:
        compiled = program.compile(compiler_options=QUICK)
    except jax.errors.JaxRuntimeError as error:  # another version of XLA may not know an option
        if "ption" not in str(error):
            raise
        compiled = program.compile()
    return compiled(*arguments)
