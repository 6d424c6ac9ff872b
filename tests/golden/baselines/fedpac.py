"""FedPAC. A participant k receives Φ, its head ψ_k and the global class prototypes g.
(1) From the received Φ, before training: prior π, class means m_c, h_c = π_c m_c,
    v = (1/n_k) [Σ_c π_c E[‖f‖² | c] − Σ_c π_c² ‖m_c‖²].
(2) The head alone, its own learning rate. (3) φ alone, E epochs of CE + λ MSE(f, g_y), with m_y
where g_y is unknown; no second term in round 1. (4) Upload φ, ψ, v, h, and the class means of the
*trained* φ. Server: φ by n_k, prototypes by n_kc; for participant i: α_i = argmin over the simplex
of αᵀ (diag(v) + D_i) α, D_i[j, l] = Σ_c ⟨h_ic − h_jc, h_ic − h_lc⟩, weights below 1e-3 set to 0,
then renormalised; ψ_i ← Σ_j α_ij ψ_j. Evaluated: (latest Φ, ψ_k).
"""

from __future__ import annotations

import itertools

import numpy as np
import scipy.optimize
import torch
from golden.baselines import fedrep, settings
from golden.baselines.common import (
    BACKBONE,
    HEAD,
    Client,
    Params,
    Record,
    Setting,
    ce,
    class_mean_features,
    count,
    features,
    logits,
    mean,
    part,
    sgd,
    sizes,
)
from torch import Tensor
from torch.nn import functional


def statistics(phi: Params, c: Client) -> tuple[Tensor, Tensor, float]:
    """Class means m [C, d], h [C, d] and the variance v of a client under a backbone."""
    z = features(phi, c.x)
    prior = c.counts / c.size
    m = class_mean_features(z, c.y)
    # E[‖f‖² | c]; 0 for an absent class
    second = class_mean_features((z**2).sum(1, keepdim=True), c.y)[:, 0]
    v = ((prior * second).sum() - (prior**2 * (m**2).sum(1)).sum()) / c.size
    return m, prior[:, None] * m, float(v)


