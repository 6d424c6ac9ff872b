"""FedRoD (linear personal head). One joint step on CE(Ψ(f) + log(n_kc + 1e-8)) + CE(stop[Ψ(f)] +
ψ_k(stop[f])): φ and Ψ learn from the first term only, ψ_k from the second only. Upload φ, Ψ; ψ_k
stays. Evaluated: Ψ(f) + ψ_k(f), latest Φ, Ψ.
"""

from __future__ import annotations

import numpy as np
import torch
from golden.baselines.common import (
    HEAD,
    Client,
    Params,
    Record,
    Setting,
    count,
    features,
    fedavg,
    head,
    logits,
    mean,
    part,
    same_server,
    sgd,
    sizes,
)
from torch import Tensor
from torch.nn import functional


def balanced(w: Params, c: Client) -> Tensor:
    return functional.cross_entropy(logits(w, c.x) + torch.log(c.counts + 1e-8), c.y)


def both(w: Params, c: Client) -> Tensor:
    z = features(w, c.x).detach()
    private = {"fc/kernel": w["own/kernel"], "fc/bias": w["own/bias"]}
    return balanced(w, c) + functional.cross_entropy(head(w, z).detach() + head(private, z), c.y)


def run(s: Setting) -> dict[str, np.ndarray]:
    server = s.initial
    own = [part(s.initial, HEAD) for _ in s.clients]
    record = Record()
    for cohort in s.cohorts:
        uploads = []
        for k in cohort:
            start = {**server, "own/kernel": own[k]["fc/kernel"], "own/bias": own[k]["fc/bias"]}
            w = sgd(start, lambda w: both(w, s.clients[k]), s)
            own[k] = {"fc/kernel": w["own/kernel"], "fc/bias": w["own/bias"]}
            uploads.append(part(w, server))
        server = mean(uploads, sizes(s, cohort))
        predict = [
            logits(server, c.test_x) + head(own[k], features(server, c.test_x))
            for k, c in enumerate(s.clients)
        ]
        record.after_round(server, predict)
    return record.finish(count(server), count(server), head=own)


def check(s: Setting) -> None:
    """The server runs FedAvg with balanced softmax; the private head alone, by hand in NumPy for
    one step."""
    same_server(run(s), fedavg(s, balanced))
    c, w = s.clients[1], s.initial
    z = features(w, c.x).numpy()
    e = np.exp(2 * head(w, torch.tensor(z)).numpy())  # Ψ = ψ_k at the start
    error = (e / e.sum(1, keepdims=True) - np.eye(4)[c.y]) / c.size
    expected = w["fc/kernel"].numpy() - s.lr * (z.T @ error + s.decay * w["fc/kernel"].numpy())
    out = run(s.but(cohorts=((1,),), epochs=1))
    np.testing.assert_allclose(out["client/head/fc/kernel"][1], expected, atol=1e-14)
