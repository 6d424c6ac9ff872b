"""Layers against independent forms: convolutions against `lax`, pooling against PyTorch, BatchNorm against both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.models.batch_norm import BatchNorm
from fedjax_sim.models.conv_forms import lax_conv
from fedjax_sim.models.layers import conv_relu_pool, plain_conv
from fedjax_sim.models.pool import lax_pool, pool3
from fedjax_sim.models.products import blocks_of, dense_product, patch_product


def value_and_gradients(f, *arguments):
    out, back = jax.vjp(f, *arguments)
    weight = jnp.asarray(np.random.default_rng(5).standard_normal(out.shape), out.dtype)
    return [out, *back(weight)]


@pytest.mark.parametrize("form", ["patches", "block", "winograd", "auto"])
@pytest.mark.parametrize(
    ("shape", "k", "co", "pad"),
    [((2, 12, 12, 3), 5, 6, 2), ((2, 13, 10, 2), 5, 20, 0), ((2, 9, 8, 16), 3, 4, 1), ((1, 6, 6, 2), 1, 3, 0)],
)
def test_pooled_forms_equal_lax_in_float64(form, shape, k, co, pad):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, w, b = (jnp.asarray(rng.standard_normal(s)) for s in (shape, (k, k, shape[3], co), (co,)))
        run = lambda conv: jax.jit(lambda *a: value_and_gradients(lambda *a: conv_relu_pool(*a, pad=pad, conv=conv), *a))(
            x, w, b
        )
        for got, wanted in zip(run(form), run("lax"), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("product", "rows"), [(patch_product, 768), (patch_product, 100), (dense_product, 10), (dense_product, 40)]
)
@pytest.mark.parametrize("columns", [40, 520])
def test_products_have_the_gradients_of_a_plain_product(product, rows, columns):
    """768 rows are cut into blocks (and long ones transposed), 10 are transposed first; the others are left to XLA."""
    rng = np.random.default_rng(6)
    with jax.enable_x64(True):
        assert (blocks_of(rows, columns + 24, 8) > 1) == (rows == 768)
        a, w = (jnp.asarray(rng.standard_normal(s)) for s in ((rows, columns), (columns, 24)))
        got, wanted = (jax.jit(lambda a, w: value_and_gradients(f, a, w))(a, w) for f in (product, jnp.matmul))
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "k", "co", "stride", "pad"),
    [
        ((2, 9, 8, 3), 7, 4, 2, 3),
        ((2, 8, 8, 16), 3, 8, 2, 1),
        ((2, 5, 5, 16), 3, 8, 2, 1),
        ((2, 2, 2, 16), 3, 8, 2, 1),
        ((2, 1, 2, 8), 3, 4, 2, 1),
        ((2, 7, 8, 16), 1, 8, 2, 0),
        ((2, 1, 1, 8), 3, 8, 1, 1),
        ((2, 2, 2, 8), 3, 4, 1, 1),
        ((3, 4, 4, 6), 3, 4, 1, 1),
        ((2, 8, 8, 5), 3, 4, 1, 1),
        ((2, 6, 5, 4), 3, 4, 1, 1),
    ],
)
@pytest.mark.parametrize("form", ["patches", "winograd"])
def test_plain_forms_equal_lax_in_float64(shape, k, co, stride, pad, form):
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        x, w = jnp.asarray(rng.standard_normal(shape)), jnp.asarray(rng.standard_normal((k, k, shape[3], co)))
        got, wanted = (
            jax.jit(lambda x, w: value_and_gradients(lambda x, w: f(x, w, stride, pad), x, w))(x, w)
            for f in (lambda *a: plain_conv(*a, form), lax_conv)
        )
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["lax", "patches", "block", "winograd"])
def test_tied_windows_give_the_gradient_to_the_first_corner_like_pytorch(form):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(2).integers(-2, 3, (2, 6, 6, 1)).astype(np.float32)  # many ties, and zeros
    w, b = np.zeros((3, 3, 1, 20), np.float32), np.zeros(20, np.float32)
    w[1, 1] = 1
    g = jax.grad(lambda x: (conv_relu_pool(x, w, b, conv=form) * jnp.arange(1.0, 21)).sum())(jnp.asarray(x))
    t = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.max_pool2d(torch.relu(t.permute(0, 3, 1, 2)[:, :, 1:5, 1:5]), 2)
    (y * 210).sum().backward()
    np.testing.assert_allclose(g, t.grad, atol=1e-4)


@pytest.mark.parametrize("size", [(4, 4), (5, 6), (7, 1)])
def test_stem_pool_equals_pytorch(size):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(3).integers(-3, 4, (2, *size, 3)).astype(np.float32)
    t = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.max_pool2d(torch.relu(t.permute(0, 3, 1, 2)), 3, 2, 1)
    weight = np.random.default_rng(4).standard_normal(y.shape).astype(np.float32)
    (y * torch.tensor(weight)).sum().backward()
    for form in (pool3, lambda x: lax_pool(x, 3, 2, 1)):
        out, back = jax.vjp(form, jnp.asarray(x))
        np.testing.assert_array_equal(out, y.detach().permute(0, 2, 3, 1))
        np.testing.assert_allclose(back(jnp.asarray(weight.transpose(0, 2, 3, 1)))[0], t.grad, atol=1e-5)


def _batch_norm(x, weights, scale):
    module = BatchNorm(x.dtype)
    variables = {
        "params": {"scale": scale, "bias": scale - 1},
        "batch_stats": {"mean": jnp.full(3, 0.5, x.dtype), "var": jnp.full(3, 2.0, x.dtype)},
    }
    out, new = module.apply(variables, x, True, weights, mutable=["batch_stats"])
    return out, new["batch_stats"]


def test_batch_norm_counts_real_examples_only_and_equals_pytorch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = rng.standard_normal((5, 2, 2, 3)) * 3 + 1
        mask = np.array([1, 0, 1, 1, 0], bool)
        rows, scale = jnp.repeat(jnp.asarray(mask, jnp.float64), 4), jnp.array([1.0, 2.0, 3.0])
        weight = jnp.asarray(rng.standard_normal(x.shape) * mask[:, None, None, None])
        out, stats = _batch_norm(jnp.asarray(x), rows, scale)
        gx, gs = jax.grad(lambda x, s: (_batch_norm(x, rows, s)[0] * weight).sum(), (0, 1))(jnp.asarray(x), scale)
        bn = torch.nn.BatchNorm2d(3).double()
        bn.weight.data, bn.bias.data = torch.tensor([1.0, 2, 3]).double(), torch.tensor([0.0, 1, 2]).double()
        bn.running_mean.fill_(0.5)
        bn.running_var.fill_(2.0)
        t = torch.tensor(x[mask].transpose(0, 3, 1, 2), requires_grad=True)
        y = bn(t)
        (y * torch.tensor(np.asarray(weight)[mask].transpose(0, 3, 1, 2))).sum().backward()
        np.testing.assert_allclose(out[mask], y.detach().permute(0, 2, 3, 1), atol=1e-10)
        np.testing.assert_allclose(gx[mask], t.grad.permute(0, 2, 3, 1), atol=1e-10)
        assert not gx[~mask].any()
        np.testing.assert_allclose(gs, bn.weight.grad + bn.bias.grad, atol=1e-10)
        np.testing.assert_allclose(stats["mean"], bn.running_mean, atol=1e-10)
        np.testing.assert_allclose(stats["var"], bn.running_var, atol=1e-10)


@pytest.mark.parametrize("real", [0, 1])
def test_batch_norm_of_at_most_one_value_is_finite_and_keeps_the_statistics(real):
    x = jnp.ones((3, 1, 1, 3)) * jnp.arange(3.0)[:, None, None, None]
    weights = (jnp.arange(3) < real).astype(jnp.float32)
    out, stats = _batch_norm(x, weights, jnp.ones(3))
    g = jax.grad(lambda x: _batch_norm(x, weights, jnp.ones(3))[0].sum())(x)
    assert jnp.isfinite(out).all() and jnp.isfinite(g).all()
    np.testing.assert_array_equal(stats["mean"], jnp.full(3, 0.5))
    np.testing.assert_array_equal(stats["var"], jnp.full(3, 2.0))