def problem(i: int, h: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The matrix diag(v) + D_i of participant i; h is [participants, C, d]."""
    away = (h[i] - h).reshape(len(h), -1)
    matrix = np.diag(v) + away @ away.T
    values, vectors = np.linalg.eigh(matrix)
    if (
        values[0] < 0
    ):  # only ever by rounding: the matrix is a Gram matrix plus a nonnegative diagonal
        matrix = (vectors * np.maximum(values, 0.01)) @ vectors.T
    return matrix


def simplex_minimum(matrix: np.ndarray) -> np.ndarray:
    """argmin αᵀ A α on the simplex, exactly: on every support solve A α ∝ 1, keep the best
    nonnegative solution."""
    best, lowest = None, np.inf
    for width in range(1, len(matrix) + 1):
        for support in map(list, itertools.combinations(range(len(matrix)), width)):
            ray = np.linalg.solve(matrix[np.ix_(support, support)], np.ones(width))
            alpha = np.zeros(len(matrix))
            alpha[support] = ray / ray.sum()
            if (alpha >= 0).all() and alpha @ matrix @ alpha < lowest:
                best, lowest = alpha, alpha @ matrix @ alpha
    assert best is not None
    return best


def cut(alpha: np.ndarray) -> np.ndarray:
    alpha = np.where(alpha < 1e-3, 0.0, alpha)
    return alpha / alpha.sum()


def run(s: Setting) -> dict[str, np.ndarray]:
    o, size = s.options["fedpac"], s.initial["fc/kernel"].shape[0]
    server, own = part(s.initial, BACKBONE), [part(s.initial, HEAD) for _ in s.clients]
    prototypes, known = (
        torch.zeros(settings.CLASSES, size),
        torch.zeros(settings.CLASSES, dtype=torch.bool),
    )
    mixing = np.zeros((len(s.cohorts), len(s.clients), len(s.clients)))
    record = Record()
    for t, cohort in enumerate(s.cohorts, start=1):
        bodies, heads, hs, vs, sums, counts = [], [], [], [], [], []
        for k in cohort:
            c = s.clients[k]
            m, h, v = statistics(server, c)
            w = sgd(
                {**server, **own[k]},
                lambda w: ce(w, c),
                s,
                epochs=o["head_epochs"],
                lr=o["head_lr"],
                only=HEAD,
            )
            target = torch.where(known[:, None], prototypes, m)[c.y]  # [n, d]
            lam = o["lam"] if t > 1 else 0.0
            w = sgd(
                w,
                lambda w: ce(w, c) + lam * functional.mse_loss(features(w, c.x), target),
                s,
                only=BACKBONE,
            )
            bodies.append(part(w, BACKBONE))
            heads.append(part(w, HEAD))
            hs.append(h.numpy())
            vs.append(v)
            counts.append(c.counts)
            sums.append(class_mean_features(features(w, c.x), c.y) * c.counts[:, None])
        server = mean(bodies, sizes(s, cohort))
        total = sum(counts)
        fresh = sum(sums) / total.clamp(min=1)[:, None]  # type: ignore[operator,union-attr]
        prototypes = torch.where(total[:, None] > 0, fresh, prototypes)  # type: ignore[index]
        known = known | (total > 0)
        for slot, i in enumerate(cohort):
            alpha = cut(simplex_minimum(problem(slot, np.stack(hs), np.array(vs))))
            mixing[t - 1, i, list(cohort)] = alpha
            own[i] = mean(heads, alpha)
        state = {**server, "prototypes": prototypes, "known": known.to(torch.float64)}
        record.after_round(
            state, [logits({**server, **own[k]}, c.test_x) for k, c in enumerate(s.clients)]
        )
    model, extra = count(s.initial), settings.CLASSES * size
    return {**record.finish(model + extra, model + 2 * extra + 1, head=own), "mixing": mixing}


def check(s: Setting) -> None:
    """The quadratic program against SLSQP and its optimality conditions; v and D against plain
    loops; one client."""
    rng = np.random.RandomState(0)
    for _ in range(20):
        h, v = rng.normal(size=(5, 3, 2)), rng.uniform(0.1, 4, 5)
        a = problem(2, h, v)
        for j, m in itertools.product(range(5), repeat=2):
            d = sum((h[2, c] - h[j, c]) @ (h[2, c] - h[m, c]) for c in range(3)) + (
                v[j] if j == m else 0
            )
            np.testing.assert_allclose(a[j, m], d, atol=1e-12)
        alpha = simplex_minimum(a)
        slope = a @ alpha
        assert (
            slope >= slope[alpha > 0].max() - 1e-12
        ).all()  # nothing outside the support is cheaper
        one = {"type": "eq", "fun": lambda x: x.sum() - 1}
        other = scipy.optimize.minimize(
            lambda x: x @ a @ x,
            np.full(5, 0.2),
            jac=lambda x: 2 * a @ x,
            bounds=[(0, 1)] * 5,
            constraints=one,
            tol=1e-14,
        )
        np.testing.assert_allclose(alpha, other.x, atol=1e-6)
    c = s.clients[3]
    z = features(s.initial, c.x).numpy()
    spread = 0.0
    for label in np.unique(c.y):
        rows = z[c.y.numpy() == label]
        p = len(rows) / len(z)
        spread += (
            p * np.trace(sum(np.outer(f, f) for f in rows) / len(rows))
            - p**2 * (rows.mean(0) ** 2).sum()
        )
    np.testing.assert_allclose(statistics(s.initial, c)[2], spread / len(z), rtol=1e-12)
    alone = run(s.but(cohorts=((3,),)))
    w = sgd(s.initial, lambda w: ce(w, c), s, epochs=1, lr=0.1, only=HEAD)
    np.testing.assert_allclose(alone["client/head/fc/kernel"][3], w["fc/kernel"], atol=1e-15)
    rep = s.but(
        cohorts=((3,), (3,)), fedpac={"lam": 0.0, "head_lr": s.lr}, fedrep={"head_epochs": 1}
    )
    for name, value in fedrep.run(rep).items():  # one client without prototypes is FedRep
        if name != "floats":
            np.testing.assert_allclose(run(rep)[name], value, atol=1e-14)
    # prototypes are those of the trained backbone
    phi = {n: torch.tensor(alone[f"server/{n}"][0]) for n in BACKBONE}
    np.testing.assert_allclose(
        alone["server/prototypes"][0], class_mean_features(features(phi, c.x), c.y), atol=1e-14
    )
    mixing = run(s)["mixing"]
    assert (
        not ((mixing > 0) & (mixing < 2e-3)).any() and ((mixing > 0.05) & (mixing < 0.95)).any()
    ), mixing
