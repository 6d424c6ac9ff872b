"""fedfa: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.stored import torch_values
from one_client import RNG, train_one
from tiny import close, simulation, start

from fedjax_sim.errors import UserError
from fedjax_sim.methods import fedfa
from fedjax_sim.types import Cohort


def numpy_ffa(x, spread_mean, spread_std, noise, eps=1e-6):
    """The layer on real examples only, x [B, h, w, Ch], loops over examples and channels."""
    batch, channels = x.shape[0], x.shape[-1]
    mean, std = np.zeros((batch, channels)), np.zeros((batch, channels))
    for i in range(batch):
        for c in range(channels):
            mean[i, c] = x[i, :, :, c].mean()
            std[i, c] = np.sqrt(x[i, :, :, c].var(ddof=1) + eps)

    def deviation(values, spread):
        q = 1 / (1 + 1 / (spread + eps))
        return np.sqrt((channels * q / q.sum() + 1) * (values.var(0, ddof=1) + eps))

    shift = mean + deviation(mean, spread_mean) * noise[0]
    scale = std + deviation(std, spread_std) * noise[1]
    out = np.stack(
        [
            np.stack(
                [
                    scale[i, c] * (x[i, :, :, c] - mean[i, c]) / std[i, c] + shift[i, c]
                    for c in range(channels)
                ],
                -1,
            )
            for i in range(batch)
        ]
    )
    return out, mean.mean(0), std.mean(0), shift, scale / std * np.sqrt(std**2 - eps)


def test_fedfa_layer_equals_numpy():
    rng = RNG(2)
    x = rng.normal(2.0, 3.0, size=(5, 3, 4, 6))
    spread = rng.uniform(0.01, 2, size=(2, 6))
    noise = rng.normal(size=(2, 5, 6))
    mask = np.array([True, True, True, False, False])
    x[3:] = 1e4  # padding must not enter a statistic
    gamma = fedfa.Moments(*map(jnp.array, spread))
    out, now = fedfa.augment_features(jnp.array(x), jnp.array(mask), gamma, jnp.array(noise))
    want, mean, std, shift, scale = numpy_ffa(x[:3], *spread, noise[:, :3])
    assert np.allclose(out[:3], want, atol=1e-4)
    assert np.allclose(now.mean, mean, atol=1e-5) and np.allclose(now.std, std, atol=1e-5)
    # the output's own channel moments are the drawn ones
    assert np.allclose(np.asarray(out)[:3].mean((1, 2)), shift, atol=1e-4)
    assert np.allclose(np.asarray(out)[:3].std((1, 2), ddof=1), np.abs(scale), atol=1e-4)


def test_fedfa_gradient_is_finite_on_flat_maps():
    """Dead channels and one-pixel maps: the ε inside the roots keeps slopes finite."""
    ones = fedfa.Moments(jnp.ones(2), jnp.ones(2))
    for x in (jnp.zeros((3, 2, 2, 2)), jnp.ones((1, 1, 1, 2))):
        noise, mask = jnp.ones((2, x.shape[0], 2)), jnp.ones(x.shape[0], bool)
        grad = jax.grad(lambda x: fedfa.augment_features(x, mask, ones, noise)[0].sum())(x)
        assert np.isfinite(np.asarray(grad)).all()


def test_fedfa_running_statistics_of_the_first_stage():
    """One step from zero and one: 0.01 and 0.99 + 0.01 times the means over client 1's maps, by
    torch's convolution."""
    want = {
        name: torch_values("methods_global")[f"fedfa/{name}"]
        for name in ("kernel", "bias", "mean", "std")
    }
    conv1 = {"kernel": want["kernel"], "bias": want["bias"]}
    _, after, up = train_one("fedfa", epochs=1.0, p=1.0, given={"conv1": conv1})
    got = after.own["conv1"]
    np.testing.assert_allclose(got.mean, 0.01 * want["mean"], atol=1e-6)
    np.testing.assert_allclose(got.std, 0.99 + 0.01 * want["std"], atol=1e-6)
    assert close(after.own, up.report, 0)


def test_fedfa_spread_is_the_variance_over_participants():
    rng = RNG(3)
    values = {"conv1": fedfa.Moments(rng.normal(size=(4, 6)), rng.normal(size=(4, 6)))}
    ok = np.array([True, False, True, True])
    values["conv1"].mean[1] = np.nan
    sim = simulation("fedfa")
    net = sim.env.model.init(jax.random.key(0))
    cohort = Cohort(
        net,
        jnp.ones(sim.env.num_groups),
        (),
        3,
        np.arange(4),
        jnp.array(ok),
        jnp.ones(4),
        jax.tree.map(jnp.array, values),
        (),
        0,
        (),
    )
    server = sim.method.aggregate(sim.env, fedfa.Server(net, {}), cohort)
    for got, want in zip(server.spread["conv1"], values["conv1"], strict=True):
        assert np.allclose(got, want[ok].var(0, ddof=1), atol=1e-6)


def test_fedfa_without_augmentation_is_fedavg():
    plain, off = train_one("fedavg", client=2, conv=True)[2], train_one("fedfa", client=2, p=0.0)
    assert close(plain.net, off[2].net, 1e-6)
    assert np.all(np.asarray(off[1].own["conv2"].mean) == 0) and np.all(
        np.asarray(off[1].own["conv2"].std) == 1
    )
    assert not close(plain.net, train_one("fedfa", client=2)[2].net, 1e-4)


def test_fedfa_needs_feature_maps():
    with pytest.raises(UserError, match="model 'mlp' has none"):
        start(simulation("fedfa"))
