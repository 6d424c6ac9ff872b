"""Plain PyTorch, one process per core with one thread each; the processes live from round to round.

The global model lies in shared memory. Workers take clients from a common queue, longest first, so
that ragged clients are balanced, and add what they train into their own shared sum; the parent adds
the sums up.
"""

from __future__ import annotations

import atexit
import dataclasses
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks import torch_models
from benchmarks.machine import cores
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Peer
from benchmarks.workloads import Data, Workload, make_data, plan

PACKAGES = ("torch", "numpy")


def _work(
    workload: Workload,
    data: Data,
    served: dict[str, torch.Tensor],
    mine: dict[str, torch.Tensor],
    images: torch.Tensor,
    labels: torch.Tensor,
    taken: Any,
    line: Any,
) -> None:
    torch.set_num_threads(1)
    model = torch_models.make_model(workload, init_weights(workload))
    # warm up
    torch_models.train_client(model, images, labels, plan(workload, data, 0)[0], workload)
    line.send("ready")
    while (index := line.recv()) is not None:
        work = sorted(plan(workload, data, index), key=lambda one: -one.examples)
        total = sum(one.examples for one in work)
        for t in mine.values():
            t.zero_()
        while True:
            with taken.get_lock():
                turn = taken.value
                taken.value += 1
            if turn >= len(work):
                break
            torch_models.load(model, served)
            torch_models.train_client(model, images, labels, work[turn], workload)
            for name, trained in torch_models.tensors(model).items():
                mine[name].add_(trained, alpha=work[turn].examples / total)
        line.send("done")


def prepare(workload: Workload, processes: int | None = None) -> Peer:
    context: Any = mp.get_context("spawn")
    data = make_data(workload)
    images, labels = torch_models.to_torch(data.images(), data.labels)
    # who owns which rows; the images are shared
    layout = dataclasses.replace(data, pixels=data.pixels[:0])
    served = {
        name: torch.from_numpy(v).share_memory_() for name, v in init_weights(workload).items()
    }
    sums = [
        {name: torch.zeros_like(t).share_memory_() for name, t in served.items()}
        for _ in range(processes or cores())
    ]
    taken, lines, workers = context.Value("i", 0), [], []
    for mine in sums:
        here, there = context.Pipe()
        arguments = (
            workload,
            layout,
            served,
            mine,
            images.share_memory_(),
            labels.share_memory_(),
            taken,
            there,
        )
        workers.append(context.Process(target=_work, args=arguments, daemon=True))
        workers[-1].start()
        lines.append(here)
    for line in lines:
        line.recv()

    def one_round(index: int) -> None:
        taken.value = 0
        for line in lines:
            line.send(index)
        for line in lines:
            line.recv()
        for name, t in served.items():
            t.copy_(sum(part[name] for part in sums))

    def stop() -> None:
        for line, worker in zip(lines, workers, strict=True):
            if worker.is_alive():
                line.send(None)
                worker.join(10)

    atexit.register(stop)
    return Peer(one_round, lambda: {name: t.numpy().copy() for name, t in served.items()})
