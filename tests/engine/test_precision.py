"""Precision: what the lowered program says about its products, and activations in bfloat16."""

from __future__ import annotations

import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.tree import flat_config, read_config
from fedjax_sim.models import build, narrow
from fedjax_sim.models.conv_forms import lax_conv
from fedjax_sim.models.layers import narrow_conv
from fedjax_sim.models.registry import MODELS, REGISTRY
from fedjax_sim.platform import lowering_for
from fedjax_sim.runner.prepare import prepare

SMALL = dict(clients=4, participation="0.5", rounds=2, epochs=1.0, chunk="2", devices="1")


def lowered(platform, method="fedavg", model="lenet5", **settings):
    """The text of one round for a platform that this machine need not have."""
    with lowering_for(platform):
        setup = prepare(Experiment.of(method, model=model, **{**SMALL, **settings}))
        sim = setup.simulation
        state = sim.init(0, setup.net)
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), (state, sim.data)
        )
        jax.clear_caches()  # traces are remembered by function
        try:
            return (
                jax.jit(lambda s, d: sim.round(s, d))
                .trace(*abstract)
                .lower(lowering_platforms=(platform,))
                .as_text()
            )
        finally:
            jax.clear_caches()


def products(text):
    """The lines of matrix products (not of two vectors) and of convolutions."""
    lines = [
        line
        for line in text.splitlines()
        if "stablehlo.dot_general" in line or "stablehlo.convolution" in line
    ]
    return [line for line in lines if not re.search(r"-> tensor<(\d+x)?f32>", line)]


def said(line):
    """The words for precision in a line: those of both operands; nothing is the default."""
    return set(re.findall(r"\b(DEFAULT|HIGH|HIGHEST)\b", line)) - {"DEFAULT"}


# ---- --precision ---------------------------------------------------------------------------------
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_lowered_round_has_the_precision_asked_for(platform):
    for precision, word in (("default", None), ("high", "HIGH"), ("highest", "HIGHEST")):
        found = products(lowered(platform, precision=precision))
        assert sum("convolution" in line for line in found) >= 5  # two forward, three backward
        assert sum("dot_general" in line for line in found) >= 8
        for line in found:
            assert said(line) == ({word} if word else set()), line


def test_precision_does_not_leak_into_the_next_run_of_a_process():
    before = lowered("tpu", model="mlp")
    other = lowered("tpu", model="mlp", precision="highest")
    assert lowered("tpu", model="mlp") == before != other
    assert jax.config.jax_default_matmul_precision is None
    with jax.default_matmul_precision("highest"):  # nor does what the process says reach a run
        assert lowered("tpu", model="mlp") == before


def test_the_evaluation_has_the_precision_of_the_run():
    setup = prepare(Experiment.of("fedavg", model="mlp", precision="highest", **SMALL))
    sim = setup.simulation
    text = sim.evaluate.lower(sim.init(0, setup.net), sim.data).as_text()
    assert products(text) and all(said(line) == {"HIGHEST"} for line in products(text))


def test_what_the_server_adds_up_is_exact_at_any_precision():
    """FedPAC mixes heads by products on the server, and adds up the squares of features."""
    found = products(lowered("tpu", "fedpac", "mlp"))
    mixed = [line for line in found if re.search(r"\(tensor<2x2xf32>, tensor<2x64x10xf32>\)", line)]
    squares = [
        line
        for line in found
        if re.search(r"-> tensor<2x10x64xf32>", line) and "batching_dims" in line
    ]
    assert mixed and all("HIGHEST" in line for line in mixed)
    assert squares and all("HIGHEST" in line for line in squares)
    assert any("HIGHEST" not in line for line in found)  # training is not


def test_batch_norm_is_exact_at_any_precision():
    found = products(lowered("tpu", model="resnet18", model_options={"stem": "cifar"}))
    moments = [
        line
        for line in found
        if "dot_general" in line and re.search(r"\(tensor<2x\d{3,}xf32>, tensor<2x\d{3,}x", line)
    ]
    assert moments and all("HIGHEST" in line for line in moments)


