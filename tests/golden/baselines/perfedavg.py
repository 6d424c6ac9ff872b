"""Per-FedAvg, first order. Every step: w̃ = w − α∇f(w; b1), w ← w − β∇f(w̃; b2); Θ ← Σ (n_k/Σn)
w_k.

Here b1 = b2 = all training rows. Evaluated: Θ − α∇f_k(Θ) on the client's training rows. No
momentum, no weight decay.
"""

from __future__ import annotations

import numpy as np
from golden.baselines.common import (
    Client,
    Params,
    Record,
    Setting,
    ce,
    count,
    fedavg,
    gradient,
    logits,
    mean,
    same_server,
    sizes,
)


def step(w: Params, at: Params, c: Client, lr: float) -> Params:
    """w − lr ∇f(at)."""
    grad = gradient(at, lambda p: ce(p, c))
    return {n: w[n] - lr * grad[n] for n in w}


def run(s: Setting) -> dict[str, np.ndarray]:
    alpha, beta = s.options["perfedavg"]["alpha"], s.options["perfedavg"]["beta"]
    server = s.initial
    record = Record()
    for cohort in s.cohorts:
        uploads = []
        for k in cohort:
            w, c = server, s.clients[k]
            for _ in range(s.epochs):
                w = step(w, step(w, w, c, alpha), c, beta)
            uploads.append(w)
        server = mean(uploads, sizes(s, cohort))
        record.after_round(
            server, [logits(step(server, server, c, alpha), c.test_x) for c in s.clients]
        )
    return record.finish(count(server), count(server))


def check(s: Setting) -> None:
    """α = 0 is FedAvg with plain steps of size β."""
    same_server(
        run(s.but(perfedavg={"alpha": 0.0})),
        fedavg(s, plain=True, lr=s.options["perfedavg"]["beta"]),
    )
