"""Models: parameter counts, groups, PyTorch equality, forms of convolution, masks, taps,
lowering."""

import importlib.util
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_models

from fedjax_sim import models
from fedjax_sim.errors import UserError
from fedjax_sim.models import (
    MODELS,
    REGISTRY,
    build,
    check_options,
    from_module,
    initial_weights,
    parameter_counts,
    with_group,
)
from fedjax_sim.platform import lowering_for, run_once, target


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "counts"),
    [
        ("mlp", (28, 28, 1), 10, {}, [50_240, 650]),
        ("lenet5", (28, 28, 1), 10, {}, [156, 2_416, 30_840, 10_164, 850]),
        ("lenet5_pad2", (28, 28, 1), 10, {}, [156, 2_416, 48_120, 10_164, 850]),
        ("lenet5", (32, 32, 3), 10, {}, [456, 2_416, 48_120, 10_164, 850]),
        ("cnn4", (32, 32, 3), 100, {}, [2_432, 51_264, 819_712, 51_300]),
        ("cnn4", (28, 28, 1), 10, {}, [832, 51_264, 524_800, 5_130]),
        ("cnn4", (105, 105, 1), 50, {}, [832, 51_264, 17_334_784, 25_650]),
        ("cnn4", (64, 64, 3), 200, {}, [2_432, 51_264, 5_538_304, 102_600]),
        ("cnn6", (32, 32, 3), 10, {}, [896, 9_248, 18_496, 36_928, 524_416, 1_290]),
        ("cnn6", (28, 28, 1), 10, {}, [320, 9_248, 18_496, 36_928, 401_536, 1_290]),
        ("resnet18", (32, 32, 3), 10, {}, [9_536, 147_968, 525_568, 2_099_712, 8_393_728, 5_130]),
        (
            "resnet18",
            (64, 64, 3),
            200,
            {"stem": "cifar"},
            [1_856, 147_968, 525_568, 2_099_712, 8_393_728, 102_600],
        ),
    ],
)
def test_parameter_counts_of_the_specification(name, shape, classes, options, counts):
    model = build(name, shape, classes, **options)
    assert list(parameter_counts(model).items()) == list(zip(model.groups, counts, strict=True))
    assert model.dense == tuple(g for g in model.groups if g.startswith("fc"))


def test_resnet18_totals():
    model = build("resnet18", (32, 32, 3), 10)
    assert sum(parameter_counts(model).values()) == 11_181_642
    net = jax.eval_shape(model.init, jax.random.key(0))
    assert tuple(net["params"]) and set(net["params"]) == set(model.groups)
    assert set(net["batch_stats"]) == set(model.groups[:-1])
    assert sum(a.size for a in jax.tree.leaves(net["batch_stats"])) == 9_600


def test_initial_weights_follow_pytorch_defaults():
    model = build("lenet5", (28, 28, 1), 10)
    net = model.init(jax.random.key(3))
    assert list(net["params"]) == list(model.groups) and net["batch_stats"] == {}
    for group, fan_in in zip(model.groups, (25, 150, 256, 120, 84), strict=True):
        for leaf in net["params"][group].values():
            assert jnp.abs(leaf).max() <= fan_in**-0.5
        kernel = np.asarray(net["params"][group]["kernel"])
        assert kernel.std() == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.15)
    again = model.init(jax.random.key(3))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(net), jax.tree.leaves(again), strict=True)
    )


