"""Compile for a device that this machine does not have: its compiler is asked, the program is never
run.

    device = target_device("v5e")  # or "v5e:2x4", "v5p", "v6e", "h100", "a100", "h100:8"
    program = compile_for(device, fn, (state, data))  # donates the first argument, as in a run
    program.memory_analysis(), program.as_text()

The compilers come with the extra `[aot]`. What they say is a cost model, not a stopwatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fedjax_sim.errors import UserError, first_line, unknown

if TYPE_CHECKING:  # JAX is imported when its environment is set
    import jax
    from jax.stages import Compiled

    from fedjax_sim.engine.layout import Layout
    from fedjax_sim.engine.records import Data
    from fedjax_sim.engine.simulation import Simulation
    from fedjax_sim.types import State, Tree

GB = 1e9
INSTALL = "pip install 'fedjax-sim[aot]'"

# what a GPU's compiler wants to know about it; as `xla.gpu.GpuTargetConfigProto`
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A device as its maker describes it."""

    title: str
    platform: str  # as `platform.lowering_for` names it: tpu, cuda
    smallest: str  # the smallest topology that can be asked for
    memory: float  # bytes that a program may have
    bandwidth: float  # bytes per second
    clock: float  # cycles per second
    peak: float  # floating-point operations per second: bfloat16 products, summed in float32
    text: str = ""  # the description that a GPU's compiler wants


def _gpu(
    title: str, memory: int, bandwidth: int, clock: float, peak: float, **chip: int | str
) -> Kind:
    text = _GPU.format(memory=memory, bandwidth=bandwidth, clock=clock, **chip)
    return Kind(title, "cuda", "1", memory, float(bandwidth), clock * 1e9, peak, text)


H100: dict[str, Any] = dict(cores=132, fpus=128, shared=233472, optin=232448, cache=52428800)
H100 |= dict(major=9, name="NVIDIA H100 80GB HBM3")
A100: dict[str, Any] = dict(cores=108, fpus=64, shared=167936, optin=166912, cache=41943040)
A100 |= dict(major=8, name="NVIDIA A100-SXM4-80GB")

