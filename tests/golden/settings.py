"""The tiny federations behind the golden values: what the PyTorch loop and the engine must agree
on.

Everything is drawn with NumPy's frozen `RandomState`, so the files do not depend on the versions of
JAX or PyTorch; the batches do depend on JAX's random bits, and are stored so that a change of those
is told from a wrong number.
"""

from __future__ import annotations

import numpy as np
from golden.draws import minibatches, reporting

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.participation import Participation

SEED, ROUNDS, BATCH, EPOCHS, COHORT, CLASSES = 5, 3, 8, 1.5, 3, 10
SIZES = (10, 24, 17, 13)
SHAPE = (28, 28, 1)
LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4
METHODS: dict[str, dict[str, float]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "scaffold": {"server_lr": 0.8},
    "ditto": {"lam": 0.5, "personal_epochs": 1.0},
}

# kernels [k, k, in, out] and [in, out] (the flattened map is in the order height, width, channel),
# biases [out]
WEIGHTS: dict[str, dict[str, tuple[int, ...]]] = {
    "lenet5": {
        "conv1": (5, 5, 1, 6),
        "conv2": (5, 5, 6, 16),
        "fc1": (4 * 4 * 16, 120),
        "fc2": (120, 84),
        "fc": (84, CLASSES),
    },
    "cnn4": {
        "conv1": (5, 5, 1, 32),
        "conv2": (5, 5, 32, 64),
        "fc1": (4 * 4 * 64, 512),
        "fc": (512, CLASSES),
    },
}


def federation() -> Federation:
    """Noisy class patterns, without flat areas: equal values in one pooling window would have no
    unique gradient."""
    rng = np.random.RandomState(7)
    total = sum(SIZES) + 4
    y = rng.randint(0, CLASSES, total)
    patterns = rng.randint(0, 128, (CLASSES, *SHAPE))
    x = (patterns[y] + rng.randint(0, 128, (total, *SHAPE))).astype(np.uint8)
    cuts = np.split(rng.permutation(total), np.cumsum(SIZES))
    return Federation.from_arrays(x, y, {"train": cuts[:-1]}, test=cuts[-1], classes=CLASSES)


def participation() -> Participation:
    return Participation(COHORT, COHORT, tuple(range(len(SIZES))))


def initial(model: str) -> dict[str, dict[str, np.ndarray]]:
    """Initial parameters: uniform in ±1/sqrt(fan in), float64, {group: {kernel, bias}}."""
    rng = np.random.RandomState(11)
    out = {}
    for group, shape in WEIGHTS[model].items():
        bound = 1 / np.sqrt(np.prod(shape[:-1]))
        out[group] = {
            "kernel": rng.uniform(-bound, bound, shape),
            "bias": rng.uniform(-bound, bound, shape[-1:]),
        }
    return out


def digest(tree: dict, entries: int) -> np.ndarray:
    """[leaves, 1 + entries]: of every leaf its norm and some entries at fixed places, repeated in a
    short leaf."""
    rows = []
    for group in sorted(tree):
        for leaf in ("kernel", "bias"):
            flat = np.asarray(tree[group][leaf], np.float64).reshape(-1)
            places = (np.arange(entries) * 7919 + 1) % flat.size
            rows.append([np.linalg.norm(flat), *flat[places]])
    return np.array(rows)


def batches_of_the_run() -> np.ndarray:
    """Rows of all minibatches of all rounds, one after another (both passes of Ditto)."""
    fed = federation()
    return np.concatenate(
        [
            rows
            for t in range(ROUNDS)
            for k in reporting(participation(), SEED, t)[0]
            for salt, epochs in ((0, EPOCHS), (1, METHODS["ditto"]["personal_epochs"]))
            for rows in minibatches(fed, SEED, t, k, batch_size=BATCH, epochs=epochs, salt=salt)
        ]
    ).astype(np.int16)
