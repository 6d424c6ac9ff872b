"""FedBABU: the head stays Ψ⁰; φ_k ← SGD_E(Φ) with Ψ⁰ frozen; Φ ← Σ (n_k/Σn) φ_k.

Evaluated: a copy of (latest Φ, Ψ⁰), all of it fine-tuned for F epochs on the client's training
rows, then discarded.
"""

from __future__ import annotations

import numpy as np
import torch
from golden.baselines.common import (
    BACKBONE,
    HEAD,
    Record,
    Setting,
    ce,
    count,
    logits,
    mean,
    part,
    sgd,
    sizes,
)


def run(s: Setting) -> dict[str, np.ndarray]:
    tune_epochs = s.options["fedbabu"]["tune_epochs"]
    server, frozen = part(s.initial, BACKBONE), part(s.initial, HEAD)
    record = Record()
    for cohort in s.cohorts:
        trained = [
            sgd({**server, **frozen}, lambda w: ce(w, s.clients[k]), s, only=BACKBONE)
            for k in cohort
        ]
        server = mean([part(w, BACKBONE) for w in trained], sizes(s, cohort))
        tuned = [
            sgd({**server, **frozen}, lambda w: ce(w, c), s, epochs=tune_epochs) for c in s.clients
        ]
        record.after_round(
            server, [logits(w, c.test_x) for w, c in zip(tuned, s.clients, strict=True)]
        )
    return record.finish(count(server), count(server))


def check(s: Setting) -> None:
    """Without fine-tuning the prediction is the initial head on the server's backbone; one client
    is plain training."""
    out = run(s.but(fedbabu={"tune_epochs": 0}))
    server = {n: torch.tensor(out[f"server/{n}"][-1]) for n in BACKBONE}
    for k, c in enumerate(s.clients):
        np.testing.assert_allclose(
            out["logits"][-1, k], logits({**server, **part(s.initial, HEAD)}, c.test_x), atol=1e-13
        )
    alone = run(s.but(cohorts=((1,),)))
    expected = sgd(s.initial, lambda w: ce(w, s.clients[1]), s, only=BACKBONE)
    np.testing.assert_allclose(alone["server/fc1/kernel"][0], expected["fc1/kernel"], atol=1e-15)
