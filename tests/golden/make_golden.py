"""Golden values of lenet5 and cnn4 from a PyTorch loop:  python tests/golden/make_golden.py  writes
lenet5.npz, cnn4.npz.

Everything a federated round does is written here once more with torch.nn, torch.optim.SGD and plain
loops, in float64: Conv2d on NCHW maps, autograd, PyTorch's own momentum and weight decay. From the
simulator come only the batches (see `draws.py`); the initial weights are transplanted, convolution
kernels HWIO -> OIHW, and the rows of the first dense layer from the flatten order (height, width,
channel) to (channel, height, width).
"""

from __future__ import annotations

import copy
import pathlib
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import jax  # noqa: E402
from golden import settings  # noqa: E402
from golden.draws import minibatches, reporting  # noqa: E402

SIDE = 4  # of the last map, on 28x28 images


class LeNet5(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc = (
            nn.Linear(256, 120),
            nn.Linear(120, 84),
            nn.Linear(84, settings.CLASSES),
        )

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc(functional.relu(self.fc2(x)))


class CNN4(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1, self.fc = nn.Linear(1024, 512), nn.Linear(512, settings.CLASSES)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.fc(functional.relu(self.fc1(torch.flatten(x, 1))))


NETS = {"lenet5": LeNet5, "cnn4": CNN4}


# ---- transplanting -------------------------------------------------------------------------------
def to_torch(params: dict, module: nn.Module) -> nn.Module:
    """Write {group: {kernel, bias}} into a module."""
    state = {}
    for group, leaves in params.items():
        kernel = leaves["kernel"]
        if kernel.ndim == 4:
            kernel = kernel.transpose(3, 2, 0, 1)  # HWIO -> OIHW
        elif group == "fc1":  # rows HWC -> CHW
            channels = kernel.shape[0] // SIDE**2
            kernel = (
                kernel.reshape(SIDE, SIDE, channels, -1)
                .transpose(2, 0, 1, 3)
                .reshape(kernel.shape)
                .T
            )
        else:
            kernel = kernel.T
        state[f"{group}.weight"], state[f"{group}.bias"] = (
            torch.tensor(a.copy()) for a in (kernel, leaves["bias"])
        )
    module.load_state_dict(state)
    return module


def from_torch(tensors: dict[str, torch.Tensor]) -> dict:
    """The inverse: named tensors as {group: {kernel, bias}} in the simulator's layout."""
    out: dict = {}
    for name, tensor in tensors.items():
        group, leaf = name.split(".")
        array = tensor.detach().numpy()
        if leaf == "weight":
            if array.ndim == 4:
                array = array.transpose(2, 3, 1, 0)
            elif group == "fc1":
                channels = array.shape[1] // SIDE**2
                array = (
                    array.T.reshape(channels, SIDE, SIDE, -1)
                    .transpose(1, 2, 0, 3)
                    .reshape(array.T.shape)
                )
            else:
                array = array.T
        out.setdefault(group, {})["kernel" if leaf == "weight" else "bias"] = array
    return out


# ---- the loop ------------------------------------------------------------------------------------
def train(
    start: dict,
    module: nn.Module,
    batches: list,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    momentum: float,
    decay: float,
    strength: float = 0.0,
    anchor: dict | None = None,
    shift: dict | None = None,
) -> dict:
    """One client's local training from `start`; a proximal term to `anchor`, or `shift` added to
    the gradients."""
    module.load_state_dict(start)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=settings.LR, momentum=momentum, weight_decay=decay
    )
    for rows in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(x[rows]), y[rows])
        if anchor is not None:
            loss = loss + strength / 2 * sum(
                ((p - anchor[n]) ** 2).sum() for n, p in module.named_parameters()
            )
        loss.backward()
        if shift is not None:
            for name, p in module.named_parameters():
                p.grad += shift[name]
        optimizer.step()
    return copy.deepcopy(module.state_dict())


def combine(fn, *states: dict) -> dict:
    return {name: fn(*(s[name] for s in states)) for name in states[0]}


def average(states: list, weights: list) -> dict:
    return combine(
        lambda *a: sum(w * t for w, t in zip(weights, a, strict=True)) / sum(weights), *states
    )


def run(model: str, method: str, options: dict) -> dict:
    """Three rounds of one method: what the server and the clients hold at the end."""
    fed, cohorts = settings.federation(), settings.participation()
    pixels = (np.asarray(fed.x, np.float64) / 255 - fed.mean) / fed.std
    x, y = (
        torch.tensor(pixels.transpose(0, 3, 1, 2).copy()),
        torch.tensor(np.asarray(fed.y, np.int64)),
    )
    module = to_torch(settings.initial(model), NETS[model]().double())
    theta = copy.deepcopy(module.state_dict())
    zero = combine(torch.zeros_like, theta)
    control, own = zero, [theta if method == "ditto" else zero for _ in settings.SIZES]
    usual: dict[str, Any] = dict(momentum=settings.MOMENTUM, decay=settings.DECAY)
    for t in range(settings.ROUNDS):
        cohort, _ = reporting(cohorts, settings.SEED, t)
        draw = lambda k, epochs=settings.EPOCHS, salt=0, t=t: minibatches(
            fed, settings.SEED, t, k, batch_size=settings.BATCH, epochs=epochs, salt=salt
        )
        ends, changes = [], []
        for k in cohort:
            batches = draw(k)
            if method == "scaffold":
                mine = own[k]
                end = train(
                    theta,
                    module,
                    batches,
                    x,
                    y,
                    momentum=0.0,
                    decay=settings.DECAY,
                    shift=combine(lambda c, ck: c - ck, control, mine),
                )
                own[k] = combine(
                    lambda ck, c, a, b: ck - c + (a - b) / (len(batches) * settings.LR),
                    mine,
                    control,
                    theta,
                    end,
                )
                changes.append(combine(torch.sub, own[k], mine))
            elif method == "fedprox":
                end = train(
                    theta, module, batches, x, y, **usual, strength=options["mu"], anchor=theta
                )
            else:
                end = train(theta, module, batches, x, y, **usual)
            if method == "ditto":
                own[k] = train(
                    own[k],
                    module,
                    draw(k, options["personal_epochs"], 1),
                    x,
                    y,
                    **usual,
                    strength=options["lam"],
                    anchor=theta,
                )
            ends.append(end)
        if method == "scaffold":
            mean = average(ends, [1] * len(ends))
            theta = combine(lambda old, new: old + options["server_lr"] * (new - old), theta, mean)
            control = combine(lambda c, *d: c + sum(d) / len(settings.SIZES), control, *changes)
        else:
            theta = average(ends, [settings.SIZES[k] for k in cohort])
    out = {"net": settings.digest(from_torch(theta), 40)}
    if method in ("scaffold", "ditto"):
        out["own"] = np.stack([settings.digest(from_torch(s), 6) for s in own])
    if method == "scaffold":
        out["control"] = settings.digest(from_torch(control), 40)
    return {f"{method}/{name}": value for name, value in out.items()}


def main() -> None:
    torch.set_num_threads(1)
    with jax.enable_x64(True):
        for model in settings.WEIGHTS:
            values: dict[str, Any] = {"batches": settings.batches_of_the_run()}
            for method, options in settings.METHODS.items():
                values |= run(model, method, options)
            np.savez_compressed(HERE / f"{model}.npz", **values)
            size = (HERE / f"{model}.npz").stat().st_size
            print(f"{model}.npz: {len(values)} arrays, {size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
