"""Models: parameter counts, groups, PyTorch equality, forms of convolution, masks, taps, lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.errors import UserError
from fedjax_sim.models import MODELS, build, parameter_counts


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
        ("resnet18", (64, 64, 3), 200, {"stem": "cifar"}, [1_856, 147_968, 525_568, 2_099_712, 8_393_728, 102_600]),
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
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(net), jax.tree.leaves(again), strict=True))


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
    ],
)
def test_bad_input_is_one_sentence(call, word):
    with pytest.raises(UserError, match=word):
        call()


def _torch_net(name, shape, classes):
    torch = pytest.importorskip("torch")
    nn = torch.nn
    C = shape[2]
    if name == "resnet18":

        class Block(nn.Module):
            def __init__(self, ci, co, stride):
                super().__init__()
                self.conv1, self.bn1 = nn.Conv2d(ci, co, 3, stride, 1, bias=False), nn.BatchNorm2d(co)
                self.conv2, self.bn2 = nn.Conv2d(co, co, 3, 1, 1, bias=False), nn.BatchNorm2d(co)
                if stride > 1:
                    self.conv_shortcut = nn.Conv2d(ci, co, 1, stride, bias=False)
                    self.bn_shortcut = nn.BatchNorm2d(co)

            def forward(self, x):
                y = torch.relu(self.bn1(self.conv1(x)))
                y = self.bn2(self.conv2(y))
                return torch.relu(y + (self.bn_shortcut(self.conv_shortcut(x)) if hasattr(self, "bn_shortcut") else x))

        layers = {"stem": nn.ModuleDict({"conv": nn.Conv2d(C, 64, 7, 2, 3, bias=False), "bn": nn.BatchNorm2d(64)})}
        ci = 64
        for i, co in enumerate((64, 128, 256, 512), 1):
            layers[f"stage{i}"] = nn.ModuleDict({"block1": Block(ci, co, 1 if i == 1 else 2), "block2": Block(co, co, 1)})
            ci = co
        net = nn.ModuleDict({**layers, "fc": nn.Linear(512, classes)}).double()

        def forward(x):
            x = torch.relu(net["stem"]["bn"](net["stem"]["conv"](x)))
            x = nn.functional.max_pool2d(x, 3, 2, 1)
            for i in range(1, 5):
                x = net[f"stage{i}"]["block2"](net[f"stage{i}"]["block1"](x))
            return net["fc"](x.mean((2, 3)))

        return torch, net, forward
    pad = 2 if name == "lenet5_pad2" else 0
    convs, hidden = {"cnn4": ((32, 64), (512,))}.get(name, ((6, 16), (120, 84)))
    net, side, ci = {}, shape[0], C
    for i, co in enumerate(convs, 1):
        net[f"conv{i}"] = nn.Conv2d(ci, co, 5, padding=pad if i == 1 else 0)
        side, ci = (side + (2 * pad if i == 1 else 0) - 4) // 2, co
    width = side * side * ci
    for i, w in enumerate(hidden, 1):
        net[f"fc{i}"], width = nn.Linear(width, w), w
    net = nn.ModuleDict({**net, "fc": nn.Linear(width, classes)}).double()

    def forward(x):
        for i in (1, 2):
            x = nn.functional.max_pool2d(torch.relu(net[f"conv{i}"](x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # our order: height, width, channel
        for i in range(1, len(hidden) + 1):
            x = torch.relu(net[f"fc{i}"](x))
        return net["fc"](x)

    return torch, net, forward


_PLACES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def _ours_to_torch(tree, net, torch):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *where, last = (k.key for k in path)
        target = net
        for k in where:
            target = target[k] if isinstance(target, torch.nn.ModuleDict) else getattr(target, k)
        a = np.asarray(leaf)
        a = a.transpose(3, 2, 0, 1) if a.ndim == 4 else a.T if a.ndim == 2 else a
        yield path, getattr(target, _PLACES[last]), torch.tensor(np.ascontiguousarray(a))


@pytest.mark.parametrize(
    ("name", "shape", "conv"),
    [
        ("lenet5", (28, 28, 1), "auto"),
        ("lenet5_pad2", (28, 28, 1), "winograd"),
        ("cnn4", (32, 32, 3), "auto"),
        ("resnet18", (32, 32, 3), "auto"),
    ],
)
def test_values_and_gradients_equal_pytorch_in_float64(name, shape, conv):
    torch, net_t, forward = _torch_net(name, shape, 7)
    with jax.enable_x64(True):
        model = build(name, shape, 7, dtype=jnp.float64, conv=conv)
        net = model.init(jax.random.key(0))
        for tree in net.values():
            for _, target, value in _ours_to_torch(tree, net_t, torch):
                target.data.copy_(value)
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((4, *shape)), rng.integers(0, 7, 4)

        @jax.jit
        def run(params):
            def loss(params):
                f, stats = model.features({**net, "params": params}, x, train=True)
                logits = model.head({"params": params}, f)
                return -jax.nn.log_softmax(logits)[jnp.arange(4), y].mean(), (logits, stats)

            return jax.value_and_grad(loss, has_aux=True)(params)

        (_, (logits, stats)), gradient = run(net["params"])
        out = forward(torch.tensor(x.transpose(0, 3, 1, 2)))
        torch.nn.functional.cross_entropy(out, torch.tensor(y)).backward()
        np.testing.assert_allclose(logits, out.detach().numpy(), rtol=1e-9, atol=1e-9)
        for path, target, value in _ours_to_torch(gradient, net_t, torch):
            scale = max(float(target.grad.abs().max()), 1e-12)
            np.testing.assert_allclose(value / scale, target.grad / scale, atol=1e-8, err_msg=str(path))
        for path, target, value in _ours_to_torch(stats, net_t, torch):
            np.testing.assert_allclose(value, target, rtol=1e-9, atol=1e-10, err_msg=str(path))


def test_float32_forms_agree_and_clients_under_vmap_equal_separate_runs():
    x = jax.random.normal(jax.random.key(1), (5, 28, 28, 1))
    results = {}
    for conv in ("lax", "patches", "block", "winograd", "auto"):
        model = build("lenet5_pad2", (28, 28, 1), 10, conv=conv)

        def gradient(net, x):
            loss = lambda p: (model.head({"params": p}, model.features({"params": p}, x)[0]) ** 2).sum()
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
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-5 * float(jnp.abs(b).max()), err_msg=conv)


@pytest.mark.parametrize(("name", "shape"), [("lenet5", (28, 28, 1)), ("mlp", (8, 8, 1)), ("resnet18", (32, 32, 3))])
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


def test_every_registered_model_builds():
    for name, text in MODELS.items():
        assert text and build(name, (32, 32, 3), 10).name == name
