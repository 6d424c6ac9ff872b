"""Throughput of every task against plain PyTorch, one process per core: examples or characters per
second.

    python -m benchmarks.tasks [--tasks lstm,transformer] [--pairs 5] [--python torch=PYTHON]
    [--json FILE]

Each row is FedAvg with plain SGD on synthetic data: ours and PyTorch's round in turn (ours, peer,
peer, ours, …), each in a process of its own that stays alive; compilation is apart. Reported are
the median times and the median ratio of the pairs. The load of the machine before the first round
is said beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import cores

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Job:
    """One row: a task, a model, and a round of it."""

    task: str
    model: str
    shape: tuple[int, ...]  # of an example
    outputs: int
    unit: str = "examples"
    clients: int = 20
    per_round: int = 10
    examples: int = 60  # per client
    batch: int = 10
    lr: float = 0.1

    @property
    def work(self) -> int:
        """Examples, or characters, of one round."""
        return self.per_round * self.examples * (self.shape[0] if self.unit == "characters" else 1)


JOBS = {
    "regression": Job("regression", "mlp", (1, 1, 32), 4, examples=500, batch=32, lr=0.01),
    "multilabel": Job("multilabel", "mlp", (1, 1, 32), 20, examples=500, batch=32),
    "lstm": Job("sequence", "lstm", (64,), 60, "characters"),
    "transformer": Job("sequence", "transformer", (64,), 60, "characters"),
}


def make_data(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of all clients, one after another; the same for the same job."""
    rng = np.random.default_rng(0)
    number = job.clients * job.examples
    if job.task == "sequence":
        text = rng.integers(0, job.outputs, (number, job.shape[0] + 1))
        return text[:, :-1].astype(np.int32), text[:, 1:].astype(np.int32)
    x = rng.normal(size=(number, job.shape[-1])).astype(np.float32)
    y = x @ rng.normal(size=(job.shape[-1], job.outputs)).astype(np.float32)
    return x, (y if job.task == "regression" else (y > 0).astype(np.uint8))


def cohort(job: Job, index: int) -> list[int]:
    return (
        np.random.default_rng([1, index]).choice(job.clients, job.per_round, replace=False).tolist()
    )


# ---- ours ----------------------------------------------------------------------------------------
def ours(job: Job) -> Callable[[int], None]:
    """A round of fedjax_sim, compiled."""
    import jax

    import fedjax_sim as fs
    from fedjax_sim.api import set_up

    x, y = make_data(job)
    rows = {"train": [range(i * job.examples, (i + 1) * job.examples) for i in range(job.clients)]}
    fed = fs.Federation.from_arrays(
        x, y, rows, test=(x[:1], y[:1]), mean=0.0, std=1.0, task=job.task
    )
    rounds = 200
    how = dict(
        model=job.model, lr=job.lr, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=job.batch
    )
    lists = [cohort(job, i) for i in range(rounds)]
    setup = set_up(
        "fedavg",
        fed,
        cohorts=lists,
        rounds=rounds,
        eval_every=rounds,
        evaluations=("global",),
        **how,
    )
    sim = setup.simulation
    state = [setup.first_state()]

    def one(index: int) -> None:
        state[0] = sim.run(state[0], sim.data, 1, False)[0]
        jax.block_until_ready(state[0])

    one(0)
    return one


