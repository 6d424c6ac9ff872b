"""FedFomo. The server holds every client's last upload and the affinity P (identity at the start).
A participant i gets the M uploads with the largest P_i (its own among them, ties to the smaller id,
fewer if fewer have uploaded) and computes on its validation rows ω_n = (L_i(θ_i) − L_i(θ_n)) /
(‖θ_n − θ_i‖ + 1e-5). If Σ max(ω, 0) > 0 it starts from Σ (ω_n⁺/Σω⁺) θ_n, else from θ_i; then E
epochs. P_i[n] += ω_n. Evaluated: θ_i.
"""

from __future__ import annotations

import numpy as np
import torch
from golden.baselines.common import (
    Record,
    Setting,
    ce,
    copy,
    count,
    distance,
    local_only,
    logits,
    mean,
    same_clients,
    sgd,
)
from torch.nn import functional


def run(s: Setting) -> dict[str, np.ndarray]:
    limit, clients = s.options["fedfomo"]["models"], range(len(s.clients))
    bank = [copy(s.initial) for _ in clients]
    affinity = np.eye(len(s.clients))
    seen: set[int] = set()
    record = Record()
    for cohort in s.cohorts:
        uploads = {}
        for i in cohort:
            c = s.clients[i]
            loss = lambda w: float(functional.cross_entropy(logits(w, c.val_x), c.val_y))
            chosen = sorted(seen, key=lambda n: (-affinity[i, n], n))[:limit]
            omega = {
                n: (loss(bank[i]) - loss(bank[n])) / (float(distance(bank[n], bank[i])) + 1e-5)
                for n in chosen
            }
            total = sum(max(o, 0.0) for o in omega.values())
            start = bank[i]
            if total > 0:
                start = mean([bank[n] for n in chosen], [max(omega[n], 0.0) for n in chosen])
            uploads[i] = sgd(start, lambda w: ce(w, c), s)
            for n in chosen:
                affinity[i, n] += omega[n]
        for i in cohort:  # the bank changes only after everybody has trained
            bank[i] = uploads[i]
        seen |= set(cohort)
        record.after_round(
            {"affinity": torch.tensor(affinity)},
            [logits(w, c.test_x) for w, c in zip(bank, s.clients, strict=True)],
        )
    size = count(s.initial)
    return record.finish(limit * size, size + limit, theta=bank)


def check(s: Setting) -> None:
    """With M = 1 and always the same cohort everybody only ever gets its own model: local training,
    P stays I."""
    alone = s.but(cohorts=((0, 1, 2),) * 3, fedfomo={"models": 1})
    out = run(alone)
    same_clients(out, "theta", local_only(alone))
    np.testing.assert_array_equal(out["server/affinity"][-1], np.eye(5))
    affinity = run(s)["server/affinity"]
    moved = (affinity[-1] - np.eye(5)).ravel()
    moved = moved[moved != 0]
    # both signs, no near tie
    assert (moved > 1e-3).any() and (moved < -1e-3).any() and (abs(moved) > 1e-6).all(), moved
