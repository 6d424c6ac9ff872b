"""A plain flax module as model=: groups in the order of calls, dropout and masked BatchNorm,
sentences."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, federation

import fedjax_sim as fs
from fedjax_sim.models.randomness import randomness

SHAPE = (4, 4, 1)


class Net(nn.Module):
    """Declared in another order than it is called; dropout and BatchNorm want to know whether it
    trains."""

    rate: float = 0.0
    norm: bool = False
    outputs: int = 3

    def setup(self):
        self.head, self.first = nn.Dense(self.outputs), nn.Dense(6)
        self.drop = nn.Dropout(self.rate)
        if self.norm:
            self.scale = nn.BatchNorm(momentum=0.9)

    def __call__(self, x, train: bool = False):
        x = self.first(x.reshape(len(x), -1))
        if self.norm:
            x = self.scale(x, use_running_average=not train)
        return self.head(self.drop(nn.relu(x), deterministic=not train))


def test_groups_are_in_the_order_of_calls():
    model = fs.from_module("mine", Net(norm=True), shape=SHAPE)
    assert (
        model.groups == ("first", "scale", "head")
        and model.head_group == "head"
        and model.dense == ("first", "head")
    )
    assert (model.width, model.classes, model.name) == (6, 3, "mine")
    net = model.init(jax.random.key(0))
    assert list(net["params"]) == list(model.groups) and list(net["batch_stats"]) == ["scale"]


def test_a_module_trains_as_the_same_model_of_the_registry():
    fed, ask = federation(), dict(participation="1", rounds=2, epochs=1, batch_size=4, devices="1")
    known = fs.build("mlp", fed.shape, fed.classes, hidden=(6,))
    start = known.init(jax.random.key(1))
    mine = {
        "params": {"first": start["params"]["fc1"], "head": start["params"]["fc"]},
        "batch_stats": {},
    }
    want, got = (
        fs.run("fedper", fed, model=known, net=start, **ask),
        fs.run("fedper", fed, model=Net(), net=mine, **ask),
    )
    assert_close(got.personal(2)["params"]["first"], want.personal(2)["params"]["fc1"], 1e-5)
    assert (
        got.rows[-1]["client_mean"] == pytest.approx(want.rows[-1]["client_mean"])
        and got.summary["model"] == "Net"
    )
    assert got.summary["bytes_up"] == want.summary["bytes_up"]  # the head stays: it was found


def test_dropout_draws_from_the_step_and_only_in_training():
    model = fs.from_module("mine", Net(rate=0.5), shape=SHAPE)
    net, x = model.init(jax.random.key(0)), jnp.ones((8, *SHAPE))

    def dropped(key):
        with randomness(jax.random.key(key)):
            return np.asarray(model.features(net, x, train=True)[0])

    assert not np.array_equal(dropped(1), dropped(2)) and np.array_equal(dropped(1), dropped(1))
    calm = model.features(net, x)[0]
    assert (
        np.array_equal(calm, model.features(net, x)[0])
        and (dropped(1) == 0).sum() > (np.asarray(calm) == 0).sum()
    )


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_reaches_a_run(rate):
    """Whole batches in order from given weights: dropout alone knows the seed and the step."""
    fed, before = federation(), fs.from_module("Net", Net(), shape=SHAPE).init(jax.random.key(0))
    ask = dict(cohorts=[[0, 2]], rounds=1, batch_size="full", shuffle="off", devices="1")
    steps = [
        next(fs.rounds("fedavg", fed, model=Net(rate=rate), net=before, seed=s, **ask))
        for s in (0, 1)
    ]
    one, two = (step.upload(2)["params"]["first"]["kernel"] for step in steps)
    assert np.allclose(one, two, atol=1e-7) == (rate == 0)


def test_padding_is_not_part_of_the_statistics():
    model = fs.from_module("mine", Net(norm=True), shape=SHAPE)
    net = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, *SHAPE))
    padded, mask = (
        jnp.concatenate([x, 100 * jnp.ones((2, *SHAPE))]),
        jnp.array([1, 1, 1, 0, 0], bool),
    )
    some, stats = model.features(net, padded, train=True, mask=mask)
    want, wanted = model.features(net, x, train=True, mask=jnp.ones(3, bool))
    assert_close((some[:3], stats), (want, wanted), 1e-5)
    assert not np.allclose(stats["scale"]["mean"], net["batch_stats"]["scale"]["mean"])


class Soft(Net):
    def __call__(self, x):
        return nn.softmax(super().__call__(x))


class ConvLast(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(3, (4, 4), padding="VALID")(x).reshape(len(x), -1)


class Bare(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x.reshape(len(x), -1)) + self.param("extra", nn.initializers.zeros, (3,))


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, x, other):
        return nn.Dense(3)(x + other)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Soft(), "computes something after its last layer 'head'"),
        (ConvLast(), "the last layer 'Conv_0' of module 'ConvLast' is Conv, not a Dense layer"),
        (Bare(), "parameter 'extra' is not in a submodule of module 'Bare'"),
        (TwoInputs(), "its __call__ needs other"),
        (Net(outputs=2), "module 'Net' has 2 outputs, but the data have 3 classes"),
        (nn.Sequential([nn.Conv(4, (9, 9), padding="VALID"), nn.Dense(3)]), "module 'Sequential'"),
        (object(), "not a name and not a Model"),
    ],
)
def test_what_is_no_model_is_said(module, sentence):
    with pytest.raises(fs.UserError, match=sentence):
        fs.run("fedavg", federation(), model=module, rounds=1)
