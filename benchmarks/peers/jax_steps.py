"""Plain JAX: one jitted step per mini-batch (the last one padded), a Python loop over clients and
batches."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_models
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Peer
from benchmarks.workloads import Workload, make_data, padded_batches, plan, steps_of

PACKAGES = ("jax", "jaxlib", "numpy")


def prepare(workload: Workload) -> Peer:
    data = make_data(workload)
    images, labels = data.images(), data.labels.astype(np.int32)
    state = {"weights": jax_models.to_jax(init_weights(workload), workload)}
    step = jax.jit(functools.partial(jax_models.sgd_step, workload))
    add = jax.jit(lambda total, part, share: jax.tree.map(lambda a, b: a + share * b, total, part))

    def train(weights, rows, mask):  # ONE client; rows, mask [steps, B]
        params, stats = jax_models.split(weights)
        momentum = jax_models.zero_momentum(workload, params)
        for picked, on in zip(rows, mask, strict=True):
            params, momentum, stats = step(
                params, momentum, stats, images[picked], labels[picked], on
            )
        return {name: params[name] if name in params else stats[name] for name in weights}

    def one_round(index: int) -> None:
        work = plan(workload, data, index)
        total = sum(one.examples for one in work)
        average = jax.tree.map(jnp.zeros_like, state["weights"])
        for one in work:
            (rows,), (mask,) = padded_batches(
                [one], steps_of(one.examples, workload), workload.batch
            )
            average = add(average, train(state["weights"], rows, mask), one.examples / total)
        state["weights"] = jax.block_until_ready(average)

    started = time.perf_counter()
    first_step = np.zeros((1, workload.batch), np.int32), np.ones((1, workload.batch), np.float32)
    jax.block_until_ready(add(state["weights"], train(state["weights"], *first_step), 0.0))
    compile_s = time.perf_counter() - started
    return Peer(one_round, lambda: jax_models.from_jax(state["weights"], workload), compile_s)
