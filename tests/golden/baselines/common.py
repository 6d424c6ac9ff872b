"""What all reference loops share: the MLP, one optimiser call, the weighted average, and the record
of a run.

A model is a flat dictionary of float64 tensors, "fc1/kernel", "fc1/bias", "fc/kernel", "fc/bias".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from golden.baselines import settings
from torch import Tensor
from torch.nn import functional

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
Params = dict[str, Tensor]
BACKBONE, HEAD = ("fc1/kernel", "fc1/bias"), ("fc/kernel", "fc/bias")


@dataclasses.dataclass
class Client:
    x: Tensor  # [n, 36]
    y: Tensor  # [n]
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor

    @property
    def size(self) -> int:
        return len(self.y)

    @property
    def counts(self) -> Tensor:  # [C]
        return torch.bincount(self.y, minlength=settings.CLASSES)


@dataclasses.dataclass
class Setting:
    """The run as tensors; checks replace single fields."""

    clients: list[Client]
    initial: Params
    options: dict[str, dict[str, Any]]
    cohorts: Sequence[Sequence[int]] = settings.COHORTS
    epochs: int = settings.EPOCHS
    lr: float = settings.LR
    momentum: float = settings.MOMENTUM
    decay: float = settings.DECAY

    def but(self, **changes: Any) -> Setting:
        """A copy with some fields changed; the options of single methods are given as
        `fedamp={...}`."""
        fields = {f.name for f in dataclasses.fields(self)}
        options = {
            **self.options,
            **{m: {**self.options[m], **o} for m, o in changes.items() if m not in fields},
        }
        return dataclasses.replace(
            self, options=options, **{k: v for k, v in changes.items() if k in fields}
        )


def flat(tree: dict[str, dict[str, np.ndarray]]) -> Params:
    return {
        f"{g}/{leaf}": torch.tensor(a) for g, leaves in tree.items() for leaf, a in leaves.items()
    }


def load() -> Setting:
    x, y, rows = settings.pool()
    xt, yt = torch.tensor(x.reshape(len(x), -1)), torch.tensor(y)
    clients = [
        Client(xt[train], yt[train], xt[val], yt[val], xt[test])
        for train, val, test in zip(rows["train"], rows["val"], rows["test"], strict=True)
    ]
    return Setting(clients, flat(settings.initial()), settings.OPTIONS)


# ---- the model -----------------------------------------------------------------------------------
def features(w: Params, x: Tensor) -> Tensor:  # [n, d]
    return functional.relu(x @ w["fc1/kernel"] + w["fc1/bias"])


def head(w: Params, z: Tensor) -> Tensor:  # [n, C]
    return z @ w["fc/kernel"] + w["fc/bias"]


def logits(w: Params, x: Tensor) -> Tensor:
    return head(w, features(w, x))


def ce(w: Params, c: Client) -> Tensor:
    """Mean cross-entropy over the training rows of a client."""
    return functional.cross_entropy(logits(w, c.x), c.y)


# ---- training and averaging ----------------------------------------------------------------------
def copy(w: Params) -> Params:
    return {name: leaf.detach().clone() for name, leaf in w.items()}


def part(w: Params, names: Iterable[str]) -> Params:
    return {name: w[name].detach().clone() for name in names}


def sgd(
    w: Params,
    loss: Callable[[Params], Tensor],
    s: Setting,
    *,
    epochs: int | None = None,
    lr: float | None = None,
    only: Iterable[str] | None = None,
    plain: bool = False,
    no_decay: Iterable[str] = (),
) -> Params:
    """A fresh torch.optim.SGD on the leaves `only` (default all), one full-batch step per epoch;
    the rest is frozen."""
    w = copy(w)
    trained = tuple(w if only is None else only)
    for name in trained:
        w[name].requires_grad_(True)
    spared = set(no_decay)
    groups = [
        {
            "params": [w[n] for n in trained if n not in spared],
            "weight_decay": 0.0 if plain else s.decay,
        },
        {"params": [w[n] for n in trained if n in spared], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.SGD(
        [g for g in groups if g["params"]],
        lr=s.lr if lr is None else lr,
        momentum=0.0 if plain else s.momentum,
    )
    for _ in range(s.epochs if epochs is None else epochs):
        optimiser.zero_grad()
        loss(w).backward()
        optimiser.step()
    return copy(w)


def gradient(w: Params, loss: Callable[[Params], Tensor]) -> Params:
    leaves = {name: leaf.detach().clone().requires_grad_(True) for name, leaf in w.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


def mean(models: Sequence[Params], weights: Iterable[float]) -> Params:
    """Σ weights_k models_k / Σ weights."""
    share = np.asarray(list(weights), np.float64)
    share = share / share.sum()
    return {
        name: sum(float(a) * m[name] for a, m in zip(share, models, strict=True))
        for name in models[0]
    }  # type: ignore


def sizes(s: Setting, cohort: Sequence[int]) -> list[int]:
    return [s.clients[k].size for k in cohort]


def distance(a: Params, b: Params) -> Tensor:
    """Euclidean distance over all parameters."""
    return torch.sqrt(sum(((a[n] - b[n]) ** 2).sum() for n in a))  # type: ignore


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Biased MMD² of two feature batches [n, d]: kernels exp(-‖·‖²/(2 bw)) summed over bw, mean
    over all n² pairs."""

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        square = ((p[:, None, :] - q[None, :, :]) ** 2).sum(-1)  # [n, n]
        return sum(torch.exp(-square / (2 * bw)) for bw in (10.0, 15.0, 20.0, 50.0))  # type: ignore

    return (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)).mean()


