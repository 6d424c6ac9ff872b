"""FedAS. A participant receives Φ. Prototypes: class means of its training features under its *old*
backbone φ_k. Align: one pass of plain SGD on Φ (a copy) with Σ_c MSE(f(x of class c), prototype_c).
Train aligned Φ and its own head ψ_k jointly for E epochs. F_k = Σ_batches ‖∇ mean NLL‖² of the
trained model. Θ ← Σ (F_k/ΣF) w_k over all parameters. Evaluated: (latest Φ, ψ_k).
"""

from __future__ import annotations

import numpy as np
import torch
from golden.baselines import fedper
from golden.baselines.common import (
    BACKBONE,
    HEAD,
    Client,
    Params,
    Record,
    Setting,
    ce,
    class_mean_features,
    copy,
    count,
    features,
    gradient,
    logits,
    mean,
    part,
    sgd,
)
from torch import Tensor
from torch.nn import functional


def alignment(w: Params, c: Client, prototypes: Tensor) -> Tensor:
    """Σ over the classes present of the mean, over rows and features, of (f − prototype)²."""
    z = features(w, c.x)
    losses = [
        functional.mse_loss(z[c.y == label], prototypes[label].expand_as(z[c.y == label]))
        for label in torch.unique(c.y)
    ]
    return sum(losses)  # type: ignore[return-value]


def fisher(w: Params, c: Client) -> float:
    return sum(float((g**2).sum()) for g in gradient(w, lambda p: ce(p, c)).values())


def run(s: Setting, by_size: bool = False) -> dict[str, np.ndarray]:
    """`by_size`: average by n_k instead of F_k (for the check)."""
    align_lr = s.options["fedas"]["align_lr"]
    server = s.initial
    resident = [copy(s.initial) for _ in s.clients]
    traces = np.zeros((len(s.cohorts), len(s.clients)))
    record = Record()
    for t, cohort in enumerate(s.cohorts):
        weights = []
        for k in cohort:
            c = s.clients[k]
            prototypes = class_mean_features(features(resident[k], c.x), c.y)
            body = part(server, BACKBONE)
            body = sgd(
                body, lambda w: alignment(w, c, prototypes), s, epochs=1, lr=align_lr, plain=True
            )
            resident[k] = sgd({**body, **part(resident[k], HEAD)}, lambda w: ce(w, c), s)
            traces[t, k] = fisher(resident[k], c)
            weights.append(c.size if by_size else traces[t, k])
        server = mean([resident[k] for k in cohort], weights)
        shared = part(server, BACKBONE)
        predict = [
            logits({**shared, **part(resident[k], HEAD)}, c.test_x) for k, c in enumerate(s.clients)
        ]
        record.after_round(server, predict)
    return {**record.finish(count(server), count(server) + 1, model=resident), "fisher": traces}


def check(s: Setting) -> None:
    """No alignment and weights n_k is FedPer; the alignment loss by hand; the Fisher trace by
    finite differences."""
    reduced, expected = run(s.but(fedas={"align_lr": 0.0}), by_size=True), fedper.run(s)
    for name in BACKBONE:
        np.testing.assert_allclose(
            reduced[f"server/{name}"], expected[f"server/{name}"], atol=1e-13
        )
    np.testing.assert_allclose(reduced["logits"], expected["logits"], atol=1e-13)
    c, g = s.clients[3], torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    z = features(s.initial, c.x).numpy()
    by_hand = sum(
        np.mean([(z[i] - g[k].numpy()) ** 2 for i in range(c.size) if c.y[i] == k])
        for k in (0, 1, 3)
    )
    np.testing.assert_allclose(float(alignment(s.initial, c, g)), by_hand, rtol=1e-12)
    still = run(s.but(cohorts=((3,),), epochs=0))  # aligned and uploaded as it is: one plain step
    own = class_mean_features(features(s.initial, c.x), c.y)
    slope = gradient(part(s.initial, BACKBONE), lambda w: alignment(w, c, own))["fc1/kernel"]
    np.testing.assert_allclose(
        still["server/fc1/kernel"][0], s.initial["fc1/kernel"] - 0.01 * slope, atol=1e-15
    )
    total, eps = 0.0, 1e-6
    for name, leaf in s.initial.items():
        for place in range(leaf.numel()):
            ahead, behind = copy(s.initial), copy(s.initial)
            ahead[name].view(-1)[place] += eps
            behind[name].view(-1)[place] -= eps
            total += float((ce(ahead, c) - ce(behind, c)) / (2 * eps)) ** 2
    np.testing.assert_allclose(fisher(s.initial, c), total, rtol=1e-7)
