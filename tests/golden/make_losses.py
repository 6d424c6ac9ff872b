"""Cross-entropy and label smoothing by PyTorch:  python tests/golden/make_losses.py  writes
losses.npz (float64)."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden.stored import write

SMOOTHING = 0.2  # as PyTorch counts it: spread over all classes


def values() -> dict[str, np.ndarray]:
    """Logits [B, C], labels [B]; the mean losses, and the slope of cross-entropy."""
    rng = np.random.RandomState(3)
    logits, labels = rng.normal(0, 2, (5, 5)), rng.randint(0, 5, 5)
    z, y = torch.tensor(logits, requires_grad=True), torch.tensor(labels)
    plain = functional.cross_entropy(z, y)
    plain.backward()
    smoothed = functional.cross_entropy(z, y, label_smoothing=SMOOTHING)
    assert z.grad is not None
    return {
        "logits": logits,
        "labels": labels,
        "ce": np.array(plain.item()),
        "ce/slope": z.grad.numpy(),
        "smoothing": np.array(SMOOTHING),
        "ls": np.array(smoothed.item()),
    }


if __name__ == "__main__":
    write("losses", values())
