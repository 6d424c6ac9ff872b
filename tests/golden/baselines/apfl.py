"""APFL. On every batch: w ← SGD step on f(w); v ← SGD step on f(v); then, with w and v after their
steps and g_w, g_v the gradients these steps used (of the loss, without weight decay), α ← clip(α −
η [⟨v − w, α g_v + (1 − α) g_w⟩ + 0.02 α], 0, 1). At the end of the round v_k ← (1 − α) w_k + α v_k,
and w_k is uploaded. Evaluated: v_k.
"""

from __future__ import annotations

import numpy as np
import torch
from golden.baselines.common import (
    Params,
    Record,
    Setting,
    ce,
    copy,
    count,
    fedavg,
    logits,
    mean,
    same_server,
    sizes,
)


def train(
    s: Setting, theta: Params, v: Params, alpha: float, k: int
) -> tuple[Params, Params, float]:
    w, v = copy(theta), copy(v)
    branches = (w, v)
    optimisers = []
    for branch in branches:
        for leaf in branch.values():
            leaf.requires_grad_(True)
        optimisers.append(
            torch.optim.SGD(branch.values(), lr=s.lr, momentum=s.momentum, weight_decay=s.decay)
        )
    for _ in range(s.epochs):
        for branch, optimiser in zip(branches, optimisers, strict=True):
            optimiser.zero_grad()
            ce(branch, s.clients[k]).backward()
            optimiser.step()  # leaves .grad as the loss gave it
        slope = 0.0
        for name in w:
            grad = alpha * v[name].grad + (1 - alpha) * w[name].grad  # type: ignore[operator]
            slope += float(((v[name] - w[name]).detach() * grad).sum())
        alpha = float(np.clip(alpha - s.lr * (slope + 0.02 * alpha), 0.0, 1.0))
    w, v = copy(w), copy(v)
    return w, {n: (1 - alpha) * w[n] + alpha * v[n] for n in w}, alpha


def run(s: Setting) -> dict[str, np.ndarray]:
    server = s.initial
    personal = [copy(s.initial) for _ in s.clients]
    alphas = [s.options["apfl"]["alpha"]] * len(s.clients)
    record = Record()
    for cohort in s.cohorts:
        uploads = []
        for k in cohort:
            w, personal[k], alphas[k] = train(s, server, personal[k], alphas[k], k)
            uploads.append(w)
        server = mean(uploads, sizes(s, cohort))
        record.after_round(
            server, [logits(v, c.test_x) for v, c in zip(personal, s.clients, strict=True)]
        )
    return record.finish(count(server), count(server), v=personal, alpha=alphas)


def check(s: Setting) -> None:
    """The global branch is FedAvg whatever α; in round 1 both branches coincide, so α shrinks by
    0.02 η a step."""
    for alpha in (0.0, 0.5, 1.0):
        same_server(run(s.but(apfl={"alpha": alpha})), fedavg(s))
    first = run(s.but(cohorts=s.cohorts[:1], apfl={"alpha": 0.5}))
    np.testing.assert_allclose(
        first["client/alpha"][:3], 0.5 * (1 - 0.02 * s.lr) ** s.epochs, rtol=1e-12
    )
    last = run(s)["client/alpha"]
    assert ((last > 0.01) & (last < 0.99)).all(), last  # no client sits at the clip
