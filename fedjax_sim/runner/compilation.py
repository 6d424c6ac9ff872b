"""How JAX is started and what is compiled: one host device per core, every program compiled once.

Runs that differ in real settings alone (`engine.records.Numbers`) lower to the same text, so
`compare`, a notebook's loop or a second `run` reuses the executable (`compile_once`). The key is
the program's text, constants included, so different programs have different keys. Other processes
find the program in JAX's compilation cache on disk.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import warnings
from collections.abc import Callable

import jax
from jax.stages import Compiled, Lowered

from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.settings import AUTO
from fedjax_sim.runner import interrupts

MOST = 8  # programs kept
_kept: dict[tuple, Compiled] = {}


def cache_folder() -> pathlib.Path | None:
    """Where programs and measured chunk sizes are kept between runs: FEDJAX_SIM_CACHE, or the
    user's cache folder; None when it is 'off'."""
    text = os.environ.get("FEDJAX_SIM_CACHE", "")
    if text.lower() == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(text or os.path.join(base, "fedjax_sim"))


def use_compilation_cache() -> None:
    """Turn on JAX's compilation cache on disk, so that the second run of a set-up starts at
    once."""
    folder = cache_folder()
    if folder is None or jax.config.values.get("jax_compilation_cache_dir"):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def first_process() -> bool:
    """Whether this is the process that writes files and messages."""
    return jax.process_index() == 0


def want_host_devices(config: Experiment, processes: int = 1) -> None:
    """Ask for CPU devices before JAX starts its backend: as many as --devices says (in all), else
    one per core."""
    number = config.compute.devices
    wanted = max(1, number // processes) if isinstance(number, int) else layouts.host_cores()
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:  # the backend runs already (a notebook, a test): take what is there
        pass


def start_jax(config: Experiment) -> None:
    """Start JAX for a run from Python, with a device per core or more: later runs of the process
    may need them. Does nothing where the number of devices is already set."""
    use_compilation_cache()
    configured = jax.config.values.get("jax_num_cpu_devices", -1)
    flag = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if (configured is not None and configured > 0) or flag or jax.distributed.is_initialized():
        return
    number, cores = config.compute.devices, layouts.host_cores()
    try:
        wanted = max(number, cores) if isinstance(number, int) else cores
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        have = layouts.available_devices()
        if number == AUTO and jax.default_backend() == "cpu" and have < cores:
            warnings.warn(
                f"JAX was started before this run, with {have} CPU device(s): clients train on"
                f" {have} of {cores} cores, and programs compiled so far are not kept; start the"
                " run before anything else uses JAX",
                stacklevel=3,
            )


def check_host_devices(config: Experiment) -> None:
    have, number = layouts.available_devices(), config.compute.devices
    if isinstance(number, int) and number > have:
        raise UserError(
            f"devices {number} is more than the {have} {jax.default_backend()} devices there are"
        )


def compile_once(
    program: Lowered, tick: Callable[[float], None] = lambda seconds: None
) -> Compiled:
    """`program.compile()` of a lowered function, or the executable kept from the same text. tick:
    see `interrupts.in_thread`.

    >>> import jax.numpy as jnp
    >>> one, other = (jax.jit(lambda a: a + 1).lower(jnp.ones(2)) for _ in range(2))
    >>> compile_once(one) is compile_once(other)
    True
    """
    if jax.config.values.get("jax_use_simplified_jaxpr_constants"):  # constants not in the text
        return interrupts.in_thread(program.compile, tick)
    text = hashlib.sha256(program.as_text().encode()).hexdigest()
    key = (text, program.in_tree, program.out_tree, *jax.devices())
    compiled = _kept.pop(key, None) or interrupts.in_thread(program.compile, tick)
    _kept[key] = compiled  # the newest last
    while len(_kept) > MOST:
        del _kept[next(iter(_kept))]
    return compiled


def forget() -> None:
    """Drop all kept programs, as `jax.clear_caches` drops JAX's own."""
    _kept.clear()
