"""fedphp: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import numpy as np

from fedjax_sim.local.mmd import mmd_rbf


def test_mmd_against_its_definition():
    """Pair by pair; padding counts nothing, in the value and in the gradient."""
    rng = np.random.default_rng(3)
    a, b = 3 * rng.standard_normal((2, 4, 5))

    def kernel(x, y):
        return sum(np.exp(-np.sum((x - y) ** 2) / (2 * width)) for width in (10, 15, 20, 50))

    want = np.mean(
        [
            [kernel(x, u) + kernel(y, v) - 2 * kernel(x, v) for u, v in zip(a, b, strict=True)]
            for x, y in zip(a, b, strict=True)
        ]
    )
    padded = [np.concatenate([f, np.full((2, 5), np.nan)]).astype(np.float32) for f in (a, b)]
    mask = np.arange(6) < 4
    value, slope = jax.value_and_grad(mmd_rbf)(*padded, mask)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    assert (
        np.isfinite(slope[:4]).all() and (slope[4:] == 0).all() and np.abs(slope[:4]).max() > 1e-3
    )
