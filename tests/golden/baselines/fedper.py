"""FedPer: (φ_k, ψ_k) ← SGD_E(Φ, ψ_k) jointly; Φ ← Σ (n_k/Σn) φ_k; ψ_k stays. Evaluated: (latest Φ,
ψ_k)."""

from __future__ import annotations

import numpy as np
from golden.baselines.common import (
    BACKBONE,
    HEAD,
    Record,
    Setting,
    ce,
    count,
    fedavg,
    local_only,
    logits,
    mean,
    part,
    same_server,
    sgd,
    sizes,
)


def run(s: Setting, shared: tuple[str, ...] = BACKBONE) -> dict[str, np.ndarray]:
    private = [n for n in s.initial if n not in shared]
    server = part(s.initial, shared)
    own = [part(s.initial, private) for _ in s.clients]
    record = Record()
    for cohort in s.cohorts:
        trained = {k: sgd({**server, **own[k]}, lambda w: ce(w, s.clients[k]), s) for k in cohort}
        for k in cohort:
            own[k] = part(trained[k], private)
        server = mean([part(trained[k], shared) for k in cohort], sizes(s, cohort))
        record.after_round(
            server, [logits({**server, **own[k]}, c.test_x) for k, c in enumerate(s.clients)]
        )
    return record.finish(count(server), count(server), head=own)


def check(s: Setting) -> None:
    """Everything shared is FedAvg; a client alone trains locally; who never took part still has the
    initial head."""
    same_server(run(s, BACKBONE + HEAD), fedavg(s))
    alone = s.but(cohorts=((1,), (1,)))
    expected, out = local_only(alone)[1], run(alone)
    np.testing.assert_allclose(out["client/head/fc/kernel"][1], expected["fc/kernel"], atol=1e-14)
    np.testing.assert_allclose(out["server/fc1/kernel"][1], expected["fc1/kernel"], atol=1e-14)
    early = run(s.but(cohorts=s.cohorts[:2]))
    np.testing.assert_array_equal(early["client/head/fc/kernel"][4], s.initial["fc/kernel"])
