"""The workloads W1–W6 and their synthetic data, in NumPy only, so that every peer can import them
anywhere.

What all peers share, and so what makes their times comparable, is here: who takes part in a round,
which rows a client owns, the order of its examples in every epoch, and how many steps that makes.

>>> steps_of(540, WORKLOADS["W1"])      # 5 epochs of 8 full batches and one of 28
45
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """A federation and what one client does in a round. Plain SGD where momentum and weight decay
    are 0."""

    name: str
    shape: tuple[int, int, int]  # height, width, channels
    model: str  # mlp, lenet5_pad2, cnn4 or resnet18
    clients: int
    per_round: int
    examples: int = 0  # per client; 0: ragged, from the Dirichlet partition below
    classes: int = 10
    epochs: int = 1
    batch: int = 64
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    dirichlet: float = 0.0  # concentration, for ragged sizes
    pool: int = 0  # examples to partition, for ragged sizes
    seed: int = 0
    cohort_limit: int = 0  # only the first so many of a cohort (to extrapolate); 0: all

    @property
    def sizes(self) -> tuple[int, ...]:
        """Training examples of each client."""
        return tuple(int(n) for n in label_counts(self).sum(1))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


_W1 = Workload(
    "W1",
    (28, 28, 1),
    "lenet5_pad2",
    clients=100,
    per_round=10,
    examples=540,
    epochs=5,
    momentum=0.9,
    weight_decay=5e-4,
)
_W2 = Workload("W2", (32, 32, 3), "cnn4", clients=100, per_round=10, examples=500)
WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        _W1,
        _W2,
        dataclasses.replace(_W2, name="W3", clients=200, per_round=200, examples=250),
        Workload("W4", (28, 28, 1), "mlp", clients=500, per_round=500, examples=60, batch=10),
        Workload("W5", (32, 32, 3), "resnet18", clients=10, per_round=10, examples=64),
        dataclasses.replace(_W1, name="W6", examples=0, dirichlet=0.05, pool=60_000),
    )
}


def from_text(text: str) -> Workload:
    """A preset by its name, or any workload as JSON (`Workload.to_json`)."""
    if text in WORKLOADS:
        return WORKLOADS[text]
    fields = json.loads(text)
    return Workload(**{**fields, "shape": tuple(fields["shape"])})


# ---- who holds what ------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def label_counts(workload: Workload) -> np.ndarray:
    """[clients, classes] examples each client holds of each class; deterministic."""
    if not workload.dirichlet:
        even = np.full((workload.clients, workload.classes), workload.examples // workload.classes)
        even[:, : workload.examples % workload.classes] += 1
        return even
    return dirichlet_counts(
        workload.pool, workload.classes, workload.clients, workload.dirichlet, workload.seed
    )


def dirichlet_counts(
    examples: int,
    classes: int,
    clients: int,
    concentration: float,
    seed: int,
    *,
    least: int = 10,
    attempts: int = 100,
) -> np.ndarray:
    """Dirichlet partition per class: [clients, classes] counts summing to `examples`.

    For each class draw shares ~ Dir(α), give nothing to clients that already hold the average, and
    cut by cumulative shares. Drawn again until everybody holds `least` examples; when no attempt
    succeeds, the last one is topped up from the largest client.
    """
    rng = np.random.default_rng([seed, examples, clients])
    of_class = np.full(classes, examples // classes)
    of_class[: examples % classes] += 1
    for _ in range(attempts):
        counts = np.zeros((clients, classes), np.int64)
        for c in range(classes):
            shares = rng.dirichlet(np.full(clients, concentration)) * (
                counts.sum(1) < examples / clients
            )
            cuts = (np.cumsum(shares / shares.sum()) * of_class[c]).astype(np.int64)
            cuts[-1] = of_class[c]
            counts[:, c] = np.diff(cuts, prepend=0)
        if counts.sum(1).min() >= least:
            return counts
    while (poorest := counts.sum(1).argmin()) is not None and counts[poorest].sum() < least:
        richest = counts.sum(1).argmax()
        c = counts[richest].argmax()
        counts[richest, c] -= 1
        counts[poorest, c] += 1
    return counts


@dataclasses.dataclass(frozen=True)
class Data:
    """One pool; client k owns the rows `start[k] : start[k + 1]`."""

    pixels: np.ndarray  # [n, H, W, C] uint8
    labels: np.ndarray  # [n] int64
    start: np.ndarray  # [clients + 1]

    def images(self) -> np.ndarray:
        """[n, H, W, C] float32, scaled to [−1, 1]: what a peer may prepare before the clock
        starts."""
        return self.pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)


def make_data(workload: Workload) -> Data:
    """A noisy picture per class, so that training has something to learn; the same for the same
    workload."""
    rng = np.random.default_rng([workload.seed, 1])
    counts = label_counts(workload)
    labels = np.concatenate(
        [rng.permutation(np.repeat(np.arange(workload.classes), row)) for row in counts]
    )
    patterns = rng.integers(0, 128, (workload.classes, *workload.shape), dtype=np.uint8)
    noise = rng.integers(0, 128, (len(labels), *workload.shape), dtype=np.uint8)
    return Data(patterns[labels] + noise, labels.astype(np.int64), np.r_[0, counts.sum(1).cumsum()])


# ---- what a round is -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ClientWork:
    """What ONE client does in one round."""

    client: int
    rows: np.ndarray  # [epochs, n] rows of the pool, in the order of each epoch

    @property
    def examples(self) -> int:
        return self.rows.shape[1]

    def batches(self, batch: int) -> Iterator[np.ndarray]:
        """The rows of every step; the last batch of an epoch may be smaller."""
        for epoch in self.rows:
            for first in range(0, len(epoch), batch):
                yield epoch[first : first + batch]


def steps_of(examples: int, workload: Workload) -> int:
    """Gradient steps of a client: epochs × ⌈n / batch⌉, partial batches included."""
    return workload.epochs * -(-examples // workload.batch)


def plan(workload: Workload, data: Data, index: int) -> list[ClientWork]:
    """Round `index`: its cohort and every client's example order; the same for every peer."""
    rng = np.random.default_rng([workload.seed, 2, index])
    cohort = rng.choice(workload.clients, workload.per_round, replace=False)
    if workload.cohort_limit:
        cohort = cohort[: workload.cohort_limit]
    work = []
    for client in cohort:
        rows = np.arange(data.start[client], data.start[client + 1])
        work.append(
            ClientWork(int(client), rng.permuted(np.tile(rows, (workload.epochs, 1)), axis=1))
        )
    return work


def padded_batches(work: list[ClientWork], steps: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [clients, steps, batch] int32 and mask [clients, steps, batch] float32 (0 where nothing
    is)."""
    rows = np.zeros((len(work), steps, batch), np.int32)
    mask = np.zeros((len(work), steps, batch), np.float32)
    for k, one in enumerate(work):
        for s, picked in enumerate(one.batches(batch)):
            rows[k, s, : len(picked)] = picked
            mask[k, s, : len(picked)] = 1
    return rows, mask


def round_totals(workload: Workload, data: Data, index: int) -> tuple[int, int]:
    """(gradient steps, examples visited) of round `index`, over all its clients."""
    work = plan(workload, data, index)
    return (sum(steps_of(w.examples, workload) for w in work), sum(w.rows.size for w in work))
