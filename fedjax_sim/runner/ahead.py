"""`--dry-run --device`: whether a run fits a device that this machine need not have, as its
compiler reports.

The run is prepared as on that device (all clients of a round side by side, or as --chunk says) and
its rounds are compiled for it, evaluation included. Each device needs arguments + scratch +
results − donated arguments.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_sim import accelerators
from fedjax_sim.accelerators import Device
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.participation import cohort_size, unseen_clients
from fedjax_sim.engine.records import open_env
from fedjax_sim.engine.round import one_round, peer_ids
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.platform import lowering_for
from fedjax_sim.runner.prepare import Setup, prepare, with_cohorts
from fedjax_sim.types import Tree

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def prepare_for(
    name: str, config: Experiment, fed: Federation, say: Callable[[str], None] | None = None
) -> Setup:
    """A run as it would be set up on the device `name`."""
    device = accelerators.target_device(name)
    count = len(device.devices)
    if config.compute.backend == "loop":
        raise UserError(
            "backend 'loop' compiles no rounds; allowed with --device: auto, vmap, chunked, sharded"
        )
    if config.compute.devices not in ("auto", count):
        raise UserError(
            f"devices {config.compute.devices} does not fit device '{name}', which is {count};"
            f" allowed: auto, {count}"
        )
    unseen = unseen_clients(config.data.unseen, fed.num_clients, config.data.data_seed)
    fixed = with_cohorts(config, fed.num_clients, unseen)
    cohort = cohort_size(
        fixed.training.participation, fed.num_clients, fed.num_clients - len(unseen)
    )[1]
    share = -(-cohort // count)
    compute = config.compute
    given = isinstance(compute.chunk, int) and compute.backend != "vmap"
    chunk = min(int(compute.chunk), share) if given else share
    layout = accelerators.layout_on(device, cohort, chunk)
    with lowering_for(device.platform):
        setup = prepare(config, fed=fed, loaded=True, layout=layout, say=say, measure=False)
    why = "as given" if compute.chunk != "auto" else "the whole share at once"
    return dataclasses.replace(
        setup, resolved={**setup.resolved, "chunk_why": f"{why}, for {device.kind.title}"}
    )


def rounds_of(setup: Setup, device: Device) -> tuple[Callable, tuple]:
    """(the function that a run calls repeatedly, the shapes of its arguments); the first argument
    is donated."""
    sim = setup.simulation
    state, data = accelerators.placed(sim, setup.net, device)
    mesh = sim.layout.mesh
    sharding = (
        SingleDeviceSharding(device.devices[0])
        if mesh is None
        else NamedSharding(mesh, PartitionSpec())
    )
    r = sim.stages
    if r.stored == "all":
        numbers = accelerators.abstract((jnp.int32(1), jnp.bool_(True)), sharding)
        return sim.run, (state, data, *numbers)
    # the host has all rows, the device only those of the cohort and of its peers
    peers = jax.eval_shape(lambda s, d: peer_ids(r, open_env(r, d), s), state, data).shape[0]
    rows = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((peers, *a.shape[1:]), a.dtype), state.clients
    )

    def one(state: Tree, data: Tree, rows: Tree) -> tuple:
        return one_round(r, open_env(r, data), state, data.dropout, rows)[:2]

    return one, (state, data, accelerators.abstract(rows, sharding))


def fits(setup: Setup, name: str) -> dict[str, Any]:
    """Bytes that the run needs on each device, and whether they fit; None where the compiler does
    not say."""
    device = accelerators.target_device(name)
    found: dict[str, Any] = dict(device=name, title=device.kind.title, devices=len(device.devices))
    found |= dict(
        memory=int(device.kind.memory), arguments=None, scratch=None, results=None, donated=None
    )
    program, arguments = rounds_of(setup, device)
    try:
        stats: Any = accelerators.compile_for(device, program, arguments).memory_analysis()
    except jax.errors.JaxRuntimeError as problem:  # a TPU's compiler refuses what does not fit
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        return found | dict(needed=refused_bytes(str(problem)), fits=False)
    found |= dict(
        arguments=stats.argument_size_in_bytes,
        scratch=stats.temp_size_in_bytes,
        results=stats.output_size_in_bytes,
        donated=stats.alias_size_in_bytes,
    )
    needed = found["arguments"] + found["scratch"] + found["results"] - found["donated"]
    return found | dict(needed=needed, fits=needed <= device.kind.memory)


def refused_bytes(message: str) -> int | None:
    """The bytes that a compiler's refusal names, in either of its wordings.

    >>> refused_bytes("… memory required for HLO temporaries (22.00G) exceeds available HBM (15G).")
    23622320128
    """
    found = re.search(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT])", message)
    return int(float(found[1]) * UNITS[found[2]]) if found else None
