"""Models of tokens, NNX modules and pairs of functions: equations, groups, and the round's
program."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedjax_sim as fs
from fedjax_sim import models
from fedjax_sim.api import set_up
from fedjax_sim.models.sequence import recur


def plain_lstm(inputs, recurrent):
    """The same, differentiated by JAX."""

    def step(carry, z):
        h, c = carry
        i, f, g, o = jnp.split(z + h @ recurrent, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((inputs.shape[1], recurrent.shape[0]))
    return jax.lax.scan(step, (zero, zero), inputs)[1]


def test_gradients_of_the_lstm():
    a, b, c = (
        jax.random.normal(jax.random.key(i), s)
        for i, s in enumerate([(7, 3, 20), (5, 20), (7, 3, 5)])
    )
    value = lambda fn: jax.value_and_grad(lambda x, w: (fn(x, w) * c).sum(), (0, 1))(a, b)
    for ours, theirs in zip(
        jax.tree.leaves(value(recur)), jax.tree.leaves(value(plain_lstm)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_lstm_is_pytorchs():
    torch = pytest.importorskip("torch")
    model = models.build("lstm", (9,), 6, embed=4, width=5, layers=2)
    net = model.init(jax.random.key(0))
    x = np.random.default_rng(0).integers(0, 6, (3, 9))
    theirs = torch.nn.LSTM(4, 5, 2, batch_first=True)
    tensor = lambda a: torch.tensor(np.asarray(a))
    with torch.no_grad():
        for i in (0, 1):
            p = net["params"][f"lstm{i + 1}"]
            getattr(theirs, f"weight_ih_l{i}").copy_(tensor(p["kernel"]).T)
            getattr(theirs, f"weight_hh_l{i}").copy_(tensor(p["recurrent"]).T)
            getattr(theirs, f"bias_ih_l{i}").copy_(tensor(p["bias"]))
            getattr(theirs, f"bias_hh_l{i}").zero_()
        said = theirs(tensor(net["params"]["embed"]["table"])[torch.tensor(x)])[0].numpy()
    np.testing.assert_allclose(
        np.asarray(model.features(net, jnp.asarray(x))[0]), said, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_no_place_sees_what_comes_later(name):
    model = models.build(name, (8,), 6)
    net = model.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(1).integers(0, 6, (2, 8)))
    says = lambda x: np.asarray(model.head(net, model.features(net, x)[0]))
    one, two = says(x), says(x.at[:, 5:].set(0))
    np.testing.assert_array_equal(one[:, :5], two[:, :5])
    assert one.shape == (2, 8, 6) and not np.allclose(one[:, 5:], two[:, 5:])
    assert model.head_group == model.groups[-1] == "fc" and model.groups[0] == "embed"


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_large_vocabularies_are_looked_up(name):
    """The same numbers as by one-hot products."""
    from fedjax_sim.models import sequence

    model = models.build(name, (4,), 7)
    net = model.init(jax.random.key(0))
    x = jnp.asarray([[1, 2, 6, 0]])
    slope = lambda: jax.grad(lambda p: jnp.square(model.features({"params": p}, x)[0]).sum())(
        net["params"]
    )
    small = slope()
    limit, sequence.ONE_HOT = sequence.ONE_HOT, 3
    try:
        large = slope()
    finally:
        sequence.ONE_HOT = limit
    for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_one_target_per_text():
    """Tokens with a class each: the features of the last place."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (40, 6))
    fed = fs.Federation.from_arrays(
        x, (x[:, -1] > 4).astype(int), {"train": [range(15), range(15, 30)]}, test=range(30, 40)
    )
    assert fed.task == "classification" and fed.shape == (6,)
    how = dict(
        participation="1", rounds=12, eval_every=12, epochs=2, batch_size=8, devices="1", chunk="2"
    )
    result = fs.run(
        "fedavg", fed, model="lstm", model_options={"width": 8}, optimizer="adam:lr=0.03", **how
    )
    assert result.setup.net["params"]["embed"]["table"].shape == (9, 16)
    assert result.summary["last_global"] > 0.8


# ---- modules of other kinds ----------------------------------------------------------------------
class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(5, name="body")(x.reshape(len(x), -1))))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Linear(6, 5, rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x.reshape(len(x), -1))))


def pair():
    def init(key):
        a, b = jax.random.split(key)
        draw = lambda key, shape: {
            "w": 0.3 * jax.random.normal(key, shape),
            "b": jnp.zeros(shape[1]),
        }
        return {"body": draw(a, (6, 5)), "head": draw(b, (5, 3))}

    def apply(params, x):
        hidden = jax.nn.relu(x.reshape(len(x), -1) @ params["body"]["w"] + params["body"]["b"])
        return hidden @ params["head"]["w"] + params["head"]["b"]

    return init, apply


