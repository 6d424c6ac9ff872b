"""pfedfda: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.methods.pfedfda import Gaussians, fit, lda, surface


def gaussian_task(seed: int, n: int = 40, d: int = 5, spread: float = 0.6):
    """(features, labels, common Gaussians, prior): class 2 is absent, the common means are somewhat
    off."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, d))
    labels = rng.integers(0, 2, n)
    features = centres[labels] + rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * spread
    common = Gaussians(centres + 0.8 * rng.normal(size=(3, d)), np.eye(d) * 2.0)
    return features, labels, common, np.bincount(labels, minlength=3) / n + 1e-4


def test_lda_head_is_the_closed_form():
    """Bayes' rule with Gaussian densities gives the same log-odds."""
    features, labels, common, prior = gaussian_task(0)
    with jax.enable_x64(True):
        mine = fit(
            jnp.asarray(features),
            jnp.asarray(labels),
            jnp.ones(40, bool),
            jnp.asarray(common.mean),
            False,
        )
        coef, bias = lda(mine, jnp.asarray(prior))
        np.testing.assert_array_equal(mine.mean[2], common.mean[2])  # absent: the common one
        around = np.concatenate(
            [features[labels == c] - features[labels == c].mean(0) for c in (0, 1)]
        )
        np.testing.assert_allclose(mine.covariance, around.T @ around / 39 + np.eye(5), atol=1e-12)
        smooth = (1 - 1e-4) * np.asarray(mine.covariance) + 1e-4 * np.trace(
            mine.covariance
        ) / 5 * np.eye(5)
        inverse = np.linalg.inv(smooth)
        logits = features @ np.asarray(coef).T + np.asarray(bias)
        density = np.stack(
            [-0.5 * np.einsum("ni,ij,nj->n", f, inverse, f) for f in features - mine.mean[:, None]],
            1,
        )
        density += np.log(prior)
        np.testing.assert_allclose(logits - logits[:, :1], density - density[:, :1], atol=1e-9)
        jittered = fit(
            jnp.asarray(features),
            jnp.asarray(labels),
            jnp.ones(40, bool),
            jnp.asarray(common.mean),
            True,
        )
        np.testing.assert_allclose(jittered.covariance - mine.covariance, 1e-4, atol=1e-12)


def test_interpolation_search_against_a_fine_grid():
    """What 21 values find is near what 101 find, and hardly worse; padding does not matter."""
    search = jax.jit(surface, static_argnums=6)
    few, many = jnp.linspace(0, 1, 21), jnp.linspace(0, 1, 101)
    at = lambda losses: (
        np.array(np.unravel_index(losses.argmin(), losses.shape)) / (len(losses) - 1)
    )
    inner = 0
    for seed in range(5):
        features, labels, common, prior = gaussian_task(seed, n=16, spread=1.5)
        pad = lambda a: np.concatenate([a, np.full((3, *a.shape[1:]), 2, a.dtype)])
        rest = Gaussians(*map(np.float32, common)), np.float32(prior)
        coarse = np.asarray(
            search(np.float32(pad(features)), pad(labels), np.arange(19) < 16, *rest, few, False)
        )
        if seed == 0:
            plain = search(np.float32(features), labels, np.ones(16, bool), *rest, few, False)
            np.testing.assert_allclose(coarse, plain, atol=1e-5)
        fine = np.asarray(
            search(np.float32(pad(features)), pad(labels), np.arange(19) < 16, *rest, many, False)
        )
        assert fine.min() - 1e-6 <= coarse.min() <= fine.min() + 3e-3
        assert np.abs(at(fine) - at(coarse)).max() <= 0.1
        inner += (np.abs(at(coarse) - 0.5) < 0.5).any()
    assert inner >= 3  # not only corners


def test_pfedfda_survives_a_single_example():
    one = np.arange(4) == 0
    features, labels = np.ones((4, 5), np.float32), np.zeros(4, int)
    common = Gaussians(np.zeros((3, 5), np.float32), np.eye(5, dtype=np.float32))
    losses_ = surface(
        features,
        labels,
        one,
        common,
        np.float32([1.0001, 1e-4, 1e-4]),
        jnp.linspace(0, 1, 5),
        False,
    )
    assert np.isfinite(losses_).all()
    np.testing.assert_allclose(fit(features, labels, one, common.mean, False).covariance, np.eye(5))
