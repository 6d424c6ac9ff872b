"""fedjax (google), through its public API: `for_each_client` (jit backend), its datasets and
optimisers.

The loop is the federated averaging of its documentation. Batches are drawn epoch by epoch
(`shuffle_repeat_batch` with one epoch each), because asking it for several epochs at once lets
batches run across epoch ends, which would be fewer steps than everybody else takes. Needs a JAX
that still has `jax.tree_map` (0.4.25).
"""

from __future__ import annotations

import itertools
import time

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import jax_models
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Peer, PeerError
from benchmarks.workloads import ClientWork, Workload, make_data, plan

PACKAGES = ("fedjax", "jax", "jaxlib", "numpy")


def prepare(workload: Workload) -> Peer:
    if workload.model == "resnet18":
        raise PeerError("fedjax's client step has no place for batch-normalisation statistics")
    data = make_data(workload)
    images, labels = data.images(), data.labels.astype(np.int32)
    datasets = [
        fedjax.ClientDataset({"x": images[a:b], "y": labels[a:b]})
        for a, b in itertools.pairwise(data.start)
    ]
    optimiser = fedjax.optimizers.create_optimizer_from_optax(
        optax.chain(
            optax.add_decayed_weights(workload.weight_decay),
            optax.sgd(workload.lr, workload.momentum or None),
        )
    )
    state = {"weights": jax_models.to_jax(init_weights(workload), workload)}

    def loss(params, batch):
        logits, _ = jax_models.forward(workload, params, {}, batch["x"], None)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def client_init(server_params, _):
        return {"params": server_params, "opt_state": optimiser.init(server_params)}

    def client_step(client, batch):
        grads = jax.grad(loss)(client["params"], batch)
        opt_state, params = optimiser.apply(grads, client["opt_state"], client["params"])
        return {"params": params, "opt_state": opt_state}

    def client_final(server_params, client):
        return jax.tree_util.tree_map(lambda a, b: a - b, server_params, client["params"])

    for_each_client = fedjax.for_each_client(client_init, client_step, client_final)

    def batches(one: ClientWork, index: int):
        dataset = datasets[one.client]
        seeds = range(index * workload.epochs, index * workload.epochs + len(one.rows))
        return itertools.chain.from_iterable(
            dataset.shuffle_repeat_batch(batch_size=workload.batch, num_epochs=1, seed=s)
            for s in seeds
        )

    def train(work: list[ClientWork], index: int):
        clients = [(one.client, batches(one, index), None) for one in work]
        examples = {one.client: one.examples for one in work}
        total = jax.tree_util.tree_map(jnp.zeros_like, state["weights"])
        for client, delta in for_each_client(state["weights"], clients):
            total = fedjax.tree_util.tree_add(
                total, fedjax.tree_util.tree_weight(delta, examples[client])
            )
        mean = fedjax.tree_util.tree_inverse_weight(total, sum(examples.values()))
        return jax.block_until_ready(jax.tree_util.tree_map(jnp.subtract, state["weights"], mean))

    def one_round(index: int) -> None:
        state["weights"] = train(plan(workload, data, index), index)

    # compile every batch size that occurs: ragged clients have many, and each is a program of its
    # own
    started = time.perf_counter()
    seen: dict[int, ClientWork] = {}
    for client in range(workload.clients):
        size = data.start[client + 1] - data.start[client]
        seen.setdefault(
            int(size) % workload.batch,
            ClientWork(client, np.arange(*data.start[client : client + 2])[None]),
        )
    train(list(seen.values()), 0)
    compile_s = time.perf_counter() - started
    return Peer(one_round, lambda: jax_models.from_jax(state["weights"], workload), compile_s)