# ---- PyTorch -------------------------------------------------------------------------------------
def torch_model(job: Job) -> Any:
    """The same network; `forward(x)` gives the outputs."""
    import torch
    from torch import nn

    if job.model == "mlp":
        return nn.Sequential(nn.Linear(job.shape[-1], 64), nn.ReLU(), nn.Linear(64, job.outputs))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = (
                nn.Embedding(job.outputs, 16),
                nn.LSTM(16, 128, batch_first=True),
            )
            self.fc = nn.Linear(128, job.outputs)

        def forward(self, x: Any) -> Any:
            return self.fc(self.lstm(self.embed(x))[0])

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = (
                nn.Embedding(job.outputs, 64),
                nn.Parameter(0.02 * torch.randn(job.shape[0], 64)),
            )
            block = nn.TransformerEncoderLayer(
                64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(
                block, 2, nn.LayerNorm(64, elementwise_affine=False), False
            )
            self.fc = nn.Linear(64, job.outputs)
            self.register_buffer(
                "mask", nn.Transformer.generate_square_subsequent_mask(job.shape[0])
            )

        def forward(self, x: Any) -> Any:
            return self.fc(self.blocks(self.embed(x) + self.place, self.mask, is_causal=True))

    return Recurrent() if job.model == "lstm" else Causal()


def torch_client(job: Job, model: Any, x: Any, y: Any) -> None:
    """One epoch of plain SGD of ONE client."""
    import torch
    from torch.nn import functional as F

    rule = torch.optim.SGD(model.parameters(), job.lr)
    order = torch.randperm(len(x))
    for i in range(0, len(x), job.batch):
        rows = order[i : i + job.batch]
        out = model(x[rows])
        if job.task == "sequence":
            loss = F.cross_entropy(out.flatten(0, 1), y[rows].flatten())
        elif job.task == "regression":
            loss = F.mse_loss(out, y[rows])
        else:
            loss = F.binary_cross_entropy_with_logits(out, y[rows])
        rule.zero_grad(set_to_none=True)
        loss.backward()
        rule.step()


def torch_worker(job: Job, served: list, mine: list, line: Any, which: int, processes: int) -> None:
    """Trains its share of every cohort and adds the results up."""
    import torch

    torch.set_num_threads(1)
    model = torch_model(job)
    x, y = (torch.from_numpy(a) for a in make_data(job))
    x = x.long() if job.task == "sequence" else x
    y = y.long() if job.task == "sequence" else y.float()
    own = lambda k: slice(k * job.examples, (k + 1) * job.examples)
    torch_client(job, model, x[own(0)], y[own(0)])  # warm up
    line.send("ready")
    while (index := line.recv()) is not None:
        for total in mine:
            total.zero_()
        for client in cohort(job, index)[which::processes]:
            with torch.no_grad():
                for p, w in zip(model.parameters(), served, strict=True):
                    p.copy_(w)
            torch_client(job, model, x[own(client)], y[own(client)])
            with torch.no_grad():
                for total, p in zip(mine, model.parameters(), strict=True):
                    total.add_(p, alpha=1 / job.per_round)
        line.send("done")


def torch_processes(job: Job) -> Callable[[int], None]:
    """A round of plain PyTorch, one process per core."""
    import torch.multiprocessing as mp

    context: Any = mp.get_context("spawn")
    served = [p.detach().clone().share_memory_() for p in torch_model(job).parameters()]
    sums, lines = [], []
    for which in range(cores()):
        sums.append([0 * w for w in served])
        for total in sums[-1]:
            total.share_memory_()
        here, there = context.Pipe()
        context.Process(
            target=torch_worker, args=(job, served, sums[-1], there, which, cores()), daemon=True
        ).start()
        lines.append(here)
    for line in lines:
        line.recv()

    def one(index: int) -> None:
        for line in lines:
            line.send(index)
        for line in lines:
            line.recv()
        for i, weight in enumerate(served):
            weight.copy_(sum(part[i] for part in sums))

    one(0)
    return one


# ---- the driver ----------------------------------------------------------------------------------
PEERS = {"ours": ours, "torch": torch_processes}


def serve(peer: str, name: str) -> None:
    """Answer every line with the seconds of a round."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    one = PEERS[peer](JOBS[name])
    out.write("ready\n")
    for index, _ in enumerate(sys.stdin, 1):
        started = time.perf_counter()
        one(index)
        out.write(f"{time.perf_counter() - started}\n")


class Worker:
    """One peer's process."""

    def __init__(self, python: str, peer: str, name: str):
        command = [python, "-m", "benchmarks.tasks", "--serve", peer, "--tasks", name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self.answer() != "ready":
            raise SystemExit(
                f"{peer} cannot run {name} with {python}: python -m benchmarks.tasks --serve {peer}"
                " says why"
            )

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def round(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def measure(name: str, pairs: int, pythons: dict[str, str]) -> dict[str, Any]:
    """One row."""
    job = JOBS[name]
    workers = {peer: Worker(pythons.get(peer, sys.executable), peer, name) for peer in PEERS}
    seconds: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for i in range(pairs):
        for peer in list(PEERS)[:: 1 if i % 2 == 0 else -1]:
            seconds[peer].append(workers[peer].round())
    for worker in workers.values():
        worker.close()
    speed = {peer: job.work / statistics.median(each) for peer, each in seconds.items()}
    ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["torch"], strict=True))
    return dict(
        task=job.task, model=job.model, unit=job.unit, ratio=ratio, seconds=seconds, **speed
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=",".join(JOBS), help=f"comma list of {', '.join(JOBS)}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="a peer's own interpreter",
    )
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--serve", choices=tuple(PEERS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    names = options.tasks.split(",")
    if wrong := [name for name in names if name not in JOBS]:
        raise SystemExit(f"unknown task '{wrong[0]}'; allowed: {', '.join(JOBS)}")
    if options.serve:
        serve(options.serve, names[0])
        return
    pythons = dict(item.split("=", 1) for item in options.python)
    load = os.getloadavg()[0]
    print(f"{cores()} cores, load {load:.2f} before the first round")
    rows = []
    for name in names:
        row = measure(name, options.pairs, pythons)
        rows.append(row)
        print(
            f"{row['task']:11s} {row['model']:12s} {row['unit']} per second: ours"
            f" {row['ours']:,.0f}, PyTorch {row['torch']:,.0f}, median ratio {row['ratio']:.2f}",
            flush=True,
        )
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(dict(load=load, rows=rows), indent=1))


if __name__ == "__main__":
    main()
