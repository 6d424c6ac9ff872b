"""FedRep: ψ_k for E_h epochs with φ frozen, then φ for E epochs with ψ_k frozen; Φ ← Σ (n_k/Σn)
φ_k.

Evaluated: (latest Φ, ψ_k).
"""

from __future__ import annotations

import numpy as np
from golden.baselines import fedper
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


def run(s: Setting, body: tuple[str, ...] = BACKBONE) -> dict[str, np.ndarray]:
    """`body`: what the second pass trains (the check lets the head take part)."""
    head_epochs = s.options["fedrep"]["head_epochs"]
    server = part(s.initial, BACKBONE)
    own = [part(s.initial, HEAD) for _ in s.clients]
    record = Record()
    for cohort in s.cohorts:
        bodies = []
        for k in cohort:
            loss = lambda w: ce(w, s.clients[k])
            w = sgd({**server, **own[k]}, loss, s, epochs=head_epochs, only=HEAD)
            w = sgd(w, loss, s, only=body)
            own[k] = part(w, HEAD)
            bodies.append(part(w, BACKBONE))
        server = mean(bodies, sizes(s, cohort))
        record.after_round(
            server, [logits({**server, **own[k]}, c.test_x) for k, c in enumerate(s.clients)]
        )
    return record.finish(count(server), count(server), head=own)


def check(s: Setting) -> None:
    """No head pass and an unfrozen head is FedPer; the two passes of one client by hand."""
    reduced, expected = run(s.but(fedrep={"head_epochs": 0}), BACKBONE + HEAD), fedper.run(s)
    for name, value in expected.items():
        np.testing.assert_allclose(reduced[name], value, atol=1e-13)
    c, out = s.clients[1], run(s.but(cohorts=((1,),)))
    w = sgd(s.initial, lambda w: ce(w, c), s, epochs=3, only=HEAD)
    # the second pass left it alone
    np.testing.assert_array_equal(out["client/head/fc/kernel"][1], w["fc/kernel"])
    fixed = part(w, HEAD)
    w = sgd(part(s.initial, BACKBONE), lambda b: ce({**b, **fixed}, c), s)
    np.testing.assert_allclose(out["server/fc1/kernel"][0], w["fc1/kernel"], atol=1e-15)