@functools.cache
def images() -> fs.Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 2, 3)).astype(np.float32), rng.integers(0, 3, 40)
    return fs.Federation.from_arrays(
        x, y, {"train": [range(12), range(12, 30)]}, test=range(30, 40)
    )


HOW = dict(participation="1", rounds=2, epochs=1, batch_size=5, devices="1", chunk="2")
NAMES = {"kernel": "w", "bias": "b"}


def test_linen_nnx_and_a_pair_are_one_model():
    """From the same weights to the same weights."""
    start = Nnx(rngs=nnx.Rngs(3))
    value = lambda group, leaf: np.asarray(getattr(getattr(start, group), leaf)[...])
    net = {g: {k: value(g, k) for k in NAMES} for g in ("body", "head")}
    short = {g: {NAMES[k]: v for k, v in layer.items()} for g, layer in net.items()}
    stats = {"batch_stats": {}}
    linen = fs.run("fedper", images(), model=Linen(), net={"params": net, **stats}, **HOW)
    module = fs.run("fedper", images(), model=start, **HOW)
    pair_run = fs.run("fedper", images(), model=pair(), net={"params": short, **stats}, **HOW)
    for other in (module, pair_run):
        assert other.setup.simulation.env.model.groups == ("body", "head")
        for a, b in zip(linen.rows, other.rows, strict=True):
            assert a["client_loss"] == pytest.approx(b["client_loss"], rel=1e-5)


def test_an_nnx_class_is_drawn_from_the_seed():
    one, two = (set_up("fedavg", images(), model=Nnx, seed=s, **HOW).net for s in (0, 1))
    assert not np.allclose(one["params"]["body"]["kernel"], two["params"]["body"]["kernel"])


class WithDropout(Nnx):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def softmax_behind():
    init, apply = pair()
    return init, lambda params, x: jax.nn.softmax(apply(params, x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: WithDropout(nnx.Rngs(0)), "keeps more than parameters"),
        (softmax_behind, "computes something after its last layer"),
        (
            lambda: (lambda key: {"head": {"w": jnp.zeros((6, 3)), "c": jnp.zeros(2)}}, pair()[1]),
            "cannot be applied",
        ),
        (lambda: (lambda key: jnp.zeros(3), lambda p, x: x), "must be a dict of groups"),
        (lambda: 3, "or a pair of functions"),
    ],
)
def test_models_that_do_not_fit(model, message):
    with pytest.raises(fs.UserError, match=message):
        set_up("fedavg", images(), model=model(), **HOW)


def test_a_linen_module_of_tokens():
    class Bigram(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5, name="head")(nn.Embed(5, 4, name="embed")(x))

    rng = np.random.default_rng(0)
    fed = fs.Federation.from_arrays(
        rng.integers(0, 5, (30, 7)), None, {"train": [range(10), range(10, 20)]}, test=range(20, 30)
    )
    result = fs.run("fedper", fed, model=Bigram(), **HOW)
    assert result.setup.simulation.env.model.groups == ("embed", "head") and np.isfinite(
        result.rows[-1]["client_loss"]
    )


@pytest.mark.parametrize(("name", "inside"), [("lstm", 3), ("transformer", 1)])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_loop_over_steps_and_places_alone(name, inside, platform):
    """Equal clients: every loop's turns are known, and none is over clients; clients are an axis of
    every product."""
    import re

    from fedjax_sim.platform import lowering_for

    rng = np.random.default_rng(0)
    rows = {"train": [range(i * 8, i * 8 + 8) for i in range(6)]}
    fed = fs.Federation.from_arrays(rng.integers(0, 9, (56, 13)), None, rows, test=range(48, 56))
    how = dict(
        participation="1",
        rounds=1,
        epochs=1,
        batch_size=4,
        optimizer="adam",
        devices="1",
        chunk="6",
    )
    small = {"width": 16, "embed": 4} if name == "lstm" else {"width": 16, "heads": 2}
    with lowering_for(platform):
        setup = set_up("fedavg", fed, model=name, model_options=small, **how)
        state = setup.first_state()
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype),
            (state, setup.simulation.data),
        )
        text = jax.jit(setup.simulation.round).lower(*shapes).compile().as_text()
    every = [line for line in text.splitlines() if re.search(r" while\(", line)]
    assert all("known_trip_count" in line for line in every)
    # others draw random numbers
    loops = [line for line in every if "f32[6," in line.split(" while(")[0]]
    turns = {
        int(found[1])
        for line in loops
        if (found := re.search(r'known_trip_count":\{"n":"(\d+)"', line))
    }
    assert len(loops) == inside and turns <= {12, 2}  # places, steps
    assert not re.search(r" scatter\(", text)
