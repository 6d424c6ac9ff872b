"""`fs.rounds` against a loop in NumPy: full-batch and unshuffled training, every upload, the mean;
the run of `fs.run`."""

from __future__ import annotations

import re

import jax
import numpy as np
import optax
import pytest
from numpy_loop import LR, each, mean_of, sgd
from paths import ROOT
from tiny import assert_close

import fedjax_sim as fs
from fedjax_sim.experiment import Experiment
from fedjax_sim.models import initial_weights
from fedjax_sim.platform import run_once

SIZES = (5, 12, 9, 2)
HOW = dict(
    model="mlp",
    model_options={"hidden": (5, 4)},
    lr=LR,
    momentum=0.9,
    weight_decay=0.01,
    devices="1",
    epochs=2,
)
COHORTS = [[2, 0, 1], [3, 1, 0]]


@pytest.fixture(scope="module")
def fed():
    rng = np.random.default_rng(3)
    total = sum(SIZES) + 10
    y = np.arange(total) % 3
    x = (rng.standard_normal((total, 2, 3, 2)) + y[:, None, None, None]).astype(np.float32)
    rows = np.split(rng.permutation(total), np.cumsum(SIZES))
    return fs.Federation.from_arrays(
        x, y, {"train": rows[:-1]}, test=rows[-1], mean=[0.5, 1.0], std=[2.0, 1.5]
    )


@pytest.mark.parametrize(("batch", "chunk"), [("full", "2"), (4, "1")])
def test_every_upload_is_that_of_a_numpy_loop(fed, batch, chunk):
    # NHWC, flattened as it is
    images = ((np.asarray(fed.x, np.float64) - fed.mean) / fed.std).reshape(len(fed.x), -1)
    steps = fs.rounds(
        "fedavg",
        fed,
        cohorts=COHORTS,
        rounds=2,
        batch_size=batch,
        shuffle="off",
        chunk=chunk,
        **HOW,
    )
    theta = None
    for t, step in enumerate(steps):
        theta = theta or each(lambda a: np.asarray(a, np.float64), step.setup.net["params"])
        assert (
            step.round == t + 1
            and step.ids.tolist() == COHORTS[t]
            and step.weights.tolist() == [SIZES[k] for k in step.ids]
        )
        ends = []
        for k in COHORTS[t]:
            rows, size = fed.client_rows(k), SIZES[k] if batch == "full" else batch
            batches = [rows[i : i + size] for _ in range(2) for i in range(0, len(rows), size)]
            ends.append(sgd(theta, batches, images, np.asarray(fed.y), momentum=0.9, decay=0.01)[0])
            assert_close(step.upload(k)["params"], ends[-1], 2e-5)
        theta = mean_of(ends, [SIZES[k] for k in COHORTS[t]])
        assert_close(step.net["params"], theta, 2e-5)
        assert_close(step.server.net["params"], theta, 2e-5)
    with pytest.raises(fs.UserError, match="client 2 did not report in round 2"):
        step.upload(2)


def test_the_two_minibatches_of_a_meta_step_differ_without_shuffling(fed):
    """Per-FedAvg: b₂ in the order of the rows, b₁ the minibatch after it, after the last the first
    one."""
    lr, client, size = 0.3, 1, 4
    (step,) = fs.rounds(
        "perfedavg",
        fed,
        cohorts=[[client]],
        rounds=1,
        batch_size=size,
        shuffle="off",
        **{**HOW, "lr": lr},
    )
    images, labels = (
        ((np.asarray(fed.x) - fed.mean) / fed.std).astype(np.float32),
        np.asarray(fed.y),
    )
    rows, model = fed.client_rows(client), step.setup.simulation.env.model
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    assert len(batches) > 1

    def loss(params, b):
        net = {**step.setup.net, "params": params}
        logits = model.head(net, model.features(net, images[b], train=True)[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[b]).mean()

    params, down = (
        step.setup.net["params"],
        lambda w, g: jax.tree.map(lambda a, d: a - lr * d, w, g),
    )
    for k in range(2 * len(batches)):
        first, second = batches[(k + 1) % len(batches)], batches[k % len(batches)]
        params = down(params, jax.grad(loss)(down(params, jax.grad(loss)(params, first)), second))
    assert_close(step.upload(client)["params"], params, 2e-5)


def test_the_steps_are_those_of_a_run(fed):
    ask = dict(participation="2/4", rounds=2, batch_size=4, dropout=0.3, seed=5, **HOW)
    run, steps = fs.run("ditto", fed, **ask), list(fs.rounds("ditto", fed, **ask))
    assert [len(s.ids) for s in steps] == [
        row["participants"] - row["dropped"] for row in run.rounds
    ]
    for step, row in zip(steps, run.rounds, strict=True):
        assert {
            k: row[k] for k in ("round", "bytes_up", "steps_needed")
        }.items() <= step.log.items()
    assert_close(steps[-1].net, run.net, 1e-6)
    assert_close(steps[-1].personal(1), run.personal(1), 1e-6)
    assert len(repr(steps[0])) < 100


def test_the_options_are_part_of_what_a_run_is(fed):
    assert (
        Experiment.of(shuffle="off").hash()
        != Experiment.of().hash()
        != Experiment.of(batch_size="full").hash()
    )
    with pytest.raises(fs.UserError, match="shuffle 'of' is not one of on, off"):
        fs.rounds("fedavg", fed, shuffle="of")
    with pytest.raises(fs.UserError, match="batch-size 'ful' is not a whole number"):
        fs.rounds("fedavg", fed, batch_size="ful")
    with pytest.raises(fs.UserError, match="state-on 'host' is not possible"):
        fs.rounds("fedavg", fed, state_on="host", **HOW)


def test_on_the_command_line(capsys):
    from fedjax_sim.cli.main import main

    argv = [
        "run",
        "fedavg",
        "--model",
        "mlp",
        "--clients",
        "3",
        "--dry-run",
        "--batch-size",
        "full",
        "--shuffle",
        "off",
    ]
    # 2 of 3 clients
    assert main([*argv, "--epochs", "2"]) == 0 and "4 steps on average" in capsys.readouterr().out
    assert (
        main([*argv[:-3], "fulll"]) == 2
        and "'fulll' is not a whole number" in capsys.readouterr().err
    )


def test_the_documented_layout_is_that_of_torch():
    """`to_torch` of docs/compare-frameworks.md: LeNet-5's logits are PyTorch's."""
    torch = pytest.importorskip("torch")
    page = (ROOT / "docs" / "compare-frameworks.md").read_text()
    names: dict = {"np": np}
    exec(re.search(r"^def to_torch.*?^    return out\n", page, re.M | re.S)[0], names)
    lenet = fs.build("lenet5", (28, 28, 1), 10)
    net = initial_weights(lenet, jax.random.key(0))
    w = {
        k: torch.from_numpy(np.array(v))
        for k, v in names["to_torch"](net, lenet, (4, 4, 16)).items()
    }
    x = np.random.default_rng(0).normal(size=(3, 28, 28, 1)).astype(np.float32)
    h = torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
    for name in ("conv1", "conv2"):
        h = torch.max_pool2d(torch.relu(torch.conv2d(h, w[f"{name}.weight"], w[f"{name}.bias"])), 2)
    h = h.flatten(1)
    for name in ("fc1", "fc2"):
        h = torch.relu(h @ w[f"{name}.weight"].T + w[f"{name}.bias"])
    want = (h @ w["fc.weight"].T + w["fc.bias"]).numpy()
    got = run_once(lambda net, x: lenet.head(net, lenet.features(net, x)[0]), net, x)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-4)
