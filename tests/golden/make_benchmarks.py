"""Rounds of the benchmark's PyTorch peers:  python tests/golden/make_benchmarks.py  writes
benchmarks.npz.

The workloads are drawn by `benchmarks.workloads` in NumPy. torch is imported where it is used, so
that the tests can read the settings without it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Mapping

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from golden.stored import write  # noqa: E402

from benchmarks import models, workloads  # noqa: E402
from benchmarks.peers import PEERS, protocol  # noqa: E402
from benchmarks.workloads import Workload  # noqa: E402

TINY = Workload(
    "tiny",
    (8, 8, 1),
    "mlp",
    clients=4,
    per_round=3,
    examples=7,
    classes=3,
    epochs=2,
    batch=3,
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-2,
)
RAGGED = dataclasses.replace(
    TINY,
    name="ragged",
    shape=(16, 16, 1),
    model="lenet5_pad2",
    examples=0,
    dirichlet=0.3,
    pool=60,
    lr=0.05,
)
# one batch per epoch: the order cannot matter
WHOLE = dataclasses.replace(RAGGED, name="whole", batch=RAGGED.pool)
NORMALISED = dataclasses.replace(
    TINY,
    model="resnet18",
    shape=(32, 32, 3),
    momentum=0.0,
    lr=0.01,
    epochs=1,
    examples=10,
    batch=12,
)
TINY_ROUND, ROUNDS = 3, (0, 1)


def summary(weights: Mapping[str, np.ndarray], entries: int = 24) -> np.ndarray:
    """[names, 1 + entries]: of every array, sorted by name, its norm and some entries at fixed
    places."""
    rows = []
    for name in sorted(weights):
        flat = np.asarray(weights[name], np.float64).reshape(-1)
        rows.append([np.linalg.norm(flat), *flat[(np.arange(entries) * 7919 + 1) % flat.size]])
    return np.array(rows)


def sequential(workload: Workload, rounds: tuple[int, ...]) -> np.ndarray:
    from benchmarks.peers import torch_sequential

    peer = torch_sequential.prepare(workload)
    for index in rounds:
        peer.round(index)
    return summary(peer.weights())


def processes(workload: Workload, index: int) -> np.ndarray:
    """Several processes of one thread behind a subprocess that speaks the protocol."""
    worker = protocol.Worker(PEERS["torch_procs"][0], workload)
    try:
        assert (
            worker.ready["ready"]
            and "torch" in worker.ready["versions"]
            and worker.round(index) > 0
        )
        with tempfile.TemporaryDirectory() as folder:
            file = worker.ask(cmd="weights", file=f"{folder}/weights.npz")["saved"]
            with np.load(file, allow_pickle=False) as saved:
                return summary(dict(saved))
    finally:
        worker.close()


def normalised() -> np.ndarray:
    """ResNet-18 after one step of one client in float64, running statistics included."""
    from benchmarks import torch_models

    data = workloads.make_data(NORMALISED)
    model = torch_models.make_model(NORMALISED, models.init_weights(NORMALISED)).double()
    pool = torch_models.to_torch(data.images().astype(np.float64), data.labels)
    torch_models.train_client(model, *pool, workloads.plan(NORMALISED, data, 0)[0], NORMALISED)
    return summary({name: t.numpy() for name, t in torch_models.tensors(model).items()}, 6)


def values() -> dict[str, np.ndarray]:
    return {
        "torch": sequential(TINY, (TINY_ROUND,)),
        "torch_procs": processes(TINY, TINY_ROUND),
        "ragged": sequential(RAGGED, ROUNDS),
        "whole": sequential(WHOLE, ROUNDS),
        "normalised": normalised(),
    }


if __name__ == "__main__":
    write("benchmarks", values())
