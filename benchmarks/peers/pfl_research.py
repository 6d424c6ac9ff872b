"""pfl-research, through its public API: FederatedAveraging on a SimulatedBackend with a
PyTorchModel.

Its training loop belongs to it, so the line protocol is spoken from a callback: after every central
iteration the time is reported and the next request awaited. It does not reshuffle a user's data
between epochs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks import torch_models
from benchmarks.machine import cores
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Line, save_weights, versions_of
from benchmarks.workloads import Workload, make_data, plan

PACKAGES = ("pfl", "torch", "numpy")


def run(line: Line, workload: Workload) -> None:
    began = time.perf_counter()
    torch.set_num_threads(cores())
    data = make_data(workload)
    images, labels = torch_models.to_torch(data.images(), data.labels)
    network: Any = torch_models.make_model(workload, init_weights(workload))

    def loss(x, y, **_):
        network.train()
        return torch.nn.functional.cross_entropy(network(x), y)

    network.loss, network.metrics = loss, lambda *batch, **_: {}
    model = PyTorchModel(
        network,
        local_optimizer_create=lambda parameters, lr: torch.optim.SGD(
            parameters, lr=lr, momentum=workload.momentum, weight_decay=workload.weight_decay
        ),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    queue: list[int] = []

    def user(client: int) -> Dataset:
        own = slice(data.start[client], data.start[client + 1])
        return Dataset([images[own], labels[own]], user_id=str(client))

    class Requests(TrainingProcessCallback):
        """Answers one request per central iteration; iteration 0 is the warm-up."""

        started = began

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            seconds = time.perf_counter() - self.started
            if central_iteration == 0:
                setup = self.warm - began
                line.send(
                    ready=True,
                    setup_s=setup,
                    compile_s=seconds - setup,
                    versions=versions_of(PACKAGES),
                )
            else:
                line.send(seconds=seconds)
            while (request := line.read())["cmd"] == "weights":
                weights = {n: t.numpy() for n, t in torch_models.tensors(network).items()}
                save_weights(line, request["file"], weights)
            if request["cmd"] == "quit":
                return True, Metrics()
            queue.extend(one.client for one in plan(workload, data, request["index"]))
            self.started = time.perf_counter()
            return False, Metrics()

    callback: Any = Requests()
    callback.warm = time.perf_counter()
    queue.extend(one.client for one in plan(workload, data, 0))
    users = FederatedDataset(user, lambda: queue.pop(0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            val_cohort_size=0,
            train_cohort_size=workload.cohort_limit or workload.per_round,
        ),
        SimulatedBackend(
            training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]
        ),
        model,
        NNTrainHyperParams(
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.lr,
            local_batch_size=workload.batch,
        ),
        callbacks=[callback],
    )