def class_mean_features(z: Tensor, y: Tensor) -> Tensor:
    """Mean feature of every class [C, d]; zero where the class is absent."""
    member = functional.one_hot(y, settings.CLASSES).to(z.dtype)  # [n, C]
    return (member.T @ z) / member.sum(0).clamp(min=1)[:, None]


# ---- the record of a run -------------------------------------------------------------------------
class Record:
    """Collects what is stored: the server after every round, every client's test logits after every
    round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Tensor]] = []
        self.predictions: list[Tensor] = []

    def after_round(self, server: Params, predictions: Sequence[Tensor]) -> None:
        self.rounds.append(copy(server))
        # [clients, rows, C]
        self.predictions.append(torch.stack([p.detach() for p in predictions]))

    def finish(self, down: int, up: int, **state: Sequence[Any]) -> dict[str, np.ndarray]:
        """Names: server/<leaf> [rounds, ...], client/<state>/<leaf> [clients, ...], logits, floats
        = (down, up)."""
        out = {
            f"server/{n}": torch.stack([r[n] for r in self.rounds]).numpy() for n in self.rounds[0]
        }
        for name, per_client in state.items():
            if isinstance(per_client[0], dict):
                for leaf in per_client[0]:
                    out[f"client/{name}/{leaf}"] = torch.stack(
                        [c[leaf] for c in per_client]
                    ).numpy()
            else:
                out[f"client/{name}"] = np.stack([np.asarray(c) for c in per_client])
        return {
            **out,
            "logits": torch.stack(self.predictions).numpy(),
            "floats": np.array([down, up]),
        }


def count(w: Params) -> int:
    return sum(leaf.numel() for leaf in w.values())


# ---- yardsticks of the checks --------------------------------------------------------------------
def fedavg(s: Setting, loss: Callable[[Params, Client], Tensor] = ce, **how: Any) -> list[Params]:
    """The server's model after every round of FedAvg."""
    theta, out = s.initial, []
    for cohort in s.cohorts:
        trained = [sgd(theta, lambda w: loss(w, s.clients[k]), s, **how) for k in cohort]
        theta = mean(trained, sizes(s, cohort))
        out.append(theta)
    return out


def local_only(s: Setting) -> list[Params]:
    """Every client's own model after the last round, without any exchange."""
    models = [s.initial] * len(s.clients)
    for cohort in s.cohorts:
        for k in cohort:
            models[k] = sgd(models[k], lambda w: ce(w, s.clients[k]), s)
    return models


def same_server(
    result: dict[str, np.ndarray], expected: Sequence[Params], names: Iterable[str] | None = None
) -> None:
    for name in expected[0] if names is None else names:
        np.testing.assert_allclose(
            result[f"server/{name}"], torch.stack([e[name] for e in expected]), atol=1e-13
        )


def same_clients(result: dict[str, np.ndarray], state: str, expected: Sequence[Params]) -> None:
    for name in expected[0]:
        np.testing.assert_allclose(
            result[f"client/{state}/{name}"], torch.stack([e[name] for e in expected]), atol=1e-13
        )


def check(s: Setting) -> None:
    """FedAvg here against backpropagation, momentum and weight decay written out in NumPy."""
    theta = {n: a.numpy().copy() for n, a in s.initial.items()}
    for cohort, expected in zip(s.cohorts, fedavg(s), strict=True):
        total = {n: np.zeros_like(a) for n, a in theta.items()}
        for k in cohort:
            x, y = s.clients[k].x.numpy(), s.clients[k].y.numpy()
            w, buffer = (
                {n: a.copy() for n, a in theta.items()},
                {n: np.zeros_like(a) for n, a in theta.items()},
            )
            for _ in range(s.epochs):
                z = np.maximum(x @ w["fc1/kernel"] + w["fc1/bias"], 0)
                e = np.exp(z @ w["fc/kernel"] + w["fc/bias"])
                d_out = (e / e.sum(1, keepdims=True) - np.eye(settings.CLASSES)[y]) / len(y)
                d_hidden = (d_out @ w["fc/kernel"].T) * (z > 0)
                grad = {
                    "fc1/kernel": x.T @ d_hidden,
                    "fc1/bias": d_hidden.sum(0),
                    "fc/kernel": z.T @ d_out,
                    "fc/bias": d_out.sum(0),
                }
                for n in w:
                    buffer[n] = s.momentum * buffer[n] + grad[n] + s.decay * w[n]
                    w[n] -= s.lr * buffer[n]
            for n in w:
                total[n] += len(y) * w[n] / sum(sizes(s, cohort))
        theta = total
        for n in theta:
            np.testing.assert_allclose(theta[n], expected[n], atol=1e-14)
