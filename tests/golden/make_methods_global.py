"""FedNTD, FedSAM and FedFA's statistics by PyTorch:  python tests/golden/make_methods_global.py
writes methods_global.npz.

A network 16-5-3 is trained in float64 on all examples of client 1 of the tiny federation at once,
by torch.optim.SGD and autograd; weights are drawn with NumPy's frozen `RandomState` and stored, so
that nothing depends on JAX's random bits.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import tiny
from golden.stored import write

CLIENT = 1  # three examples, a batch holds four: every epoch is one step
LR, MOMENTUM, DECAY, STEPS = 0.05, 0.9, 5e-4, 2
BETA, TAU, RHO = 2.0, 1.5, 0.4
LAYERS = {"fc1.kernel": (16, 5), "fc1.bias": (5,), "fc.kernel": (5, 3), "fc.bias": (3,)}
Net = dict[str, torch.Tensor]


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Uniform in ±1/2, exactly representable in single precision."""
    rng = np.random.RandomState(seed)
    return {
        name: rng.uniform(-0.5, 0.5, shape).astype(np.float32).astype(np.float64)
        for name, shape in shapes.items()
    }


def logits(w: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w["fc1.kernel"] + w["fc1.bias"]) @ w["fc.kernel"] + w["fc.bias"]


def train(
    start: dict[str, np.ndarray], gradient: Callable[[Net], tuple[torch.Tensor, ...]]
) -> dict[str, np.ndarray]:
    """STEPS steps of PyTorch's SGD; gradient(w) -> gradients in the order of w."""
    w = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
    sgd = torch.optim.SGD(list(w.values()), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for _ in range(STEPS):
        for leaf, grad in zip(w.values(), gradient(w), strict=True):
            leaf.grad = grad
        sgd.step()
    return {name: value.detach().numpy() for name, value in w.items()}


def not_true(
    teacher: torch.Tensor, student: torch.Tensor, y: torch.Tensor, tau: float
) -> torch.Tensor:
    """τ²·KL over the C−1 other classes, mean over the batch, entry by entry."""
    others = torch.tensor([[c for c in range(student.shape[1]) if c != label] for label in y])
    q = torch.softmax(teacher.gather(1, others) / tau, 1)
    log_p = torch.log_softmax(student.gather(1, others) / tau, 1)
    return tau**2 * functional.kl_div(log_p, q, reduction="batchmean")


def divergence() -> dict[str, np.ndarray]:
    """The divergence of five examples with four classes, and its slope."""
    rng, tau = np.random.RandomState(0), 1.7
    teacher, student, y = rng.normal(size=(5, 4)), rng.normal(size=(5, 4)), rng.randint(0, 4, 5)
    z = torch.tensor(student, requires_grad=True)
    value = not_true(torch.tensor(teacher), z, torch.tensor(y), tau)
    value.backward()
    assert z.grad is not None
    out = {
        "teacher": teacher,
        "student": student,
        "y": y,
        "tau": tau,
        "value": value.item(),
        "slope": z.grad.numpy(),
    }
    return {f"ntd/{name}": np.asarray(value) for name, value in out.items()}


def trainings() -> dict[str, np.ndarray]:
    """Plain SGD, FedNTD and FedSAM from the same weights."""
    fed, start = tiny.federation(), weights(LAYERS, 1)
    rows = fed.client_rows(CLIENT)
    images, labels = np.asarray(fed.x)[rows], np.asarray(fed.y)[rows]
    x, y = (
        torch.tensor(images.reshape(len(rows), -1).astype(np.float64)),
        torch.tensor(labels.astype(np.int64)),
    )
    teacher = logits({name: torch.tensor(value) for name, value in start.items()}, x)

    def plain(w: Net) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(functional.cross_entropy(logits(w, x), y), list(w.values()))

    def distilled(w: Net) -> tuple[torch.Tensor, ...]:
        z = logits(w, x)
        return torch.autograd.grad(
            functional.cross_entropy(z, y) + BETA * not_true(teacher, z, y, TAU), list(w.values())
        )

    def sharp(w: Net) -> tuple[torch.Tensor, ...]:
        grads = plain(w)
        norm = torch.sqrt(torch.stack([(g**2).sum() for g in grads]).sum())
        moved = (v + RHO * g / (norm + 1e-12) for v, g in zip(w.values(), grads, strict=True))
        return plain({name: v.detach().requires_grad_() for name, v in zip(w, moved, strict=True)})

    out = {"x": images, "y": labels, **{f"start/{name}": value for name, value in start.items()}}
    for method, gradient in (("plain", plain), ("fedntd", distilled), ("fedsam", sharp)):
        out |= {f"{method}/{name}": value for name, value in train(start, gradient).items()}
    return out


def feature_statistics() -> dict[str, np.ndarray]:
    """Of the first 3x3 convolution of client 1's images: channel means and deviations of its maps,
    mean over images."""
    fed, conv = tiny.federation(), weights({"kernel": (3, 3, 1, 2), "bias": (2,)}, 2)
    images = torch.tensor(np.asarray(fed.x)[fed.client_rows(CLIENT)].astype(np.float64)).permute(
        0, 3, 1, 2
    )
    kernel = torch.tensor(conv["kernel"]).permute(3, 2, 0, 1)  # HWIO -> OIHW
    maps = torch.relu(functional.conv2d(images, kernel, torch.tensor(conv["bias"]), padding=1))
    deviation = torch.sqrt(maps.var((2, 3), correction=1) + 1e-6)
    out = {**conv, "mean": maps.mean((2, 3)).mean(0).numpy(), "std": deviation.mean(0).numpy()}
    return {f"fedfa/{name}": value for name, value in out.items()}


def values() -> dict[str, np.ndarray]:
    return {**divergence(), **trainings(), **feature_statistics()}


if __name__ == "__main__":
    write("methods_global", values())