def test_channels_and_hidden_widths_of_a_convolutional_network():
    """Fewer channels than published: what a small machine takes."""
    model = build("cnn6", (8, 8, 1), 3, channels="2x3x4x5", hidden=7)
    sizes = {
        name: [a.shape for a in jax.tree.leaves(group)]
        for name, group in model.init(jax.random.key(0))["params"].items()
    }
    assert sizes["conv2"] == [(3,), (3, 3, 2, 3)] and sizes["conv4"] == [(5,), (3, 3, 4, 5)]
    assert sizes["fc1"] == [(7,), (2 * 2 * 5, 7)] and model.width == 7


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: build("lenet", (28, 28, 1), 10), "lenet5"),
        (lambda: build("lenet5", (8, 8, 1), 10), "too small"),
        (lambda: build("mlp", (28, 28), 10), "height"),
        (lambda: build("mlp", (28, 28, 1), 10, stem="cifar"), "stem"),
        (lambda: build("resnet18", (32, 32, 3), 10, stem="cifr"), "cifar"),
        (lambda: build("cnn4", (32, 32, 3), 10, conv="fft"), "winograd"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=(0,)), "hidden"),
        (lambda: build("mlp", (28, 28, 1), 0), "class"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=()), "hidden"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=(2.5,)), "integers"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden="64xten"), "joined by x"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden="²"), "integers"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=float("nan")), "integers"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=float("inf")), "integers"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=None), "integers"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=True), "integers"),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=10**30), "1048576"),
        (
            lambda: build("mlp", (28, 28, 1), 10, hidden=(2**20, 2**20)),
            "at most 1073741824 weights",
        ),
        (lambda: build("mlp", (28, 28, 1), 10, hidden=(1,) * 101), "1 to 100"),
        (lambda: build("cnn4", (4000, 4000, 3), 10), "at most 1073741824 weights"),
        *(
            (
                lambda name=name: check_options("mlp", {name: "x"}),
                f"no option '{name}'; allowed: hidden",
            )
            for name in ("name", "shape", "classes", "dtype", "conv", "options")
        ),
        (lambda: build("mlp", (28, 28, 1), 10, **{"name": "x"}), "no option 'name'"),
        (lambda: check_options("cnn4", {"shape": "x"}), "allowed: channels, hidden"),
        (lambda: build("cnn6", (8, 8, 1), 3, channels="8x8x16"), "channels of cnn6 are 4 integers"),
        (
            lambda: build("cnn4", (32, 32, 3), 3, channels=(2**20, 2**20)),
            "5 x 5 x 1048576 x 1048576; at most",
        ),
        (
            lambda: with_group(build("mlp", (4, 4, 1), 3), "fc", lambda key: {"a": jnp.ones(1)}),
            "'fc'",
        ),
        (
            lambda: with_group(build("mlp", (4, 4, 1), 3), "", lambda key: {"a": jnp.ones(1)}),
            "name of its own",
        ),
        (
            lambda: with_group(build("mlp", (4, 4, 1), 3), "more", lambda key: jnp.ones(1)),
            "dict of arrays",
        ),
        (lambda: lowering_for("cud").__enter__(), "cuda"),
    ],
)
def test_bad_input_is_one_sentence(call, word):
    with pytest.raises(UserError, match=word):
        call()


def training_pass(name, conv):
    """What `make_models.run_net` computes with PyTorch: logits, gradients and running statistics by
    path."""
    with jax.enable_x64(True):
        model = build(
            name, make_models.NETS[name], make_models.CLASSES, dtype=jnp.float64, conv=conv
        )
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        path_of = lambda keys: "/".join(k.key for k in keys)
        net = jax.tree_util.tree_map_with_path(
            lambda k, a: make_models.leaf(path_of(k), a.shape), shapes
        )
        x, y = make_models.images(name)

        @jax.jit
        def run(net):
            def loss(params):
                f, stats = model.features({**net, "params": params}, x, train=True)
                logits = model.head({"params": params}, f)
                return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y].mean(), (logits, stats)

            return jax.value_and_grad(loss, has_aux=True)(net["params"])

        (_, (logits, stats)), gradient = run(net)
        leaves = jax.tree_util.tree_leaves_with_path({"params": gradient, "batch_stats": stats})
        return {"logits": np.asarray(logits), **{path_of(k): np.asarray(a) for k, a in leaves}}


@pytest.mark.parametrize(
    ("name", "conv"),
    [("lenet5", "auto"), ("lenet5_pad2", "winograd"), ("cnn4", "auto"), ("resnet18", "auto")],
)
def test_values_and_gradients_equal_pytorch_in_float64(name, conv):
    """Fingerprints of PyTorch's values always; the values themselves where it is installed."""
    got = training_pass(name, conv)
    comparisons = [(make_models.as_stored(got), make_models.stored(name))]
    if importlib.util.find_spec("torch"):
        live = make_models.run_net(name)
        comparisons += [(got, live), (make_models.as_stored(live), make_models.stored(name))]
    for ours, wanted in comparisons:
        assert set(ours) == set(wanted)
        for path, a in wanted.items():
            scale = max(np.abs(a).max(), 1e-12)
            np.testing.assert_allclose(
                ours[path] / scale, a / scale, rtol=0, atol=1e-8, err_msg=path
            )


