"""The benchmark networks as plain shapes: initial weights and multiply-adds, in NumPy only.

Names and layouts of the weights are those of a torch `state_dict` (convolutions [out, in, k, k],
linear [out, in]); `torch_models` and `jax_models` build the same networks from them.
"""

from __future__ import annotations

import numpy as np

from benchmarks.workloads import Workload

STATISTICS = ("running_mean", "running_var")  # averaged like weights, but not trained
_STAGES = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))  # ResNet-18: in, out, stride


def _conv_nets(workload: Workload) -> list[tuple[str, tuple[int, ...], int]]:
    """(layer, weight shape, spatial positions of its output) of the networks without batch
    normalisation."""
    height, _, channels = workload.shape
    if workload.model == "mlp":
        return [("fc1", (64, height * height * channels), 1), ("fc", (workload.classes, 64), 1)]
    if workload.model == "lenet5_pad2":
        # padding 2 keeps the size; then 5×5 without padding
        first, second = (height, height // 2 - 4)
        flat = 16 * (second // 2) ** 2
        return [
            ("conv1", (6, channels, 5, 5), first**2),
            ("conv2", (16, 6, 5, 5), second**2),
            ("fc1", (120, flat), 1),
            ("fc2", (84, 120), 1),
            ("fc", (workload.classes, 84), 1),
        ]
    if workload.model == "cnn4":
        first = height - 4
        second = first // 2 - 4
        flat = 64 * (second // 2) ** 2
        return [
            ("conv1", (32, channels, 5, 5), first**2),
            ("conv2", (64, 32, 5, 5), second**2),
            ("fc1", (512, flat), 1),
            ("fc", (workload.classes, 512), 1),
        ]
    raise ValueError(f"unknown model '{workload.model}'; allowed: cnn4, lenet5_pad2, mlp, resnet18")


def _resnet18(workload: Workload) -> list[tuple[str, tuple[int, ...], int, str]]:
    """(convolution, weight shape, output positions, its batch normalisation) and the head without
    one."""
    half = lambda size: (size + 1) // 2
    size = half(workload.shape[0])
    rows: list[tuple[str, tuple[int, ...], int, str]] = []
    rows.append(("conv1", (64, workload.shape[2], 7, 7), size**2, "bn1"))
    size = half(size)
    for stage, (wide_in, wide, stride) in enumerate(_STAGES, 1):
        size = half(size) if stride == 2 else size
        for block in range(2):
            at, first_in = f"layer{stage}.{block}.", wide_in if block == 0 else wide
            rows.append((at + "conv1", (wide, first_in, 3, 3), size**2, at + "bn1"))
            rows.append((at + "conv2", (wide, wide, 3, 3), size**2, at + "bn2"))
            if block == 0 and stride == 2:
                rows.append((at + "down.0", (wide, first_in, 1, 1), size**2, at + "down.1"))
    return [*rows, ("fc", (workload.classes, 512), 1, "")]


def init_weights(workload: Workload) -> dict[str, np.ndarray]:
    """Float32 weights by name, U(±1/√fan_in); batch normalisation starts at scale 1, mean 0,
    variance 1."""
    rng = np.random.default_rng([workload.seed, 3])
    weights: dict[str, np.ndarray] = {}
    resnet = workload.model == "resnet18"
    layers = _resnet18(workload) if resnet else [(*row, "") for row in _conv_nets(workload)]
    for name, shape, _, norm in layers:
        bound = 1 / np.sqrt(np.prod(shape[1:]))
        weights[name + ".weight"] = rng.uniform(-bound, bound, shape).astype(np.float32)
        if norm:
            for part, value in (
                ("weight", 1),
                ("bias", 0),
                ("running_mean", 0),
                ("running_var", 1),
            ):
                weights[f"{norm}.{part}"] = np.full(shape[0], value, np.float32)
        else:
            weights[name + ".bias"] = rng.uniform(-bound, bound, shape[0]).astype(np.float32)
    return weights


def multiply_adds(workload: Workload) -> int:
    """Multiply-adds of one training example: 3 × forward, without the input gradient of the first
    layer.

    Convolutions are counted as written (every tap at every output position), linear layers as
    matrices; element-wise work is not counted.
    """
    rows = _resnet18(workload) if workload.model == "resnet18" else _conv_nets(workload)
    forward = [int(np.prod(row[1])) * row[2] for row in rows]
    return 3 * sum(forward) - forward[0]


def trainable(weights: dict[str, np.ndarray]) -> int:
    """Number of trained parameters.

    >>> from benchmarks.workloads import WORKLOADS
    >>> [trainable(init_weights(WORKLOADS[w])) for w in ("W1", "W2", "W4", "W5")]
    [61706, 878538, 50890, 11181642]
    """
    return sum(v.size for name, v in weights.items() if not name.endswith(STATISTICS))
