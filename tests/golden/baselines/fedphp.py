"""FedPHP. In round t = 1..T a participant trains w from Θ on (1−λ) CE + λ MMD²(f_w(x), f_p(x)) with
its inherited model p_k frozen, then p_k ← (1−μ_t) w_k + μ_t p_k with μ_t = μ t/T, and uploads w_k.
Evaluated: p_k.
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
    features,
    fedavg,
    logits,
    mean,
    mmd,
    same_server,
    sgd,
    sizes,
)


def run(s: Setting) -> dict[str, np.ndarray]:
    lam, mu = s.options["fedphp"]["lam"], s.options["fedphp"]["mu"]
    server = s.initial
    inherited = [copy(s.initial) for _ in s.clients]
    record = Record()
    for t, cohort in enumerate(s.cohorts, start=1):
        uploads = []
        mix = mu * t / len(s.cohorts)
        for k in cohort:
            c, p = s.clients[k], inherited[k]
            target = features(p, c.x)
            w = sgd(server, lambda w: (1 - lam) * ce(w, c) + lam * mmd(features(w, c.x), target), s)
            inherited[k] = {n: (1 - mix) * w[n] + mix * p[n] for n in w}
            uploads.append(w)
        server = mean(uploads, sizes(s, cohort))
        record.after_round(
            server, [logits(p, c.test_x) for p, c in zip(inherited, s.clients, strict=True)]
        )
    return record.finish(count(server), count(server), p=inherited)


def check(s: Setting) -> None:
    """λ = 0 is FedAvg at the server, μ = 0 keeps the last trained model; MMD in closed form and by
    differences."""
    plain = run(s.but(fedphp={"lam": 0.0, "mu": 0.0}))
    same_server(plain, fedavg(s))
    last = sgd(fedavg(s)[1], lambda w: ce(w, s.clients[4]), s)
    np.testing.assert_allclose(plain["client/p/fc/kernel"][4], last["fc/kernel"], atol=1e-14)
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, -1.0]])
    closed = 2 * sum(1 - np.exp(-10 / (2 * bw)) for bw in (10, 15, 20, 50))
    np.testing.assert_allclose(float(mmd(a, b)), closed, rtol=1e-14)
    z, y = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)), torch.ones(5, 3)
    assert torch.autograd.gradcheck(lambda q: mmd(q, y), (z.requires_grad_(True),))