def test_float32_forms_agree_and_clients_under_vmap_equal_separate_runs():
    x = jax.random.normal(jax.random.key(1), (5, 28, 28, 1))
    results = {}
    for conv in ("lax", "patches", "block", "winograd", "auto"):
        model = build("lenet5_pad2", (28, 28, 1), 10, conv=conv)

        def gradient(net, x):
            loss = lambda p: (
                model.head({"params": p}, model.features({"params": p}, x)[0]) ** 2
            ).sum()
            return jax.grad(loss)(net["params"])

        nets = jax.vmap(model.init)(jax.random.split(jax.random.key(2), 3))
        together = jax.jit(jax.vmap(gradient, in_axes=(0, None)))(nets, x)
        alone = jax.jit(gradient)
        for c in range(3):
            own = alone(jax.tree.map(lambda a: a[c], nets), x)
            for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(together), strict=True):
                np.testing.assert_allclose(a, b[c], rtol=1e-4, atol=3e-5 * float(jnp.abs(a).max()))
        results[conv] = together
    for conv, tree in results.items():
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(results["lax"]), strict=True):
            np.testing.assert_allclose(
                a, b, rtol=1e-4, atol=3e-5 * float(jnp.abs(b).max()), err_msg=conv
            )


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet5", (28, 28, 1)), ("mlp", (8, 8, 1)), ("resnet18", (32, 32, 3))]
)
def test_tap_sees_every_stage_and_changes_it(name, shape):
    model = build(name, shape, 3)
    net = jax.jit(model.init)(jax.random.key(0))
    seen = []

    def tap(stage, x):
        seen.append((stage, x.shape[-1]))
        assert x.ndim == 4 and x.shape[0] == 2
        return 0 * x

    x = jnp.ones((2, *shape))
    plain, _ = jax.jit(model.features)(net, x)
    same, _ = jax.jit(lambda net, x: model.features(net, x, tap=lambda s, x: x))(net, x)
    np.testing.assert_allclose(plain, same, rtol=1e-5, atol=1e-6)
    tapped, _ = jax.jit(lambda net, x: model.features(net, x, tap=tap))(net, x)
    assert tuple(seen) == model.stages and plain.shape == (2, model.width)
    if name == "resnet18":
        assert not tapped.any() and plain.any()


@pytest.mark.parametrize("name", ["lenet5", "resnet18"])
@pytest.mark.parametrize("conv", ["auto", "lax", "patches"])
def test_a_gradient_step_of_three_clients_lowers_for_accelerators(name, conv):
    shape = (28, 28, 1) if name == "lenet5" else (32, 32, 3)
    if name == "resnet18" and conv == "lax":
        pytest.skip("the same code as lenet5's lax form")
    model = build(name, shape, 10, conv=conv)

    def step(net, x):
        def loss(p):
            f, stats = model.features({**net, "params": p}, x, train=True, mask=jnp.ones(2, bool))
            return (model.head({"params": p}, f) ** 2).sum(), stats

        (_, stats), g = jax.value_and_grad(loss, has_aux=True)(net["params"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, net["params"], g), stats

    nets = jax.eval_shape(jax.vmap(model.init), jax.random.split(jax.random.key(0), 3))
    x = jax.ShapeDtypeStruct((3, 2, *shape), jnp.float32)
    exported = jax.export.export(jax.jit(jax.vmap(step)), platforms=("cuda", "tpu"))(nets, x)
    assert exported.platforms == ("cuda", "tpu")


def products_of(name, platform, conv="auto"):
    """How often the StableHLO of one gradient step multiplies matrices."""
    model = build(name, (28, 28, 1) if name == "lenet5" else (16, 16, 32), 3, conv=conv)
    x = jax.ShapeDtypeStruct((64, *model.shape), jnp.float32)
    net = jax.eval_shape(model.init, jax.random.key(0))
    loss = lambda net, x: model.head(net, model.features(net, x)[0]).sum()
    with lowering_for(platform):
        exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=(platform,))(net, x)
    return str(exported.mlir_module()).count("stablehlo.dot_general")


def test_an_export_for_an_accelerator_holds_its_forms_and_not_the_cpus():
    assert target() == jax.default_backend()
    cuda = products_of("lenet5", "cuda")  # of its dense layers alone: convolutions are XLA's
    assert (
        cuda
        == products_of("lenet5", "tpu")
        <= 3 * 3
        < products_of("lenet5", "cuda", "patches")
        <= 3 * 5
    )
    assert products_of("lenet5", "cpu") > 3 * 5  # spreads a pool's gradient by products
    # Winograd's, forward and backward
    assert products_of("cnn4", "cpu") > 2 * 36 > products_of("cnn4", "cuda")
    with pytest.raises(ZeroDivisionError), lowering_for("tpu"):
        assert target() == "tpu"
        raise ZeroDivisionError
    assert target() == jax.default_backend()


def test_every_registered_model_builds():
    for name, text in MODELS.items():
        model = build(name, (12,) if REGISTRY[name].tokens else (32, 32, 3), 10)
        assert text and model.name == name and model.head_group == "fc"
    assert MODELS["mlp"].endswith("[hidden=64]") and MODELS["resnet18"].endswith("[stem=imagenet]")


