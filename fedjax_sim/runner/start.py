"""How JAX is started, from the command line and from Python alike: one host device per core,
programs kept on disk."""

from __future__ import annotations

import os
import warnings

import jax

from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.settings import AUTO
from fedjax_sim.runner.cache import use_compilation_cache


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
    """The same for a run from Python. What the program itself has asked for stays; called again, it
    does nothing.

    Later runs of the process may want more devices than this one: all cores are asked for.
    """
    use_compilation_cache()
    said = jax.config.values.get("jax_num_cpu_devices", -1)
    if (said is not None and said > 0) or "host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    ):
        return
    if jax.distributed.is_initialized():
        return
    number, cores = config.compute.devices, layouts.host_cores()
    try:
        jax.config.update(
            "jax_num_cpu_devices", max(number if isinstance(number, int) else 1, cores)
        )
    except RuntimeError:
        have = layouts.available_devices()
        if number == AUTO and jax.default_backend() == "cpu" and have < cores:
            warnings.warn(
                f"JAX was started before this run, with {have} CPU device(s): clients train on"
                f" {have} of {cores} cores, and programs compiled so far are not kept; start the"
                " run before anything else uses JAX",
                stacklevel=3,
            )


def host_devices_missing(config: Experiment) -> None:
    have, number = layouts.available_devices(), config.compute.devices
    if isinstance(number, int) and number > have:
        raise UserError(
            f"devices {number} is more than the {have} {jax.default_backend()} devices there are"
        )
