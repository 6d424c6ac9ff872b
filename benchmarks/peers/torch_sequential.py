"""Plain PyTorch: clients one after another, every core a thread (on a GPU if torch sees one)."""

from __future__ import annotations

import torch

from benchmarks import torch_models
from benchmarks.machine import cores
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Peer
from benchmarks.workloads import Workload, make_data, plan

PACKAGES = ("torch", "numpy")


def prepare(workload: Workload) -> Peer:
    torch.set_num_threads(cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = make_data(workload)
    images, labels = torch_models.to_torch(data.images(), data.labels, device)
    model = torch_models.make_model(workload, init_weights(workload)).to(device)
    # the global model
    served = {name: t.clone() for name, t in torch_models.tensors(model).items()}

    def one_round(index: int) -> None:
        work = plan(workload, data, index)
        total = sum(one.examples for one in work)
        average = {name: torch.zeros_like(t) for name, t in served.items()}
        for one in work:
            torch_models.load(model, served)
            torch_models.train_client(model, images, labels, one, workload)
            for name, trained in torch_models.tensors(model).items():
                average[name].add_(trained, alpha=one.examples / total)
        served.update(average)
        if device == "cuda":
            torch.cuda.synchronize()

    # warm the threads and the allocator with one client, away from the global model
    torch_models.train_client(model, images, labels, plan(workload, data, 0)[0], workload)
    return Peer(one_round, lambda: {name: t.cpu().numpy() for name, t in served.items()})
