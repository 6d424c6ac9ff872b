"""pFedMe. A participant sets w = θ̃ = Θ. Every batch: K steps θ̃ ← θ̃ − η_p [∇f(θ̃) + λ (θ̃ − w) +
0.001 θ̃], then w ← w − η λ (w − θ̃); θ̃ goes on to the next batch. Θ ← (1 − β) Θ + β Σ (n_k/Σn)
w_k. Evaluated: θ̃_k as it was left.
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
    gradient,
    logits,
    mean,
    same_clients,
    sgd,
    sizes,
)


def run(s: Setting) -> dict[str, np.ndarray]:
    o = s.options["pfedme"]
    server = s.initial
    personal = [copy(s.initial) for _ in s.clients]
    record = Record()
    for cohort in s.cohorts:
        uploads = []
        for k in cohort:
            w, p = copy(server), copy(server)
            for _ in range(s.epochs):
                for _ in range(o["inner_steps"]):
                    grad = gradient(p, lambda q: ce(q, s.clients[k]))
                    full = {
                        n: grad[n] + o["lam"] * (p[n] - w[n]) + o["decay_personal"] * p[n]
                        for n in p
                    }
                    p = {n: p[n] - o["lr_personal"] * full[n] for n in p}
                w = {n: w[n] - s.lr * o["lam"] * (w[n] - p[n]) for n in w}
            personal[k] = p
            uploads.append(w)
        average = mean(uploads, sizes(s, cohort))
        server = {n: (1 - o["beta"]) * server[n] + o["beta"] * average[n] for n in server}
        record.after_round(
            server, [logits(p, c.test_x) for p, c in zip(personal, s.clients, strict=True)]
        )
    return record.finish(count(server), count(server), theta=personal)


def check(s: Setting) -> None:
    """λ = 0 leaves the server's model alone, and θ̃ is plain SGD with weight decay 0.001; many
    steps reach the prox."""
    out = run(s.but(pfedme={"lam": 0.0}))
    for name, value in s.initial.items():
        np.testing.assert_allclose(out[f"server/{name}"][-1], value, atol=1e-15)
    plain = s.but(momentum=0.0, decay=0.001)
    same_clients(
        out,
        "theta",
        [sgd(s.initial, lambda w: ce(w, c), plain, epochs=6, lr=0.01) for c in s.clients],
    )
    # the proximal point: ∇f(θ̃) + 0.001 θ̃ = λ (w − θ̃) = (w − w⁺)/η
    far = run(
        s.but(
            cohorts=((0,),),
            epochs=1,
            pfedme={"inner_steps": 500, "lam": 200.0, "lr_personal": 0.004, "beta": 1.0},
        )
    )
    p = {n: torch.tensor(far[f"client/theta/{n}"][0]) for n in s.initial}
    grad = gradient(p, lambda q: ce(q, s.clients[0]))
    for n, value in s.initial.items():
        moved = value - s.lr * (grad[n] + 0.001 * p[n])
        np.testing.assert_allclose(far[f"server/{n}"][0], moved, atol=1e-12)
