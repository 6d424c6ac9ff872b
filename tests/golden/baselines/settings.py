"""The tiny federation of the baselines' golden values: plain NumPy, nothing that depends on PyTorch
or JAX.

Five ragged clients, four classes (no client has all of them), 6x6 images in float64 that need no
normalisation, an MLP 36 -> 8 -> 4. The batch is never smaller than a client, so an epoch is one
full-batch step and the order of examples does not matter. See README.md for what every method does
with this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDS, EPOCHS, BATCH, CLASSES = 3, 2, 16, 4
LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4
# client ids of rounds 1, 2, 3; client 4 is a stranger until round 3
COHORTS = ((0, 1, 2), (2, 3, 0), (4, 1, 3))
SHAPE, WIDTH = (6, 6, 1), 8  # of an image; of the features

# Labels of the training rows, in the order of the rows. Round 1 sees no class 3, round 2 no class
# 2.
TRAIN_LABELS = (
    (0, 0, 1, 0, 1, 0),
    (1, 2, 2, 1, 2, 1, 2, 2, 1),
    (0, 1, 0, 0),
    (0, 3, 3, 0, 3, 3, 3, 1, 3, 0, 3, 3),
    (3, 0, 0, 3, 0, 3, 0),
)
# of validation and of test rows
TEST_LABELS = ((0, 1, 0, 1), (1, 2, 2, 1), (0, 1, 1, 0), (0, 3, 1, 3), (3, 0, 3, 0))
SIZES = tuple(len(labels) for labels in TRAIN_LABELS)

# Options of every method in this run. They are chosen so that each part of a method moves the
# numbers, hence not always its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "fedper": {},
    "fedrep": {"head_epochs": 3},
    "fedbabu": {"tune_epochs": 5},
    "apfl": {"alpha": 0.5},
    "fedamp": {"lam": 0.05, "alpha": 0.05, "sigma": 0.2},
    "fedfomo": {"models": 3},
    "fedphp": {"lam": 0.3, "mu": 0.6},
    "fedpac": {"lam": 1.0, "head_epochs": 1, "head_lr": 0.1},
    "fedala": {
        "layers": "all",
        "lr_weights": 30.0,
        "share": 100,
        "window": 10,
        "threshold": 0.008,
        "cap": 16,
    },
    "fedala_top": {
        "layers": ("fc",),
        "lr_weights": 30.0,
        "share": 100,
        "window": 10,
        "threshold": 0.003,
        "cap": 50,
    },
    "perfedavg": {"alpha": 0.1, "beta": 0.05},
    "pfedme": {
        "lam": 15.0,
        "inner_steps": 3,
        "lr_personal": 0.01,
        "beta": 0.7,
        "decay_personal": 0.001,
    },
    "fedrod": {},
    "fedas": {"align_lr": 0.01},
    "pfedfda": {"eps": 1e-4, "prior": 1e-4, "grid": 21},
    "fedcp": {"lam": 5.0},
    "fedpam": {"lam": 2.0, "tau": 0.5},
}


def pool() -> tuple[np.ndarray, np.ndarray, dict[str, list[np.ndarray]]]:
    """(x [D, 6, 6, 1], y [D], {"train" | "val" | "test": rows per client}); client after client,
    train, val, test."""
    rng = np.random.RandomState(22)
    rows: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
    y: list[int] = []
    for own, tested in zip(TRAIN_LABELS, TEST_LABELS, strict=True):
        for split, labels in (("train", own), ("val", tested), ("test", tested)):
            rows[split].append(np.arange(len(y), len(y) + len(labels)))
            y.extend(labels)
    patterns = rng.normal(size=(CLASSES, *SHAPE))
    x = 0.8 * patterns[y] + rng.normal(size=(len(y), *SHAPE))
    return (x - x.mean()) / x.std(), np.array(y), rows


def _dense(rng: np.random.RandomState, fan_in: int, width: int) -> dict[str, np.ndarray]:
    bound = 1 / np.sqrt(fan_in)
    return {
        "kernel": rng.uniform(-bound, bound, (fan_in, width)),
        "bias": rng.uniform(-bound, bound, width),
    }


def initial() -> dict[str, dict[str, np.ndarray]]:
    """The model Θ⁰: {"fc1": {kernel [36, 8], bias [8]}, "fc": {kernel [8, 4], bias [4]}}, uniform
    in ±1/sqrt(fan in)."""
    rng = np.random.RandomState(11)
    return {"fc1": _dense(rng, int(np.prod(SHAPE)), WIDTH), "fc": _dense(rng, WIDTH, CLASSES)}


def policy() -> dict[str, dict[str, np.ndarray]]:
    """FedCP's conditional policy network at the start: dense [8, 16] and LayerNorm's scale 1 and
    bias 0."""
    norm = {"scale": np.ones(2 * WIDTH), "bias": np.zeros(2 * WIDTH)}
    return {"cpn_dense": _dense(np.random.RandomState(12), WIDTH, 2 * WIDTH), "cpn_norm": norm}


def class_means() -> np.ndarray:
    """pFedFDA's initial global class means [4, 8], uniform in [0, 1]."""
    return np.random.RandomState(28).uniform(0, 1, (CLASSES, WIDTH))
