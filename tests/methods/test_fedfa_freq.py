"""fedfa_freq: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from one_client import RNG, train_one
from tiny import close

from fedjax_sim.methods import fedfa_freq


def test_amplitudes_are_mixed_and_phases_kept():
    rng, lam = RNG(4), 0.3
    x, partner = rng.normal(size=(3, 4, 6, 2)), np.array([2, 0, 1])
    got = np.asarray(fedfa_freq.mix_amplitudes(jnp.array(x), jnp.array(partner), lam))
    for i in range(3):
        for c in range(2):
            one, two = np.fft.fft2(x[i, :, :, c]), np.fft.fft2(x[partner[i], :, :, c])
            mixed = ((1 - lam) * abs(one) + lam * abs(two)) * one / abs(one)
            assert np.allclose(got[i, :, :, c], np.fft.ifft2(mixed).real, atol=1e-5)


def test_padding_is_nobodys_partner():
    """The real examples of a batch are shuffled among themselves; a lonely one is mixed with itself
    and stays."""
    mask = jnp.array([True, True, True, False, False])
    drawn = {
        tuple(fedfa_freq.partners(jax.random.key(seed), mask)[:3].tolist()) for seed in range(12)
    }
    assert all(sorted(one) == [0, 1, 2] for one in drawn) and len(drawn) > 2
    trained = lambda name, client, **options: train_one(name, client, conv=True, **options)[2].net
    assert close(trained("fedavg", 3), trained("fedfa_freq", 3, p=1.0, lam=1.0), 1e-5)
    assert not close(trained("fedavg", 2), trained("fedfa_freq", 2, p=1.0, lam=1.0), 1e-4)
