"""Layers against independent forms: convolutions against `lax`, pooling against PyTorch, BatchNorm
against both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_models

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
    [
        ((2, 12, 12, 3), 5, 6, 2),
        ((2, 13, 10, 2), 5, 20, 0),
        ((2, 9, 8, 16), 3, 4, 1),
        ((1, 6, 6, 2), 1, 3, 0),
    ],
)
def test_pooled_forms_equal_lax_in_float64(form, shape, k, co, pad):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, w, b = (
            jnp.asarray(rng.standard_normal(s)) for s in (shape, (k, k, shape[3], co), (co,))
        )
        run = lambda conv: jax.jit(
            lambda *a: value_and_gradients(lambda *a: conv_relu_pool(*a, pad=pad, conv=conv), *a)
        )(x, w, b)
        for got, wanted in zip(run(form), run("lax"), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("product", "rows"),
    [(patch_product, 768), (patch_product, 100), (dense_product, 10), (dense_product, 40)],
)
@pytest.mark.parametrize("columns", [40, 520])
def test_products_have_the_gradients_of_a_plain_product(product, rows, columns):
    """768 rows are cut into blocks (and long ones transposed), 10 are transposed first; the others
    are left to XLA."""
    rng = np.random.default_rng(6)
    with jax.enable_x64(True):
        assert (blocks_of(rows, columns + 24, 8) > 1) == (rows == 768)
        a, w = (jnp.asarray(rng.standard_normal(s)) for s in ((rows, columns), (columns, 24)))
        got, wanted = (
            jax.jit(lambda a, w: value_and_gradients(f, a, w))(a, w) for f in (product, jnp.matmul)
        )
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
        x, w = (
            jnp.asarray(rng.standard_normal(shape)),
            jnp.asarray(rng.standard_normal((k, k, shape[3], co))),
        )
        got, wanted = (
            jax.jit(lambda x, w: value_and_gradients(lambda x, w: f(x, w, stride, pad), x, w))(x, w)
            for f in (lambda *a: plain_conv(*a, form), lax_conv)
        )
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.fixture(params=["stored", "live"])
def pytorch(request):
    """PyTorch's values of the layers: from the committed file always, computed anew where it is
    installed."""
    if request.param == "stored":
        return make_models.stored("layers")
    pytest.importorskip("torch", reason="torch is not installed; its stored values were compared")
    return make_models.run_layers()


def test_tied_windows_give_the_gradient_to_the_first_corner_like_pytorch(pytorch):
    w, b = np.zeros((3, 3, 1, 20), np.float32), np.zeros(20, np.float32)
    w[1, 1] = 1
    for form in ("lax", "patches", "block", "winograd"):
        loss = lambda x: (conv_relu_pool(x, w, b, conv=form) * jnp.arange(1.0, 21)).sum()
        g = jax.jit(jax.grad(loss))(make_models.tied_windows())
        np.testing.assert_allclose(g, pytorch["tied"], atol=1e-4, err_msg=form)


@pytest.mark.parametrize("size", make_models.POOL_SIZES)
def test_stem_pool_equals_pytorch(size, pytorch):
    x, weight = make_models.stem_input(size)
    for form in (pool3, lambda x: lax_pool(x, 3, 2, 1)):
        out, gradient = jax.jit(lambda x, g: (form(x), jax.vjp(form, x)[1](g)[0]))(x, weight)
        np.testing.assert_array_equal(out, pytorch[f"stem/{size}/value"])
        np.testing.assert_allclose(gradient, pytorch[f"stem/{size}/gradient"], atol=1e-5)


def _batch_norm(x, weights, scale):
    module = BatchNorm(x.dtype)
    variables = {
        "params": {"scale": scale, "bias": scale - 1},
        "batch_stats": {"mean": jnp.full(3, 0.5, x.dtype), "var": jnp.full(3, 2.0, x.dtype)},
    }
    out, new = module.apply(variables, x, True, weights, mutable=["batch_stats"])
    return out, new["batch_stats"]


def test_batch_norm_counts_real_examples_only_and_equals_pytorch(pytorch):
    x, mask, weight, scale = make_models.norm_input()
    with jax.enable_x64(True):
        rows, x, scale = (
            jnp.repeat(jnp.asarray(mask, jnp.float64), 4),
            jnp.asarray(x),
            jnp.asarray(scale),
        )
        out, stats = _batch_norm(x, rows, scale)
        gx, gs = jax.grad(lambda x, s: (_batch_norm(x, rows, s)[0] * weight).sum(), (0, 1))(
            x, scale
        )
        assert not gx[~mask].any()
        got = dict(
            value=out[mask], gradient=gx[mask], scale=gs, mean=stats["mean"], var=stats["var"]
        )
        for part, a in got.items():
            np.testing.assert_allclose(a, pytorch[f"norm/{part}"], atol=1e-10, err_msg=part)


@pytest.mark.parametrize("real", [0, 1])
def test_batch_norm_of_at_most_one_value_is_finite_and_keeps_the_statistics(real):
    x = jnp.ones((3, 1, 1, 3)) * jnp.arange(3.0)[:, None, None, None]
    weights = (jnp.arange(3) < real).astype(jnp.float32)
    out, stats = _batch_norm(x, weights, jnp.ones(3))
    g = jax.grad(lambda x: _batch_norm(x, weights, jnp.ones(3))[0].sum())(x)
    assert jnp.isfinite(out).all() and jnp.isfinite(g).all()
    np.testing.assert_array_equal(stats["mean"], jnp.full(3, 0.5))
    np.testing.assert_array_equal(stats["var"], jnp.full(3, 2.0))
