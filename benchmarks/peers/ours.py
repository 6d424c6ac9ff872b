"""fedjax_sim as a peer: the engine as anybody runs it, on the workload's data and cohorts, without
evaluation.

The cohorts are the workload's (given as a schedule), so that ragged rounds are the same work for
every peer, and so are the first weights (but ResNet-18's); shuffles are the engine's own.
FEDJAX_SIM_CHUNK and FEDJAX_SIM_DEVICES override `auto`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_models
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Peer
from benchmarks.workloads import Workload, make_data, plan
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.layout import place
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner.compilation import want_host_devices
from fedjax_sim.runner.prepare import prepare as set_up

PACKAGES = ("fedjax-sim", "jax", "jaxlib", "flax", "optax", "numpy")
SCHEDULED = 64  # rounds whose cohorts are laid down; later ones repeat them


def configuration(workload: Workload, method: str = "fedavg", **more: Any) -> Experiment:
    return Experiment.of(
        method,
        model=workload.model,
        clients=workload.clients,
        rounds=10**6,
        eval_every=10**6,
        participation=f"{workload.cohort_limit or workload.per_round}/{workload.clients}",
        epochs=workload.epochs,
        batch_size=workload.batch,
        lr=workload.lr,
        momentum=workload.momentum,
        weight_decay=workload.weight_decay,
        evaluations=more.pop("evaluations", ()),
        chunk=os.environ.get("FEDJAX_SIM_CHUNK", "auto"),
        devices=os.environ.get("FEDJAX_SIM_DEVICES", "auto"),
        **more,
    )


def federation(
    workload: Workload, pool_times: int = 1, tests: int = 1, validation: bool = False
) -> tuple[Federation, list[list[int]]]:
    """The workload's data and cohorts.

    pool_times: a pool so many times as large, of rows that nobody owns. validation: a tenth more
    rows for every client, to validate on, and 1,000 for the server; nobody trains on them.
    """
    data = make_data(workload)
    rows = {"train": [np.arange(data.start[k], data.start[k + 1]) for k in range(workload.clients)]}
    size, more = len(data.labels), 0
    if validation:
        each = [max(1, len(own) // 10) for own in rows["train"]]
        ends = size + np.cumsum(each)
        rows["val"] = [np.arange(end - n, end) for n, end in zip(each, ends, strict=True)]
        more = sum(each) + 1000
    cohorts = [[work.client for work in plan(workload, data, index)] for index in range(SCHEDULED)]
    repeated = lambda a, n: np.resize(a, (n, *a.shape[1:]))
    # a test row of its own, unless the pool has rows that nobody owns: appending would copy a large
    # pool
    test: Any = (repeated(data.pixels, tests), repeated(data.labels, tests))
    if pool_times > 1:
        test = np.arange(size + more, size + more + tests)
    # peers see pixels / 127.5 − 1: (x/255 − 0.5)/0.5
    return (
        Federation.from_arrays(
            longer(data.pixels, pool_times * size + more),
            longer(data.labels, pool_times * size + more),
            rows,
            test=test,
            server_val=np.arange(size + more - 1000, size + more) if validation else None,
            classes=workload.classes,
            mean=0.5,
            std=0.5,
            name=workload.name,
        ),
        cohorts,
    )


def longer(a: np.ndarray, rows: int) -> np.ndarray:
    """`a` with zeros after it; memory that nobody writes to is not taken."""
    if rows == len(a):
        return a
    out = np.zeros((rows, *a.shape[1:]), a.dtype)
    out[: len(a)] = a
    return out


def torch_name(path: tuple) -> str:
    """`…['params']['fc1']['kernel']` -> `fc1.weight`, as every peer calls it."""
    group, leaf = (str(getattr(key, "key", key)) for key in path[-2:])
    return f"{group}.{'weight' if leaf == 'kernel' else leaf}"


def with_shared_weights(workload: Workload, net: Any) -> Any:
    """The workload's first weights in place of the drawn ones; ResNet-18 keeps its own."""
    if workload.model == "resnet18":
        return net
    shared = jax_models.to_jax(init_weights(workload), workload)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: shared[torch_name(path)].astype(leaf.dtype), net
    )


def prepare(workload: Workload, method: str = "fedavg") -> Peer:
    config = configuration(workload, method)
    want_host_devices(config)
    fed, cohorts = federation(workload)
    setup = set_up(config.replace(cohorts=cohorts), fed=fed, capacity=1)
    sim, net = setup.simulation, with_shared_weights(workload, setup.net)
    begin = lambda: sim.init(0, jax.tree.map(jnp.copy, net))  # a round gives its state away
    state, data = place(sim.layout, begin(), sim.data)
    started = time.perf_counter()
    one = jax.jit(sim.round, donate_argnums=0).lower(state, data).compile()
    compile_s = time.perf_counter() - started
    # a first round, not timed and not kept: pages are touched, buffers placed
    jax.block_until_ready(one(state, data)[0])
    current = {"state": place(sim.layout, begin(), data)[0]}

    def one_round(index: int) -> None:
        state = current["state"]
        if int(state.t) != index:
            state = state._replace(t=jax.device_put(jnp.int32(index), state.t.sharding))
        current["state"] = jax.block_until_ready(one(state, data)[0])

    def weights() -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_flatten_with_path(current["state"].server.net)[0]
        if workload.model == "resnet18":
            return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        return jax_models.from_jax(
            {torch_name(path): np.asarray(leaf) for path, leaf in leaves}, workload
        )

    return Peer(one_round, weights, compile_s)
