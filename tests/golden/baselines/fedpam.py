"""FedPAM. L = CE(W z + b) + λ L_pcl with anchors (W P_k)_c; one joint SGD step on θ, W, b and the
private P_k (no weight decay on P_k); (θ, W, b) averaged by n_k, P_k stays. Evaluated: W P_k z + b
with the latest θ, W, b.

L_pcl = mean_i −log [ e^{z̃_i·w̃_{y_i}/τ} / (Σ_c e^{z̃_i·w̃_c/τ} + Σ_{j: y_j ≠ y_i} e^{z̃_i·z̃_j/τ})
], ã = a / max(‖a‖, 1e-8).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from golden.baselines.common import (
    Params,
    Record,
    Setting,
    ce,
    count,
    features,
    fedavg,
    mean,
    part,
    same_server,
    sgd,
    sizes,
)
from torch import Tensor
from torch.nn import functional


def pcl(z: Tensor, y: Tensor, anchors: Tensor, tau: float) -> Tensor:
    """z [n, d], anchors [C, d]."""
    z, anchors = (
        functional.normalize(z, dim=1, eps=1e-8),
        functional.normalize(anchors, dim=1, eps=1e-8),
    )
    to_anchors = z @ anchors.T / tau  # [n, C]
    to_others = (z @ z.T / tau).masked_fill(y[:, None] == y[None, :], -math.inf)  # [n, n]
    denominator = torch.logsumexp(torch.cat([to_anchors, to_others], 1), 1)
    return (denominator - to_anchors.gather(1, y[:, None])[:, 0]).mean()


def anchors_of(w: Params) -> Tensor:
    return w["fc/kernel"].T @ w["pam"]  # [C, d] = W P


def run(s: Setting) -> dict[str, np.ndarray]:
    lam, tau = s.options["fedpam"]["lam"], s.options["fedpam"]["tau"]
    server = s.initial
    pams = [torch.eye(len(s.initial["fc/kernel"])) for _ in s.clients]
    record = Record()
    for cohort in s.cohorts:
        uploads = []
        for k in cohort:
            c = s.clients[k]
            loss = lambda w: ce(w, c) + lam * pcl(features(w, c.x), c.y, anchors_of(w), tau)
            w = sgd({**server, "pam": pams[k]}, loss, s, no_decay=("pam",))
            pams[k] = w["pam"]
            uploads.append(part(w, server))
        server = mean(uploads, sizes(s, cohort))
        adjusted = [anchors_of({**server, "pam": p}) for p in pams]
        record.after_round(
            server,
            [
                features(server, c.test_x) @ a.T + server["fc/bias"]
                for a, c in zip(adjusted, s.clients, strict=True)
            ],
        )
    return record.finish(count(server), count(server), pam=pams)


def check(s: Setting) -> None:
    """PCL against a double loop, scale-free, differentiable; λ = 0 is FedAvg with P = I."""
    out = run(s.but(fedpam={"lam": 0.0}))
    same_server(out, fedavg(s))
    np.testing.assert_array_equal(out["client/pam"], np.broadcast_to(np.eye(8), (5, 8, 8)))
    rng = np.random.RandomState(4)
    z, anchors, y, tau = rng.normal(size=(6, 3)), rng.normal(size=(4, 3)), [0, 1, 1, 3, 0, 1], 0.3
    unit = lambda a: a / np.sqrt((a**2).sum())
    total = 0.0
    for i in range(6):
        top = math.exp(unit(z[i]) @ unit(anchors[y[i]]) / tau)
        bottom = sum(math.exp(unit(z[i]) @ unit(a) / tau) for a in anchors)
        bottom += sum(math.exp(unit(z[i]) @ unit(z[j]) / tau) for j in range(6) if y[j] != y[i])
        total -= math.log(top / bottom) / 6
    zt, at, yt = torch.tensor(z), torch.tensor(anchors), torch.tensor(y)
    np.testing.assert_allclose(float(pcl(zt, yt, at, tau)), total, rtol=1e-13)
    np.testing.assert_allclose(float(pcl(3 * zt, yt, 0.1 * at, tau)), total, rtol=1e-13)
    assert torch.autograd.gradcheck(
        lambda a, b: pcl(a, yt, b, tau), (zt.requires_grad_(True), at.requires_grad_(True))
    )
    # the run meets all-zero features: finite, and they weigh as e⁰ = 1
    zero = torch.zeros(1, 3, requires_grad=True)
    value = pcl(torch.cat([zero, zt.detach()]), torch.tensor([2, *y]), at.detach(), tau)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(zero.grad).all()  # type: ignore[arg-type]
