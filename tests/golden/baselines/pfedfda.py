"""pFedFDA. The head is never trained: it is LDA of class means μ [C, d], a shared covariance Σ [d,
d] and a prior. A participant sets the head from the global (μ_g, Σ_g) and its prior, trains φ alone
for E epochs, fits its own (μ, Σ) to the features of its training rows, chooses β = (β_μ, β_Σ) on a
grid by two-fold cross-validation, and uploads φ and (β·local + (1−β)·global). Server: n_k-weighted
means of φ, μ, Σ. Evaluated: latest Φ; local statistics and β computed anew from it and the latest
(μ_g, Σ_g); LDA head of the interpolation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import scipy.stats
import torch
from golden.baselines import settings
from golden.baselines.common import (
    BACKBONE,
    Client,
    Params,
    Record,
    Setting,
    class_mean_features,
    count,
    features,
    mean,
    part,
    sgd,
    sizes,
)
from torch import Tensor
from torch.nn import functional

Gaussians = tuple[Tensor, Tensor]  # means [C, d], covariance [d, d]


def lda(stats: Gaussians, prior: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Head (coef [C, d], bias [C]) with prior [C], not necessarily summing to one."""
    mu, sigma = stats
    d = len(sigma)
    tilde = (1 - eps) * sigma + eps * torch.trace(sigma) / d * torch.eye(d)
    coef = torch.linalg.solve(tilde, mu.T).T
    return coef, -0.5 * (mu * coef).sum(1) + torch.log(prior)


def fit(z: Tensor, y: Tensor, fallback: Tensor) -> Gaussians:
    """Class means (the fallback's for absent classes) and S/(n−1) + I, S the scatter around the own
    class's mean."""
    present = torch.bincount(y, minlength=settings.CLASSES) > 0
    mu = torch.where(present[:, None], class_mean_features(z, y), fallback)
    away = z - mu[y]
    return mu, away.T @ away / max(len(y) - 1, 1) + torch.eye(z.shape[1])


def blend(local: Gaussians, common: Gaussians, beta: Sequence[float]) -> Gaussians:
    return tuple(b * a + (1 - b) * g for a, g, b in zip(local, common, beta, strict=True))  # type: ignore[return-value]


def surface(z: Tensor, y: Tensor, common: Gaussians, prior: Tensor, o: dict) -> np.ndarray:
    """Cross-validated loss [β_μ, β_Σ] on the grid: fit on even positions, test on odd ones, and the
    other way round."""
    even = torch.arange(len(y)) % 2 == 0
    fits = [(fit(z[fold], y[fold], common[0]), z[~fold], y[~fold]) for fold in (even, ~even)]
    steps = np.arange(o["grid"]) / (o["grid"] - 1)
    losses = np.zeros((o["grid"], o["grid"]))
    for (i, b_mu), (j, b_sigma) in itertools.product(enumerate(steps), repeat=2):
        for local, held_z, held_y in fits:
            coef, bias = lda(blend(local, common, (b_mu, b_sigma)), prior, o["eps"])
            losses[i, j] += float(
                functional.cross_entropy(held_z @ coef.T + bias, held_y, reduction="sum")
            ) / len(y)
    return losses


def adapt(
    phi: Params, c: Client, common: Gaussians, o: dict
) -> tuple[Gaussians, np.ndarray, np.ndarray]:
    """Interpolated statistics of a client under a backbone, its β, and the losses β was chosen
    by."""
    z = features(phi, c.x)
    losses = surface(z, c.y, common, c.counts / c.size + o["prior"], o)
    # the first of equals
    beta = np.array(np.unravel_index(np.argmin(losses), losses.shape)) / (o["grid"] - 1)
    return blend(fit(z, c.y, common[0]), common, beta), beta, losses


def lead_of(losses: np.ndarray) -> float:
    """How much better the best point of the grid is than the second best."""
    first, second = np.sort(losses.ravel())[:2]
    return float(second - first)