DEVICES: dict[str, Kind] = {
    "v5e": Kind("TPU v5e", "tpu", "2x2", 15.75 * 2**30, 819 * GB, 1.5e9, 197e12),
    "v5p": Kind("TPU v5p", "tpu", "2x2x1", 95.74 * 2**30, 2765 * GB, 1.75e9, 459e12),
    "v6e": Kind("TPU v6e", "tpu", "2x2", 31.25 * 2**30, 1640 * GB, 1.75e9, 918e12),
    "h100": _gpu("NVIDIA H100 SXM", 84978434048, 3352320000000, 1.98, 989e12, **H100),
    "a100": _gpu("NVIDIA A100 SXM 80 GB", 84987740160, 2039000000000, 1.41, 312e12, **A100),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What is compiled for: one device, or a mesh of them."""

    name: str  # as it was asked for: v5e, v5e:2x4, h100
    kind: Kind
    devices: tuple[jax.Device, ...]  # of JAX; one, unless a topology was named

    @property
    def platform(self) -> str:
        return self.kind.platform


def parse(name: str) -> tuple[Kind, str]:
    """The kind of a device and the topology that was named, if any.

    >>> parse("v5e:2x4")[1], parse("h100")[1]
    ('2x4', '')
    """
    word, colon, topology = name.partition(":")
    if word not in DEVICES:
        raise unknown("device", name, DEVICES)
    if colon and not re.fullmatch(r"\d+(x\d+){0,2}", topology):
        raise UserError(
            f"topology '{topology}' of device '{name}' cannot be read; use"
            f" {word}:{DEVICES[word].smallest}"
        )
    return DEVICES[word], topology


def here(platform: str) -> bool:
    """Whether this machine has such a device; asked without starting JAX."""
    places = {"tpu": ("/dev/accel0", "/dev/vfio/0"), "cuda": ("/dev/nvidia0",)}[platform]
    return any(os.path.exists(place) for place in places)


def quiet_environment(on_cpu: bool = True) -> None:
    """Before JAX starts: its arrays on the CPU, and libtpu asks no server what machine this is,
    unless it has a TPU."""
    wanted = {"TF_CPP_MIN_LOG_LEVEL": "3"} | ({"JAX_PLATFORMS": "cpu"} if on_cpu else {})
    if not here("tpu"):
        wanted |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: without it libtpu complains
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "TPU_STDERR_LOG_LEVEL": "3",
            "TPU_MIN_LOG_LEVEL": "3",
            # nobody uses a chip: several processes may compile at a time
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    for variable, value in wanted.items():
        os.environ.setdefault(variable, value)


@functools.cache
def target_device(name: str) -> Device:
    """The device `name`, as far as its compiler is concerned; one sentence where the compiler is
    not installed."""
    kind, topology = parse(name)
    quiet_environment(on_cpu=False)
    from jax.experimental import topologies

    if kind.platform == "tpu":
        asked = {"topology_name": f"{name.partition(':')[0]}:{topology or kind.smallest}"}
    else:
        many = math.prod(map(int, (topology or "1").split("x")))
        asked = {"target_config": kind.text, "topology": f"1x1x{many}"}
    try:
        found = topologies.get_topology_desc(platform=kind.platform, **asked)
    except Exception as problem:  # the plug-ins raise what they like
        if not installed(kind.platform):
            raise UserError(
                f"device '{name}' needs the compiler of {kind.title}; install it with: {INSTALL}"
            ) from None
        why = first_line(problem) or type(problem).__name__
        raise UserError(f"the compiler for {kind.title} refuses device '{name}': {why}") from None
    return Device(name, kind, tuple(found.devices) if topology else (found.devices[0],))


def installed(platform: str) -> bool:
    """Whether the compiler of a platform is there, and fits this JAX."""
    import importlib.metadata
    import importlib.util

    if platform == "tpu":
        return importlib.util.find_spec("libtpu") is not None
    for package in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        try:
            importlib.metadata.version(package)
            return True
        except importlib.metadata.PackageNotFoundError:
            continue
    return False


def abstract(tree: Tree, sharding: Tree) -> Tree:
    """Shapes of a tree of arrays, numbers or shapes, as arguments that live in `sharding` (one, or
    a tree of them)."""
    import jax
    import numpy as np

    def one(a: Any, where: Any) -> Any:
        a = a if hasattr(a, "dtype") else np.asarray(a)
        return jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype), sharding=where)

    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda a: one(a, sharding), tree)
    return jax.tree.map(one, tree, sharding)


def compile_for(device: Device, fn: Callable, arguments: tuple, donate: bool = True) -> Compiled:
    """`jax.jit(fn, donate_argnums=0)` compiled for `device`; the arguments are shapes
    (`abstract`)."""
    import jax

    from fedjax_sim.platform import lowering_for

    with lowering_for(device.platform):
        # JAX remembers traces by function, and does not know for which device they were made
        jax.clear_caches()
        lowered = jax.jit(lambda *a: fn(*a), donate_argnums=0 if donate else ()).lower(*arguments)
    with no_cache_on_disk():
        return lowered.compile()


@contextlib.contextmanager
def no_cache_on_disk() -> Iterator[None]:
    """Without JAX's persistent cache: it cannot read back what was compiled for a device that is
    not there."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    kept = jax.config.values.get("jax_enable_compilation_cache", True)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


# ---- a simulation's programs ---------------------------------------------------------------------
def layout_on(device: Device, cohort: int, chunk: int = 0) -> Layout:
    """The layout of a run on `device`: the cohort side by side, shared out where there are several
    devices."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from fedjax_sim.engine.layout import CLIENTS, Layout

    many = len(device.devices)
    chunk = chunk or -(-cohort // many)
    if many == 1:
        return Layout(chunk)
    return Layout(chunk, Mesh(np.array(device.devices), (CLIENTS,), axis_types=(AxisType.Auto,)))


def state_like(sim: Simulation, net: Tree) -> State:
    """Shapes of a simulation's State; nothing is computed."""
    import jax
    import jax.numpy as jnp

    from fedjax_sim.types import State

    server, one = sim.shapes(jax.eval_shape(lambda: net))
    rows = sim.layout.padded(sim.stages.num_stored)
    clients = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape), a.dtype), one)
    t: Any = jax.ShapeDtypeStruct((), jnp.int32)
    key: Any = jax.ShapeDtypeStruct((2,), jnp.uint32)
    agent = sim.agent()
    return State(t, key, server, clients, () if agent is None else jax.eval_shape(agent.init, key))


def placed(sim: Simulation, net: Tree, device: Device) -> tuple[State, Data]:
    """(state, data) of a simulation as shapes that live on `device`, where its layout puts them."""
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    from fedjax_sim.engine import layout as layouts

    state = state_like(sim, net)
    if sim.layout.mesh is None:
        one = SingleDeviceSharding(device.devices[0])
        return abstract(state, one), abstract(sim.data, one)
    where = layouts.shardings(sim.layout, state)
    return abstract(state, where), abstract(
        sim.data, NamedSharding(sim.layout.mesh, PartitionSpec())
    )