def test_the_registry_does_not_wait_for_jax():
    code = (
        "import sys; from fedjax_sim.models import MODELS, check_options; print('jax' in"
        " sys.modules, len(MODELS))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == ["False", str(len(MODELS))]
    with pytest.raises(AttributeError, match="nothing"):
        models.nothing  # noqa: B018


# ---- groups --------------------------------------------------------------------------------------
def test_the_head_is_known_by_name_wherever_it_stands():
    class Net(nn.Module):
        def setup(self):
            self.top, self.body = nn.Dense(3), nn.Dense(5)

        def features(self, x, train=False, mask=None, tap=None):
            return self.body(x.reshape(len(x), -1))

        def head(self, features):
            return self.top(features)

        def __call__(self, x):
            return self.head(self.features(x))

    make = lambda **more: from_module(
        "mine",
        Net(),
        shape=(2, 2, 1),
        groups=("top", "body"),
        dense=("top", "body"),
        width=5,
        classes=3,
        stages=(),
        dtype=jnp.float32,
        **more,
    )
    assert make().head_group == "body" and make(head_group="top").head_group == "top"
    with pytest.raises(UserError, match="'tap' of model 'mine' is not among its groups top, body"):
        make(head_group="tap")


def test_more_groups_change_nothing_of_the_others():
    with jax.enable_x64(True):
        plain = build("mlp", (4, 4, 1), 3, dtype=jnp.float64)
        draw = lambda key: {"matrix": jax.random.normal(key, (plain.width, 2), jnp.float64)}
        one = with_group(plain, "adjust", draw)
        model = with_group(with_group(plain, "policy", draw), "adjust", draw)
        assert model.groups == (*plain.groups, "policy", "adjust") and one.groups == (
            *plain.groups,
            "adjust",
        )
        assert (
            model.head_group == plain.head_group
            and model.dense == plain.dense
            and model.stages == plain.stages
        )
        assert list(parameter_counts(model))[-2:] == ["policy", "adjust"]
        first, second = jax.random.key(7), jax.random.key(8)
        start = lambda first, second: (
            plain.init(first),
            one.init(first),
            model.init(first),
            model.init(second)["params"],
        )
        before, middle, net, other = jax.jit(start)(first, second)
        equal = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))
        assert equal(before["params"], {g: net["params"][g] for g in plain.groups})
        assert equal(middle["params"]["adjust"], net["params"]["adjust"])  # whatever else was added
        assert not equal(net["params"]["policy"], net["params"]["adjust"])
        assert not equal(net["params"]["adjust"], other["adjust"])
        assert net["params"]["adjust"]["matrix"].dtype == jnp.float64

        def run(net):
            features, stats = model.features(net, jnp.ones((2, *model.shape)), train=True)
            return model.head(net, features), stats

        run = jax.jit(run)
        for a, b in zip(jax.tree.leaves(run(net)), jax.tree.leaves(run(before)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)  # nobody reads the new groups


def test_more_groups_leave_the_statistics_of_resnet18_alone():
    plain = build("resnet18", (4, 4, 1), 3)
    model = with_group(plain, "second", lambda key: {"kernel": jax.random.normal(key, (512, 3))})
    before, net = (jax.eval_shape(m.init, jax.random.key(0)) for m in (plain, model))
    assert net["batch_stats"] == before["batch_stats"] and "second" not in net["batch_stats"]
    assert set(net["params"]) - set(before["params"]) == {"second"}
    train = lambda net: model.features(net, jnp.ones((2, 4, 4, 1)), train=True)[1]
    assert jax.eval_shape(train, net) == before["batch_stats"]


def test_initial_weights_compiled_for_one_use_are_those_of_the_model():
    """To the last bit with the compiler's defaults (see `benchmarks.startup`); this suite's flags
    round a·b + c twice."""
    model = build("lenet5", (28, 28, 1), 10)
    quick, full = initial_weights(model, jax.random.key(3)), jax.jit(model.init)(jax.random.key(3))
    assert jax.tree.structure(quick) == jax.tree.structure(full)
    for a, b in zip(jax.tree.leaves(quick), jax.tree.leaves(full), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7 * float(jnp.abs(b).max()))


def test_run_once_takes_the_options_of_jit_and_passes_errors_on():
    assert run_once(
        lambda a, b: a - b, jnp.arange(3.0), jnp.ones(3), donate_argnums=1
    ).tolist() == [-1, 0, 1]
    with pytest.raises(TypeError, match="no sense"):
        run_once(lambda a: (_ for _ in ()).throw(TypeError("no sense")), jnp.int32(3))