def run(s: Setting) -> dict[str, np.ndarray]:
    o, d = s.options["pfedfda"], s.initial["fc/kernel"].shape[0]
    server = part(s.initial, BACKBONE)
    common: Gaussians = (torch.tensor(settings.class_means()), torch.eye(d))
    betas = [np.array([0.5, 0.5])] * len(s.clients)
    leads, evaluation_betas = [], []
    record = Record()
    for cohort in s.cohorts:
        bodies, stats = [], []
        for k in cohort:
            c = s.clients[k]
            coef, bias = lda(common, c.counts / c.size + o["prior"], o["eps"])
            phi = sgd(
                server, lambda w: functional.cross_entropy(features(w, c.x) @ coef.T + bias, c.y), s
            )
            adapted, betas[k], losses = adapt(phi, c, common, o)
            bodies.append(phi)
            stats.append({"mu": adapted[0], "sigma": adapted[1]})
            leads.append(lead_of(losses))
        server, average = mean(bodies, sizes(s, cohort)), mean(stats, sizes(s, cohort))
        common = (average["mu"], average["sigma"])
        predictions, chosen, surfaces = [], [], []
        for c in s.clients:
            adapted, beta, losses = adapt(server, c, common, o)
            coef, bias = lda(adapted, c.counts / c.size + o["prior"], o["eps"])
            predictions.append(features(server, c.test_x) @ coef.T + bias)
            chosen.append(beta)
            surfaces.append(losses)
            leads.append(lead_of(losses))
        evaluation_betas.append(chosen)
        record.after_round({**server, **average}, predictions)
    wire = count(server) + settings.CLASSES * d + d * d
    out = record.finish(wire, wire, beta=betas)
    more = {"evaluation_beta": evaluation_betas, "evaluation_surface": surfaces, "lead": leads}
    return {**out, **{name: np.array(value) for name, value in more.items()}}


def check(s: Setting) -> None:
    """LDA against scipy's Gaussian densities; the fit against NumPy; the chosen β has no near
    tie."""
    rng = np.random.RandomState(3)
    mu, root, prior, z = (
        rng.normal(size=(4, 3)),
        rng.normal(size=(3, 3)),
        rng.uniform(0.1, 1, 4),
        rng.normal(size=(6, 3)),
    )
    sigma = root @ root.T + np.eye(3)
    coef, bias = lda((torch.tensor(mu), torch.tensor(sigma)), torch.tensor(prior), 1e-4)
    tilde = (1 - 1e-4) * sigma + 1e-4 * np.trace(sigma) / 3 * np.eye(3)
    density = [
        scipy.stats.multivariate_normal(m, tilde).logpdf(z) + np.log(p)
        for m, p in zip(mu, prior, strict=True)
    ]
    gap = np.stack(density, 1) - (torch.tensor(z) @ coef.T + bias).numpy()
    # equal up to one constant per row
    np.testing.assert_allclose(gap, gap[:, :1].repeat(4, 1), atol=1e-10)
    y = np.array([0, 1, 0, 1, 3, 3])
    got = fit(torch.tensor(z), torch.tensor(y), torch.tensor(mu))
    np.testing.assert_allclose(got[0][2], mu[2])
    centred = np.concatenate([z[y == c] - z[y == c].mean(0) for c in (0, 1, 3)])
    np.testing.assert_allclose(got[1], centred.T @ centred / 5 + np.eye(3), atol=1e-13)
    alone = run(s.but(cohorts=((3,),)))  # one client: the server's statistics are its interpolation
    phi = {n: torch.tensor(alone[f"server/{n}"][0]) for n in BACKBONE}
    start = torch.tensor(settings.class_means())
    local, beta = fit(features(phi, s.clients[3].x), s.clients[3].y, start), alone["client/beta"][3]
    np.testing.assert_allclose(
        alone["server/mu"][0], beta[0] * local[0] + (1 - beta[0]) * start, atol=1e-14
    )
    out = run(s)
    assert out["lead"].min() > 1e-8, out["lead"]
    used = np.concatenate([out["client/beta"], out["evaluation_beta"].reshape(-1, 2)])
    assert (
        ((used > 0) & (used < 1)).any() and (used > 0).any(0).all() and (used < 1).any(0).all()
    ), used