# ---- activations in bfloat16: layers -------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "k", "stride", "pad"),
    [(7, 5, 1, 0), (8, 3, 1, 1), (9, 3, 2, 1), (8, 3, 2, 1), (6, 1, 2, 0)],
)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_a_narrow_convolution_has_the_gradients_of_rounded_operands(size, k, stride, pad, platform):
    """In float32, from what bfloat16 holds: the sums themselves are not rounded, but for the
    kernel's on a GPU."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, size, size, 3)).astype(jnp.bfloat16)
    w = jax.random.normal(keys[1], (k, k, 3, 5))
    rounded = w.astype(jnp.bfloat16).astype(jnp.float32)
    out, exact = jax.vjp(lambda x, w: lax_conv(x, w, stride, pad), x.astype(jnp.float32), rounded)
    g = jax.random.normal(keys[2], out.shape).astype(jnp.bfloat16)
    with lowering_for(platform):
        got, back = jax.vjp(lambda x, w: narrow_conv(x, w, stride, pad, "auto"), x, w)
        gx, gw = back(g)
    wanted_x, wanted_w = exact(g.astype(jnp.float32))
    assert got.dtype == gx.dtype == jnp.bfloat16 and gw.dtype == jnp.float32
    far = lambda a, b: float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
    assert far(got, out) < 2**-8 and far(gx, wanted_x) < 2**-8
    assert far(gw, wanted_w) < (2**-8 if platform == "cuda" else 1e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_narrow_product_adds_up_in_float32(platform):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (
        jax.random.normal(keys[0], (8, 300)).astype(jnp.bfloat16),
        jax.random.normal(keys[1], (300, 7)),
    )
    g = jax.random.normal(keys[2], (8, 7))
    rounded = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)
    with lowering_for(platform):
        out, back = jax.vjp(narrow.product, x, w)
        gx, gw = back(g)
    assert out.dtype == gw.dtype == jnp.float32 and gx.dtype == jnp.bfloat16
    assert np.allclose(out, rounded(x) @ rounded(w), rtol=1e-5, atol=1e-4)
    # g is an operand: rounded
    assert np.allclose(gw, rounded(x).T @ rounded(g), rtol=1e-5, atol=1e-4)
    assert not np.allclose(gw, rounded(x).T @ g, rtol=1e-5, atol=1e-4)


def training(name, shape, activations, platform="cpu", **options):
    """(loss, features, statistics, gradients) of a step in training mode."""
    model = build(name, shape, 10, activations=activations, **options)
    net = model.init(jax.random.key(1))
    x, y = jax.random.normal(jax.random.key(2), (8, *shape)), jnp.arange(8) % 10

    def loss(params, x):
        features, stats = model.features(
            {**net, "params": params}, x, train=True, mask=jnp.arange(8) < 7
        )
        logits = model.head({**net, "params": params}, features)
        assert features.dtype == logits.dtype == jnp.float32
        return -jax.nn.log_softmax(logits)[jnp.arange(8), y].mean(), (features, stats)

    with lowering_for(platform):
        (value, (features, stats)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            net["params"], x
        )
    return value, features, stats, grads


# those refuse
BUILT_IN = [name for name in MODELS if REGISTRY[name].build is None and not REGISTRY[name].tokens]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_model_is_close_to_itself_in_float32(name):
    """Gradients point the same way: ReLUs near 0 switch, so that they differ by more than a
    rounding."""
    shape, options = ((8, 8, 3), {"stem": "cifar"}) if name == "resnet18" else ((28, 28, 1), {})
    want, got = training(name, shape, None, **options), training(name, shape, "bfloat16", **options)
    assert abs(float(got[0] - want[0])) < 0.02 and float(got[0]) != float(want[0])
    assert np.allclose(
        got[1], want[1], atol=(0.1 if name == "resnet18" else 0.02) * float(jnp.abs(want[1]).max())
    )
    # rounded; a mean
    assert (
        bool((got[1] == got[1].astype(jnp.bfloat16).astype(jnp.float32)).all())
        or name == "resnet18"
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got[2:]))
    flat = lambda tree: jnp.concatenate([a.ravel() for a in jax.tree.leaves(tree)])
    a, b = flat(want[3]), flat(got[3])
    assert float(a @ b / jnp.linalg.norm(a) / jnp.linalg.norm(b)) > (
        0.9 if name == "resnet18" else 0.98
    )
    assert np.allclose(
        flat(want[2]) if name == "resnet18" else 0,
        flat(got[2]) if name == "resnet18" else 0,
        atol=0.02,
    )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_multiply_bfloat16_and_keep_weights_in_float32(platform):
    """No product of training is left in float32, and what leaves the round is float32."""
    text = lowered(platform, activations="bfloat16")
    trained = [line for line in products(text) if "batching_dims" in line or "convolution" in line]
    assert len(trained) >= 14 and all("xbf16>, tensor<" in line for line in trained)
    returned = re.search(r"@main\(.*?\) -> \((.*?)\) \{\n", text, re.S)
    assert returned and "f32" in returned[1] and "bf16" not in returned[1]
    assert "bf16" not in lowered(platform)


def test_the_same_numbers_with_the_accelerators_forms():
    """Where both round in the same places."""
    want, got = (
        training("mlp", (8, 8, 1), "bfloat16"),
        training("mlp", (8, 8, 1), "bfloat16", "tpu"),
    )
    assert all(
        np.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(*map(jax.tree.leaves, (want, got)), strict=True)
    )


# ---- activations in bfloat16: runs ---------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedpolicy"])
def test_everything_stored_is_float32(method):
    setup = prepare(Experiment.of(method, model="mlp", activations="bfloat16", **SMALL))
    sim = setup.simulation
    state, log = jax.jit(sim.round)(setup.first_state(), sim.data)
    kinds = {str(a.dtype) for a in jax.tree.leaves((state, log))}
    assert "float32" in kinds and not {k for k in kinds if "float" in k and k != "float32"}
    plain = prepare(Experiment.of(method, model="mlp", **SMALL)).simulation
    other, _ = jax.jit(plain.round)(plain.init(0, setup.net), plain.data)
    net, same = (jax.tree.leaves(s.server.net["params"]) for s in (state, other))
    assert all(np.allclose(a, b, atol=0.02) for a, b in zip(net, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(net, same, strict=True))


def test_a_run_goes_on_exactly(tmp_path):
    how = dict(model="mlp", activations="bfloat16", **{**SMALL, "rounds": 4})
    whole = fs.run("ditto", out=tmp_path / "whole", **how)
    fs.run("ditto", out=tmp_path / "part", **{**how, "rounds": 2})
    part = fs.resume(tmp_path / "part", 4)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(*(jax.tree.leaves(r.state) for r in (whole, part)), strict=True)
    )
    assert (
        flat_config(json.loads((tmp_path / "part" / "config.json").read_text()))["activations"]
        == "bfloat16"
    )


def test_an_exported_model_keeps_its_activations(tmp_path):
    fs.run("fedavg", out=tmp_path / "run", model="mlp", activations="bfloat16", **SMALL)
    model = fs.load_model(fs.export(tmp_path / "run"))
    assert model.model.activations == jnp.bfloat16
    text = (
        jax.jit(model.predict)
        .lower(model.net, np.zeros((2, *model.about["shape"]), np.float32))
        .as_text()
    )
    assert "reduce_precision" in text


def test_the_hash_knows_bfloat16_and_nothing_else_changed():
    plain = Experiment.of("fedavg")
    assert plain.hash() == plain.replace(activations="float32").hash()
    assert plain.hash() != plain.replace(activations="bfloat16").hash()
    kept = plain.flat() | dict(lr=0.02)
    del kept["activations"]  # as an earlier version wrote it
    assert read_config({"config": kept})[0].compute == plain.compute


class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


def test_refusals_are_a_sentence(monkeypatch):
    for settings, message in (
        (
            dict(activations="bfloat16", dtype="float64"),
            "activations bfloat16 does not go with dtype float64",
        ),
        (
            dict(activations="float32", dtype="float64"),
            "activations float32 does not go with dtype float64",
        ),
        (dict(activations="float16"), "allowed: auto, bfloat16, float32"),
        (dict(activations="bfloat16", model=Own()), "models known by name"),
    ):
        with pytest.raises(UserError, match=message):
            fs.run("fedavg", **{"rounds": 1, **settings})
    with pytest.raises(UserError, match="float16 do not go with float32 weights"):
        build("mlp", (2, 2, 1), 3, activations="float16")
    asked = []

    def without(shape, classes, *, dtype, conv):
        return Own()

    def with_them(shape, classes, *, dtype, conv, activations=None):
        asked.append(activations)
        return Own()

    for name, builder in (("without", without), ("with_them", with_them)):
        for table in (REGISTRY, MODELS):
            monkeypatch.setitem(table, name, table["mlp"])  # taken out again at the end
        fs.register_model(name, builder)
    with pytest.raises(UserError, match="takes no argument 'activations'"):
        build("without", (4, 4, 1), 10, activations="bfloat16")
    build("with_them", (4, 4, 1), 10, activations="bfloat16")
    build("with_them", (4, 4, 1), 10)
    assert asked == [jnp.bfloat16, None]
