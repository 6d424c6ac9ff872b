"""FedAMP. For a participant i, over the clients j ≠ i that have uploaded before this round:
ξ_ij = α e^{−‖w_i−w_j‖²/σ}/σ, ξ_ii = 1 − Σ_j ξ_ij, u_i = Σ_j ξ_ij w_j + ξ_ii w_i.
The client goes on from its own w_i on f_i(w) + (λ/2α) ‖w − u_i‖². Evaluated: w_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from golden.baselines.common import (
    Params,
    Record,
    Setting,
    ce,
    copy,
    count,
    distance,
    local_only,
    logits,
    same_clients,
    sgd,
)


def message(i: int, bank: Sequence[Params], seen: set[int], alpha: float, sigma: float) -> Params:
    xi = {
        j: alpha * math.exp(-(float(distance(bank[i], bank[j])) ** 2) / sigma) / sigma
        for j in sorted(seen - {i})
    }
    own = 1 - sum(xi.values())
    return {n: own * bank[i][n] + sum(xi[j] * bank[j][n] for j in xi) for n in bank[i]}


def run(s: Setting) -> dict[str, np.ndarray]:
    lam, alpha, sigma = (s.options["fedamp"][o] for o in ("lam", "alpha", "sigma"))
    bank = [copy(s.initial) for _ in s.clients]
    seen: set[int] = set()
    record = Record()
    for cohort in s.cohorts:
        messages = {k: message(k, bank, seen, alpha, sigma) for k in cohort}
        for k in cohort:
            pull = lambda w: (
                lam / (2 * alpha) * sum(((w[n] - messages[k][n]) ** 2).sum() for n in w)
            )
            bank[k] = sgd(bank[k], lambda w: ce(w, s.clients[k]) + pull(w), s)
        seen |= set(cohort)
        record.after_round({}, [logits(w, c.test_x) for w, c in zip(bank, s.clients, strict=True)])
    return record.finish(count(s.initial), count(s.initial), w=bank)


def check(s: Setting) -> None:
    """λ = 0 is local training; far-apart clients (tiny σ) get their own model back as the
    message."""
    same_clients(run(s.but(fedamp={"lam": 0.0})), "w", local_only(s))
    lam, alpha = s.options["fedamp"]["lam"], s.options["fedamp"]["alpha"]
    far = run(s.but(fedamp={"sigma": 1e-4}))
    models = [s.initial] * len(s.clients)
    for cohort in s.cohorts:
        for k in cohort:
            start = models[k]
            pull = lambda w: 0.5 * lam / alpha * sum(((w[n] - start[n]) ** 2).sum() for n in w)
            models[k] = sgd(start, lambda w: ce(w, s.clients[k]) + pull(w), s)
    same_clients(far, "w", models)
    # the messages do matter
    assert abs(far["client/w/fc/kernel"] - run(s)["client/w/fc/kernel"]).max() > 1e-4
