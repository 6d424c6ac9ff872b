"""FedALA. From round 2 on a participant learns where to start: on the top layers θ̂ = θ_old + (Θ −
θ_old) ⊙ W, elsewhere θ̂ = Θ, and W ← clip(W − η_w ∇f(θ̂) ⊙ (Θ − θ_old), 0, 1): one pass, the first
time more than ten, until the last ten losses have a standard deviation below the threshold. Then E
epochs from θ̂; Θ ← Σ (n_k/Σn) θ_k. Evaluated: θ_k as it was left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from golden.baselines.common import (
    Client,
    Params,
    Record,
    Setting,
    ce,
    copy,
    count,
    fedavg,
    gradient,
    logits,
    mean,
    part,
    same_server,
    sgd,
    sizes,
)


def learn(
    old: Params, theta: Params, weights: Params, c: Client, first: bool, o: dict[str, Any]
) -> tuple[Params, int]:
    """The weights after ALA's passes, and how many passes there were."""
    losses: list[float] = []
    while True:
        start = blend(old, theta, weights)
        losses.append(float(ce(start, c)))  # before this pass's update of W
        grad = gradient(start, lambda w: ce(w, c))
        weights = {
            n: (w - o["lr_weights"] * grad[n] * (theta[n] - old[n])).clamp(0, 1)
            for n, w in weights.items()
        }
        converged = len(losses) > o["window"] and np.std(losses[-o["window"] :]) < o["threshold"]
        if not first or converged or len(losses) == o["cap"]:
            return weights, len(losses)


def blend(old: Params, theta: Params, weights: Params) -> Params:
    return {
        n: old[n] + (theta[n] - old[n]) * weights[n] if n in weights else theta[n] for n in theta
    }


def run(s: Setting, variant: str = "fedala") -> dict[str, np.ndarray]:
    o = s.options[variant]
    names = [n for n in s.initial if o["layers"] == "all" or n.split("/")[0] in o["layers"]]
    server = s.initial
    resident = [copy(s.initial) for _ in s.clients]
    weights = [{n: torch.ones_like(s.initial[n]) for n in names} for _ in s.clients]
    passes = [[0] * len(s.clients) for _ in s.cohorts]  # of ALA, per round
    learned: set[int] = set()  # clients that have learned weights before
    record = Record()
    for t, cohort in enumerate(s.cohorts, start=1):
        uploads = []
        for k in cohort:
            c, start = s.clients[k], server
            if t > 1:
                weights[k], passes[t - 1][k] = learn(
                    resident[k], server, weights[k], c, k not in learned, o
                )
                start = blend(resident[k], server, weights[k])
                learned.add(k)
            resident[k] = sgd(start, lambda w: ce(w, c), s)
            uploads.append(resident[k])
        server = mean(uploads, sizes(s, cohort))
        record.after_round(
            server, [logits(w, c.test_x) for w, c in zip(resident, s.clients, strict=True)]
        )
    out = record.finish(count(server), count(server), theta=resident, weights=weights)
    return {**out, "passes": np.array(passes)}


def check(s: Setting) -> None:
    """W ≡ 1 is FedAvg. The gradient by W is the stated product: finite differences."""
    same_server(run(s.but(fedala={"lr_weights": 0.0})), fedavg(s))
    theta, old, c = fedavg(s)[0], s.initial, s.clients[3]
    weights = {n: torch.full_like(a, 0.4) for n, a in old.items()}
    moved, passes = learn(
        old, theta, weights, c, False, {**s.options["fedala"], "lr_weights": 1e-3}
    )
    eps = 1e-6
    for name in weights:
        ahead, behind = ({**weights, name: part(weights, [name])[name]} for _ in range(2))
        ahead[name].view(-1)[2] += eps
        behind[name].view(-1)[2] -= eps
        slope = (ce(blend(old, theta, ahead), c) - ce(blend(old, theta, behind), c)) / (2 * eps)
        got = (weights[name] - moved[name]).view(-1)[2] / 1e-3
        np.testing.assert_allclose(float(got), float(slope), atol=1e-8)
    assert passes == 1
    out = run(s)
    assert ((out["client/weights/fc/kernel"] > 0) & (out["client/weights/fc/kernel"] < 1)).any()
    assert (
        (out["passes"][0] == 0).all() and out["passes"][1, 0] >= 11 and out["passes"][2, 3] == 1
    ), out["passes"]
