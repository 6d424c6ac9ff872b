"""FFT-amplitude mixing of images, as it circulates under the name FedFA; see `fedfa` for the
published method.

With probability p per batch, each image keeps its phase and takes over a part of another one's
amplitude spectrum:

    F = FFT₂(x) per channel,   x₁ ← Re FFT₂⁻¹( [(1−λ)|F₁| + λ|F₂|] · e^{i∠F₁} )

Image 2 is drawn by shuffling the real examples of the batch (an image may meet itself); images are
normalised ones. p = 0 or λ = 0 is FedAvg.  Wire: |w| down, |w| up.  State: none.  Evaluated:
global.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Server
from fedjax_sim.local import Batch, epoch_permutations, local_sgd, supervised
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload

NOISE = 2000  # tells these draws from those of data augmentation


def mix_amplitudes(x: Array, partner: Array, lam: float) -> Array:
    """Images x [B, H, W, C], each with a share λ of the amplitudes of image partner[i] and its own
    phase.

    >>> x = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1)             # one pixel: amplitude = value
    >>> mix_amplitudes(x, jnp.array([1, 0]), 0.5).ravel().tolist()
    [2.0, 2.0]
    """
    spectrum = jnp.fft.fft2(x, axes=(1, 2))
    amplitude = jnp.abs(spectrum)
    mixed = (1 - lam) * amplitude + lam * amplitude[partner]
    return jnp.fft.ifft2(mixed * jnp.exp(1j * jnp.angle(spectrum)), axes=(1, 2)).real.astype(
        x.dtype
    )


def partners(key: Array, mask: Array) -> Array:
    """[B] image 2 of each image: the real examples, which come first in a batch, shuffled among
    themselves."""
    return epoch_permutations(key, mask.sum(), mask.shape[0], 1)[0]


@register("fedfa_freq")
class FedFAFreq(FedAvg):
    """Images of a batch swap parts of their amplitude spectra."""

    needs_classes = "it swaps parts of the spectra of images"

    p: Real = field(0.5, ge=0, le=1, help="chance that a batch is mixed")
    lam: Real = field(0.3, ge=0, le=1, help="share λ of the other image")

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        plain = supervised(env, ctx)

        def objective(net: Tree, batch: Batch, confusion: Tree):
            coin, shuffle = jax.random.split(jax.random.fold_in(batch.key, NOISE))
            mixed = mix_amplitudes(batch.x, partners(shuffle, batch.mask), self.lam)
            x = jnp.where(jax.random.bernoulli(coin, self.p), mixed, batch.x)
            return plain(net, batch._replace(x=x), confusion)

        client, done = local_sgd(env, net, client, ctx, objective=objective)
        return client, self.upload(env, ctx, done)
