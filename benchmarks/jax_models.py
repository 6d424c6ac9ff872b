"""The benchmark networks in plain JAX (`lax.conv`), and one SGD step of ONE client on a masked
mini-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.models import STATISTICS
from benchmarks.workloads import Workload

Weights = dict[str, Any]
PLAIN_ORDER = ("conv1", "conv2", "fc1", "fc2", "fc")  # dictionaries come out of jit sorted by name


def to_jax(weights: Mapping[str, np.ndarray], workload: Workload) -> Weights:
    """From torch's layouts: convolutions [k, k, in, out], linear [in, out], channels flattened
    last."""
    out = {}
    last_channels = 0
    for name, value in weights.items():
        if value.ndim == 4:
            out[name], last_channels = value.transpose(2, 3, 1, 0), value.shape[0]
        elif value.ndim == 2 and name == "fc1.weight" and last_channels:
            side = math.isqrt(value.shape[1] // last_channels)
            grid = value.reshape(value.shape[0], last_channels, side, side)
            out[name] = grid.transpose(2, 3, 1, 0).reshape(-1, value.shape[0])
        elif value.ndim == 2:
            out[name] = value.T
        else:
            out[name] = value
    return {name: jnp.asarray(value) for name, value in out.items()}


def from_jax(weights: Weights, workload: Workload) -> dict[str, np.ndarray]:
    """The inverse of `to_jax`."""
    out = {}
    last_channels = 0
    for name, value in (
        (name, np.asarray(weights[name])) for name in sorted(weights)
    ):  # conv* before fc*
        if value.ndim == 4:
            out[name], last_channels = value.transpose(3, 2, 0, 1), value.shape[3]
        elif value.ndim == 2 and name == "fc1.weight" and last_channels:
            side = math.isqrt(value.shape[0] // last_channels)
            grid = value.reshape(side, side, last_channels, value.shape[1])
            out[name] = grid.transpose(3, 2, 0, 1).reshape(value.shape[1], -1)
        elif value.ndim == 2:
            out[name] = value.T
        else:
            out[name] = value
    return out


def split(weights: Weights) -> tuple[Weights, Weights]:
    """(trained parameters, running statistics)."""
    stats = {n: v for n, v in weights.items() if n.endswith(STATISTICS)}
    return {n: v for n, v in weights.items() if n not in stats}, stats


def _conv(x, w, stride=1, padding=0):
    return lax.conv_general_dilated(
        x, w, (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _max_pool(x, window, stride, padding=0):
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), pads
    )


def _plain(params, x, padding):
    for name in (n for n in PLAIN_ORDER if n + ".weight" in params):
        w, b = params[name + ".weight"], params[name + ".bias"]
        if name.startswith("conv"):
            x = _max_pool(
                jax.nn.relu(_conv(x, w, padding=padding if name == "conv1" else 0) + b), 2, 2
            )
        else:
            x = x.reshape(x.shape[0], -1) @ w + b
            x = x if name == "fc" else jax.nn.relu(x)
    return x


def _resnet18(params, stats, x, mask):
    """Training mode, batch statistics over the examples that are on; (logits, new running
    statistics)."""
    new = dict(stats)

    def norm(x, name):
        on = mask[:, None, None, None]
        count = mask.sum() * x.shape[1] * x.shape[2]
        mean = (x * on).sum((0, 1, 2)) / jnp.maximum(count, 1)
        var = (jnp.square(x - mean) * on).sum((0, 1, 2)) / jnp.maximum(count, 1)
        unbiased = var * count / jnp.maximum(count - 1, 1)
        for part, value in (("running_mean", mean), ("running_var", unbiased)):
            key = f"{name}.{part}"
            new[key] = 0.9 * stats[key] + 0.1 * lax.stop_gradient(value)
        return (x - mean) * lax.rsqrt(var + 1e-5) * params[name + ".weight"] + params[
            name + ".bias"
        ]

    x = _max_pool(jax.nn.relu(norm(_conv(x, params["conv1.weight"], 2, 3), "bn1")), 3, 2, 1)
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{stage}.{block}.", 2 if stage > 1 and block == 0 else 1
            y = jax.nn.relu(norm(_conv(x, params[at + "conv1.weight"], stride, 1), at + "bn1"))
            y = norm(_conv(y, params[at + "conv2.weight"], 1, 1), at + "bn2")
            if at + "down.0.weight" in params:
                x = norm(_conv(x, params[at + "down.0.weight"], stride), at + "down.1")
            x = jax.nn.relu(x + y)
    return x.mean((1, 2)) @ params["fc.weight"] + params["fc.bias"], new


def forward(workload: Workload, params: Weights, stats: Weights, x, mask):
    """(logits [B, classes], new running statistics) in training mode."""
    if workload.model == "resnet18":
        return _resnet18(params, stats, x, mask)
    return _plain(params, x, 2 if workload.model == "lenet5_pad2" else 0), stats


def sgd_step(workload: Workload, params: Weights, momentum: Weights, stats: Weights, x, y, mask):
    """One step of ONE client, in torch's order: g ← g + wd·p, v ← m·v + g, p ← p − lr·v. x [B, H,
    W, C]."""

    def loss(params):
        logits, new_stats = forward(workload, params, stats, x, mask)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]
        return (nll * mask).sum() / jnp.maximum(mask.sum(), 1), new_stats

    grads, stats = jax.grad(loss, has_aux=True)(params)
    if workload.weight_decay:
        grads = jax.tree.map(lambda g, p: g + workload.weight_decay * p, grads, params)
    if workload.momentum:
        momentum = grads = jax.tree.map(lambda v, g: workload.momentum * v + g, momentum, grads)
    return jax.tree.map(lambda p, g: p - workload.lr * g, params, grads), momentum, stats


def zero_momentum(workload: Workload, params: Weights) -> Weights:
    return jax.tree.map(jnp.zeros_like, params) if workload.momentum else {}
