"""Local SGD of the mlp in NumPy alone: forward and backward pass by hand, steps in PyTorch's
order."""

from __future__ import annotations

import numpy as np

SEED, ROUNDS, BATCH, CLASSES = 3, 3, 8, 4


LR, MOMENTUM, DECAY = 0.1, 0.9, 0.01


LAYERS = ("fc1", "fc2", "fc")


def gradients(params: dict, x: np.ndarray, y: np.ndarray) -> tuple[float, dict]:
    """Mean softmax cross-entropy of the mlp over a minibatch x [b, d], and its gradient."""
    inputs, before = [x], []
    for name in LAYERS:
        before.append(inputs[-1] @ params[name]["kernel"] + params[name]["bias"])
        inputs.append(np.maximum(before[-1], 0))
    logits = before[-1]
    logits = logits - logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    back = np.exp(log_p)
    back[np.arange(len(y)), y] -= 1
    back /= len(y)  # dL/dlogits [b, C]
    grads = {}
    for i in reversed(range(len(LAYERS))):
        grads[LAYERS[i]] = {"kernel": inputs[i].T @ back, "bias": back.sum(0)}
        if i:
            back = (back @ params[LAYERS[i]]["kernel"].T) * (before[i - 1] > 0)
    return -log_p[np.arange(len(y)), y].mean(), grads


def each(fn, *trees: dict) -> dict:
    """fn leaf by leaf over trees {layer: {kernel, bias}}."""
    return {
        layer: {leaf: fn(*(t[layer][leaf] for t in trees)) for leaf in ("kernel", "bias")}
        for layer in trees[0]
    }


def sgd(
    params: dict,
    batches: list,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    momentum: float,
    decay: float,
    correction=lambda w: None,
) -> tuple[dict, float]:
    """torch.optim.SGD over the given minibatches; correction(params) is added to the gradient
    before weight decay.

    Returns (params, mean loss over all examples that were seen).
    """
    velocity, losses_, seen = each(np.zeros_like, params), 0.0, 0
    for rows in batches:
        loss, grad = gradients(params, images[rows], labels[rows])
        more = correction(params)
        if more is not None:
            grad = each(np.add, grad, more)
        grad = each(lambda g, w: g + decay * w, grad, params)
        velocity = each(lambda v, g: momentum * v + g, velocity, grad)
        params = each(lambda w, v: w - LR * v, params, velocity)
        losses_, seen = losses_ + loss * len(rows), seen + len(rows)
    return params, losses_ / max(seen, 1)


def mean_of(trees: list, weights: list) -> dict:
    return each(
        lambda *leaves: sum(w * a for w, a in zip(weights, leaves, strict=True)) / sum(weights),
        *trees,
    )


def pull(strength: float, anchor: dict):
    return lambda w: each(lambda a, b: strength * (a - b), w, anchor)
