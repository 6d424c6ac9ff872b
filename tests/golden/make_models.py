"""Golden values of networks and layers from PyTorch:  python tests/golden/make_models.py  writes
models_*.npz.

`test_models.py` and `test_layers.py` compare with the files always, and with PyTorch itself where
it is installed. Weights and inputs come from NumPy, so that nothing of the simulator is in the
files. A network's gradients are stored as fingerprints (see `fingerprint`): ResNet-18 has eleven
million of them.
"""

from __future__ import annotations

import math
import pathlib
import zlib
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
CLASSES, BATCH = 7, 4
NETS = {
    "lenet5": (28, 28, 1),
    "lenet5_pad2": (28, 28, 1),
    "cnn4": (32, 32, 3),
    "resnet18": (32, 32, 3),
}
POOL_SIZES = ((4, 4), (5, 6), (7, 1))
PLACES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


# ---- inputs --------------------------------------------------------------------------------------
def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def leaf(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of one leaf, e.g. of 'params/conv1/kernel': of the usual size, statistics not at
    their start."""
    rng, last = rng_of(path), path.rsplit("/", 1)[-1]
    if last in ("scale", "var"):
        return rng.uniform(0.5, 1.5, shape)
    scale = math.sqrt(3 / math.prod(shape[:-1])) if last == "kernel" else 0.1
    return rng.uniform(-scale, scale, shape)


def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(x [B,H,W,C], y [B])."""
    rng = rng_of(name)
    return rng.standard_normal((BATCH, *NETS[name])), rng.integers(0, CLASSES, BATCH)


def tied_windows() -> np.ndarray:
    # many ties, and zeros
    return np.random.default_rng(2).integers(-2, 3, (2, 6, 6, 1)).astype(np.float32)


def stem_input(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A map with ties `[2,H,W,3]` and the gradient `[2,h,w,3]` that comes back to its pooled
    form."""
    x = np.random.default_rng(3).integers(-3, 4, (2, *size, 3)).astype(np.float32)
    pooled = (2, *((n + 1) // 2 for n in size), 3)
    return x, np.random.default_rng(4).standard_normal(pooled).astype(np.float32)


def norm_input() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x [5,2,2,3], which examples are real [5], the gradient that comes back, scale [3]); bias =
    scale - 1."""
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((5, 2, 2, 3)) * 3 + 1, np.array([1, 0, 1, 1, 0], bool)
    return (
        x,
        mask,
        rng.standard_normal(x.shape) * mask[:, None, None, None],
        np.array([1.0, 2.0, 3.0]),
    )


def fingerprint(a: np.ndarray) -> np.ndarray:
    """[21] of an array: its norm, four sums with random signs, 16 entries. A wrong entry anywhere
    changes the sums.

    >>> fingerprint(np.ones(4))[0].item(), fingerprint(np.ones(4)).shape
    (2.0, (21,))
    """
    flat = np.asarray(a, np.float64).ravel()
    signs = np.random.default_rng(flat.size).integers(0, 2, (4, flat.size)) * 2.0 - 1
    return np.concatenate(
        [[np.linalg.norm(flat)], signs @ flat, flat[np.linspace(0, flat.size - 1, 16).astype(int)]]
    )


# ---- PyTorch -------------------------------------------------------------------------------------
def torch_net(name: str) -> tuple[Any, Any]:
    """(module, forward) in double precision; submodules are named as ours."""
    import torch
    from torch import nn

    shape = NETS[name]
    if name == "resnet18":
        return torch_resnet18(shape[2])
    pad = 2 if name == "lenet5_pad2" else 0
    convs, hidden = {"cnn4": ((32, 64), (512,))}.get(name, ((6, 16), (120, 84)))
    layers, side, ci = {}, shape[0], shape[2]
    for i, co in enumerate(convs, 1):
        layers[f"conv{i}"] = nn.Conv2d(ci, co, 5, padding=pad if i == 1 else 0)
        side, ci = (side + (2 * pad if i == 1 else 0) - 4) // 2, co
    width = side * side * ci
    for i, w in enumerate(hidden, 1):
        layers[f"fc{i}"], width = nn.Linear(width, w), w
    net = nn.ModuleDict({**layers, "fc": nn.Linear(width, CLASSES)}).double()

    def forward(x):
        for i in (1, 2):
            x = nn.functional.max_pool2d(torch.relu(net[f"conv{i}"](x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # our order: height, width, channel
        for i in range(1, len(hidden) + 1):
            x = torch.relu(net[f"fc{i}"](x))
        return net["fc"](x)

    return net, forward


def torch_resnet18(channels: int) -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, ci, co, stride):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(ci, co, 3, stride, 1, bias=False), nn.BatchNorm2d(co)
            self.conv2, self.bn2 = nn.Conv2d(co, co, 3, 1, 1, bias=False), nn.BatchNorm2d(co)
            if stride > 1:
                self.conv_shortcut = nn.Conv2d(ci, co, 1, stride, bias=False)
                self.bn_shortcut = nn.BatchNorm2d(co)

        def forward(self, x):
            y = torch.relu(self.bn1(self.conv1(x)))
            y = self.bn2(self.conv2(y))
            return torch.relu(
                y + (self.bn_shortcut(self.conv_shortcut(x)) if hasattr(self, "bn_shortcut") else x)
            )

    stem = nn.ModuleDict(
        {"conv": nn.Conv2d(channels, 64, 7, 2, 3, bias=False), "bn": nn.BatchNorm2d(64)}
    )
    layers, ci = {"stem": stem}, 64
    for i, co in enumerate((64, 128, 256, 512), 1):
        layers[f"stage{i}"] = nn.ModuleDict(
            {"block1": Block(ci, co, 1 if i == 1 else 2), "block2": Block(co, co, 1)}
        )
        ci = co
    net = nn.ModuleDict({**layers, "fc": nn.Linear(512, CLASSES)}).double()

    def forward(x):
        x = nn.functional.max_pool2d(torch.relu(net["stem"]["bn"](net["stem"]["conv"](x))), 3, 2, 1)
        for i in range(1, 5):
            x = net[f"stage{i}"]["block2"](net[f"stage{i}"]["block1"](x))
        return net["fc"](x.mean((2, 3)))

    return net, forward


def ours(a: np.ndarray) -> np.ndarray:
    """A PyTorch weight in our order: OIHW -> HWIO, [out,in] -> [in,out]."""
    return a.transpose(2, 3, 1, 0) if a.ndim == 4 else a.T if a.ndim == 2 else a


def run_net(name: str) -> dict[str, np.ndarray]:
    """One training pass: 'logits', and 'params/…' (gradients of the mean cross-entropy) and
    'batch_stats/…' as ours."""
    import torch

    net, forward = torch_net(name)
    tensors = {}
    for path, tensor in [*net.named_parameters(), *net.named_buffers()]:
        group, last = path.rsplit(".", 1)
        if last == "num_batches_tracked":
            continue
        kind = "batch_stats" if last.startswith("running") else "params"
        if last == "weight":
            word = "scale" if tensor.ndim == 1 else "kernel"
        else:
            word = {torch_word: our_word for our_word, torch_word in PLACES.items()}[last]
        ours_path = "/".join([kind, *group.split("."), word])
        shape = ours(np.empty(tensor.shape)).shape
        value = leaf(ours_path, shape)
        value = (
            value.transpose(3, 2, 0, 1)
            if value.ndim == 4
            else value.T
            if value.ndim == 2
            else value
        )
        tensor.data.copy_(torch.tensor(np.ascontiguousarray(value)))
        tensors[ours_path] = tensor
    x, y = images(name)
    out = forward(torch.tensor(x.transpose(0, 3, 1, 2)))
    torch.nn.functional.cross_entropy(out, torch.tensor(y)).backward()
    results = {
        path: ours((t.grad if path.startswith("params") else t).numpy())
        for path, t in tensors.items()
    }
    return {"logits": out.detach().numpy(), **results}


def run_layers() -> dict[str, np.ndarray]:
    """Max-pooling of ties, the stem's pooling, BatchNorm of the real examples: values and
    gradients, channels last."""
    import torch
    from torch.nn import functional

    t = torch.tensor(tied_windows(), requires_grad=True)
    (
        functional.max_pool2d(torch.relu(t.permute(0, 3, 1, 2)[:, :, 1:5, 1:5]), 2) * 210
    ).sum().backward()
    results = {"tied": t.grad.numpy()}
    for size in POOL_SIZES:
        x, weight = stem_input(size)
        t = torch.tensor(x, requires_grad=True)
        y = functional.max_pool2d(torch.relu(t.permute(0, 3, 1, 2)), 3, 2, 1).permute(0, 2, 3, 1)
        (y * torch.tensor(weight)).sum().backward()
        results |= {
            f"stem/{size}/value": y.detach().numpy(),
            f"stem/{size}/gradient": t.grad.numpy(),
        }
    x, mask, weight, scale = norm_input()
    bn = torch.nn.BatchNorm2d(3).double()
    bn.weight.data, bn.bias.data = torch.tensor(scale), torch.tensor(scale - 1)
    bn.running_mean.fill_(0.5)
    bn.running_var.fill_(2.0)
    t = torch.tensor(x[mask], requires_grad=True)
    y = bn(t.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    (y * torch.tensor(weight[mask])).sum().backward()
    return results | {
        "norm/value": y.detach().numpy(),
        "norm/gradient": t.grad.numpy(),
        "norm/scale": (bn.weight.grad + bn.bias.grad).numpy(),
        "norm/mean": bn.running_mean.numpy(),
        "norm/var": bn.running_var.numpy(),
    }


# ---- files ---------------------------------------------------------------------------------------
def stored(name: str) -> dict[str, np.ndarray]:
    """The committed values of a network (gradients as fingerprints) or of 'layers'."""
    with np.load(HERE / f"models_{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def as_stored(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a file holds of `run_net`."""
    return {key: fingerprint(a) if "/" in key else a for key, a in results.items()}


if __name__ == "__main__":
    for name in NETS:
        np.savez_compressed(HERE / f"models_{name}.npz", **as_stored(run_net(name)))
    np.savez_compressed(HERE / "models_layers.npz", **run_layers())
