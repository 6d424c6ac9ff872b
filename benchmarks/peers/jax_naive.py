"""Naive JAX: the whole round is one jitted program, `vmap` over clients of a scan over steps,
`lax.conv`.

Every client is padded to the longest client of the federation (its extra steps are computed and
thrown away), because that is what one static program for a round needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_models
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Peer
from benchmarks.workloads import Workload, make_data, padded_batches, plan, steps_of

PACKAGES = ("jax", "jaxlib", "numpy")


def build(workload: Workload) -> tuple[Callable, Callable, dict[str, Any]]:
    """(the program, its arguments for round `index`, the weights it starts from), not compiled."""
    data = make_data(workload)
    images, labels = jnp.asarray(data.images()), jnp.asarray(data.labels.astype(np.int32))
    state = {"weights": jax_models.to_jax(init_weights(workload), workload)}
    steps = max(steps_of(n, workload) for n in workload.sizes)

    def client(weights, images, labels, rows, mask):  # ONE client; rows, mask [steps, B]
        params, stats = jax_models.split(weights)

        def step(carry, batch):
            picked, on = batch
            params, momentum, stats = carry
            new = jax_models.sgd_step(
                workload, params, momentum, stats, images[picked], labels[picked], on
            )
            return jax.tree.map(lambda a, b: jnp.where(on.any(), a, b), new, carry), None

        start = (params, jax_models.zero_momentum(workload, params), stats)
        (params, _, stats), _ = jax.lax.scan(step, start, (rows, mask))
        return {name: params[name] if name in params else stats[name] for name in weights}

    def program(
        weights, images, labels, rows, mask, shares
    ):  # rows, mask [K, steps, B]; shares [K]
        trained = jax.vmap(client, (None, None, None, 0, 0))(weights, images, labels, rows, mask)
        return jax.tree.map(lambda stack: jnp.tensordot(shares, stack, 1), trained)

    def arguments(index: int):
        work = plan(workload, data, index)
        shares = np.array([one.examples for one in work], np.float32)
        rows, mask = padded_batches(work, steps, workload.batch)
        return state["weights"], images, labels, rows, mask, shares / shares.sum()

    return program, arguments, state


def prepare(workload: Workload) -> Peer:
    program, arguments, state = build(workload)
    started = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments(0)).compile()
    compile_s = time.perf_counter() - started

    def one_round(index: int) -> None:
        state["weights"] = jax.block_until_ready(compiled(*arguments(index)))

    return Peer(one_round, lambda: jax_models.from_jax(state["weights"], workload), compile_s)
