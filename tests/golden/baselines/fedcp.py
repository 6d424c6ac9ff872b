"""FedCP, deterministic gate. z = f(x); context v = Σ_c W_p,c / ‖·‖ of the private head h_p as the
round begins; gate (r, s) = softmax over the pair of reshape(ReLU(LayerNorm(Linear(z ⊙ v))), (2,
d)); logits = h_p(r ⊙ z) + h_g(s ⊙ z). Loss CE + λ MMD²(z, f_received(x)); trained: f, h_p and the
policy network, h_g frozen. Then h_g ← ½ h_p + ½ h_g and f, h_g and the policy network are averaged
by n_k; h_p stays. Evaluated: latest f, h_g, policy; own h_p, context from it.
"""

from __future__ import annotations

import numpy as np
import torch
from golden.baselines import settings
from golden.baselines.common import (
    BACKBONE,
    HEAD,
    Params,
    Record,
    Setting,
    count,
    features,
    flat,
    head,
    mean,
    mmd,
    part,
    sgd,
    sizes,
)
from torch import Tensor
from torch.nn import functional

OWN = ("own/kernel", "own/bias")


def context(w: Params) -> Tensor:
    total = w["own/kernel"].sum(1)  # [d]: the class vectors of h_p added up
    return total / total.norm().clamp(min=1e-12)


def gate(w: Params, z: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(r, s), [n, d] each, r + s = 1: the first d outputs of the policy network belong to r."""
    hidden = (z * v) @ w["cpn_dense/kernel"] + w["cpn_dense/bias"]  # [n, 2d]
    hidden = functional.layer_norm(
        hidden, hidden.shape[1:], w["cpn_norm/scale"], w["cpn_norm/bias"], eps=1e-5
    )
    pair = functional.softmax(functional.relu(hidden).reshape(len(z), 2, -1), dim=1)
    return pair[:, 0], pair[:, 1]


def predict(w: Params, x: Tensor, v: Tensor) -> Tensor:
    z = features(w, x)
    r, rest = gate(w, z, v)
    return (r * z) @ w["own/kernel"] + w["own/bias"] + head(w, rest * z)


def run(s: Setting) -> dict[str, np.ndarray]:
    lam, policy = s.options["fedcp"]["lam"], flat(settings.policy())
    server = {**s.initial, **policy}
    own = [
        {"own/kernel": s.initial["fc/kernel"], "own/bias": s.initial["fc/bias"]} for _ in s.clients
    ]
    record = Record()
    for cohort in s.cohorts:
        uploads = []
        for k in cohort:
            c, v = s.clients[k], context(own[k])
            target = features(server, c.x)

            def loss(w: Params) -> Tensor:
                return functional.cross_entropy(predict(w, c.x, v), c.y) + lam * mmd(
                    features(w, c.x), target
                )

            w = sgd({**server, **own[k]}, loss, s, only=(*BACKBONE, *OWN, *policy))
            own[k] = part(w, OWN)
            mixed = {n: 0.5 * w[n.replace("fc/", "own/")] + 0.5 * w[n] for n in HEAD}
            uploads.append({**part(w, server), **mixed})
        server = mean(uploads, sizes(s, cohort))
        tests = [
            predict({**server, **own[k]}, c.test_x, context(own[k]))
            for k, c in enumerate(s.clients)
        ]
        record.after_round(server, tests)
    heads = [{n.replace("own/", "fc/"): a for n, a in o.items()} for o in own]
    return record.finish(count(server), count(server), head=heads)


def check(s: Setting) -> None:
    """A silent policy network halves the features for both heads; LayerNorm and the pairs by hand;
    the payload."""
    w = {
        **s.initial,
        **flat(settings.policy()),
        "own/kernel": 2 * s.initial["fc/kernel"],
        "own/bias": s.initial["fc/bias"],
    }
    x, v = s.clients[0].x, context(w)
    np.testing.assert_allclose(float(v.norm()), 1, rtol=1e-14)
    silent = {**w, "cpn_norm/scale": torch.zeros(16)}
    z = features(w, x)
    expected = 1.5 * z @ w["fc/kernel"] + 2 * w["fc/bias"]
    np.testing.assert_allclose(predict(silent, x, v), expected, atol=1e-14)
    hidden = (z * v).numpy() @ w["cpn_dense/kernel"].numpy() + w["cpn_dense/bias"].numpy()
    hidden = (hidden - hidden.mean(1, keepdims=True)) / np.sqrt(hidden.var(1, keepdims=True) + 1e-5)
    hidden = np.maximum(hidden, 0)
    r = 1 / (1 + np.exp(hidden[:, 8:] - hidden[:, :8]))
    np.testing.assert_allclose(gate(w, z, v)[0], r, atol=1e-14)
    alone = run(s.but(cohorts=((1,),)))
    # h_g was frozen
    half = 0.5 * alone["client/head/fc/kernel"][1] + 0.5 * s.initial["fc/kernel"].numpy()
    np.testing.assert_allclose(alone["server/fc/kernel"][0], half, atol=1e-15)
    d, classes = 8, 4
    model = 36 * d + d + d * classes + classes
    np.testing.assert_array_equal(run(s)["floats"], model + 2 * d * d + 6 * d)
