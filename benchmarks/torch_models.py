"""The benchmark networks in PyTorch, and local training of ONE client."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import ClientWork, Workload


class _Block(nn.Module):
    def __init__(self, wide_in: int, wide: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(wide_in, wide, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.down = nn.Sequential()
        if stride != 1:
            self.down = nn.Sequential(
                nn.Conv2d(wide_in, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.down(x))


class _ResNet18(nn.Module):
    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(_Block(64, 64, 1), _Block(64, 64, 1))
        self.layer2 = nn.Sequential(_Block(64, 128, 2), _Block(128, 128, 1))
        self.layer3 = nn.Sequential(_Block(128, 256, 2), _Block(256, 256, 1))
        self.layer4 = nn.Sequential(_Block(256, 512, 2), _Block(512, 512, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class _Plain(nn.Module):
    """mlp, lenet5_pad2 and cnn4: convolutions with pooling, then linear layers."""

    def __init__(self, weights: Mapping[str, np.ndarray], padding: int):
        super().__init__()
        self.order = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
        for name in self.order:
            shape = weights[name + ".weight"].shape
            pad = padding if name == "conv1" else 0
            convolution = len(shape) == 4
            self.add_module(
                name,
                (
                    nn.Conv2d(shape[1], shape[0], 5, padding=pad)
                    if convolution
                    else nn.Linear(shape[1], shape[0])
                ),
            )

    def forward(self, x):
        for name in self.order:
            layer = getattr(self, name)
            if name.startswith("conv"):
                x = F.max_pool2d(F.relu(layer(x)), 2)
            else:
                x = layer(x.flatten(1))
                x = x if name == "fc" else F.relu(x)
        return x


def make_model(workload: Workload, weights: Mapping[str, np.ndarray]) -> nn.Module:
    """The network of a workload, holding `weights`."""
    if workload.model == "resnet18":
        model: nn.Module = _ResNet18(workload.shape[2], workload.classes)
    else:
        model = _Plain(weights, padding=2 if workload.model == "lenet5_pad2" else 0)
    load(model, {name: torch.from_numpy(value) for name, value in weights.items()})
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a client sends: parameters and running statistics by name, sharing memory with the
    model."""
    return {
        name: t
        for name, t in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def load(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, target in tensors(model).items():
            target.copy_(values[name])


def train_client(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    work: ClientWork,
    workload: Workload,
) -> None:
    """Local SGD of ONE client, in place. images [n, C, H, W], labels [n]: the whole pool."""
    model.train()
    optimiser = torch.optim.SGD(
        model.parameters(),
        lr=workload.lr,
        momentum=workload.momentum,
        weight_decay=workload.weight_decay,
    )
    for rows in work.batches(workload.batch):
        picked = torch.from_numpy(rows).to(images.device)
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(images[picked]), labels[picked]).backward()
        optimiser.step()


def to_torch(
    images: np.ndarray, labels: np.ndarray, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool in torch's layout [n, C, H, W]."""
    pool = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return pool.to(device), torch.from_numpy(labels).to(device)
