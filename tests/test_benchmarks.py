"""The benchmark's peers do the same work: equal weights after a round, stated sizes, equal step counts."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from benchmarks import models, rounds_per_second, workloads
from benchmarks.peers import PEERS, protocol
from benchmarks.workloads import WORKLOADS, Workload

pytest.importorskip("torch")

TINY = Workload(
    "tiny",
    (8, 8, 1),
    "mlp",
    clients=4,
    per_round=3,
    examples=7,
    classes=3,
    epochs=2,
    batch=3,
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-2,
)
RAGGED = dataclasses.replace(
    TINY, name="ragged", shape=(16, 16, 1), model="lenet5_pad2", examples=0, dirichlet=0.3, pool=60, lr=0.05
)


def reference_round(workload: Workload, index: int) -> dict[str, np.ndarray]:
    """FedAvg on the two-layer network in NumPy, float64, gradients by hand."""
    data, weights = workloads.make_data(workload), models.init_weights(workload)
    start = {name: value.astype(np.float64) for name, value in weights.items()}
    work = workloads.plan(workload, data, index)
    total = sum(len(one.rows[0]) for one in work)
    average = {name: np.zeros_like(value) for name, value in start.items()}
    for one in work:
        p, v = {n: a.copy() for n, a in start.items()}, {n: np.zeros_like(a) for n, a in start.items()}
        for epoch in one.rows:
            for first in range(0, len(epoch), workload.batch):
                rows = epoch[first : first + workload.batch]
                x = data.pixels[rows].reshape(len(rows), -1) / 127.5 - 1
                hidden = x @ p["fc1.weight"].T + p["fc1.bias"]
                active = np.maximum(hidden, 0)
                z = active @ p["fc.weight"].T + p["fc.bias"]
                prob = np.exp(z - z.max(1, keepdims=True))
                prob /= prob.sum(1, keepdims=True)
                prob[np.arange(len(rows)), data.labels[rows]] -= 1
                dz = prob / len(rows)
                dh = (dz @ p["fc.weight"]) * (hidden > 0)
                g = {"fc1.weight": dh.T @ x, "fc1.bias": dh.sum(0), "fc.weight": dz.T @ active, "fc.bias": dz.sum(0)}
                for n in p:
                    v[n] = workload.momentum * v[n] + g[n] + workload.weight_decay * p[n]
                    p[n] -= workload.lr * v[n]
        for n in p:
            average[n] += p[n] * len(one.rows[0]) / total
    return average


def prepared(peer: str, workload: Workload):
    module = __import__(PEERS[peer][0], fromlist=["prepare"])
    return module.prepare(workload)


def assert_same(got, want, tolerance=2e-5):
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=tolerance, err_msg=name)


@pytest.mark.parametrize("peer", ["torch", "jax_step", "jax_naive"])
def test_a_round_equals_the_numpy_reference(peer):
    ready = prepared(peer, TINY)
    ready.round(3)
    assert_same(ready.weights(), reference_round(TINY, 3))


def test_torch_and_jax_peers_agree_on_ragged_clients_with_convolutions():
    sizes = RAGGED.sizes
    assert sum(sizes) == 60 and len(set(sizes)) > 1
    peers = [prepared(name, RAGGED) for name in ("torch", "jax_step", "jax_naive")]
    for ready in peers:
        ready.round(0)
        ready.round(1)
    want = peers[0].weights()
    moved = max(np.abs(want[n] - v).max() for n, v in models.init_weights(RAGGED).items())
    assert moved > 1e-3
    for ready in peers[1:]:
        assert_same(ready.weights(), want)


def test_batch_normalisation_agrees():
    """One small ResNet-18 step in float64: running statistics and weights."""
    from benchmarks import jax_models, torch_models

    workload = dataclasses.replace(
        TINY, model="resnet18", shape=(32, 32, 3), momentum=0.0, lr=0.01, epochs=1, examples=10, batch=12
    )
    data, weights = workloads.make_data(workload), models.init_weights(workload)
    one = workloads.plan(workload, data, 0)[0]
    images = data.images().astype(np.float64)
    model = torch_models.make_model(workload, weights).double()
    torch_models.train_client(model, *torch_models.to_torch(images, data.labels), one, workload)
    want = {n: t.numpy() for n, t in torch_models.tensors(model).items()}
    rows, mask = workloads.padded_batches([one], 1, 12)  # two padded examples: masked statistics
    with jax.enable_x64(True):
        doubles = {n: v.astype(np.float64) for n, v in weights.items()}
        params, stats = jax_models.split(jax_models.to_jax(doubles, workload))
        step = jax.jit(functools.partial(jax_models.sgd_step, workload))
        picked, on = rows[0, 0], mask[0, 0].astype(np.float64)
        params, _, stats = step(params, {}, stats, images[picked], data.labels[picked].astype(np.int32), on)
        got = jax_models.from_jax({**params, **stats}, workload)
    assert set(want) == set(got)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=1e-12, err_msg=name)


def test_worker_processes_speak_the_protocol(tmp_path):
    """Two processes of one thread behind a subprocess: same weights as the sequential reference."""
    worker = protocol.Worker(PEERS["torch_procs"][0], TINY)
    try:
        assert worker.ready["ready"] and "torch" in worker.ready["versions"]
        assert worker.round(3) > 0
        worker.ask(cmd="weights", file=str(tmp_path / "w.npz"))
        with np.load(tmp_path / "w.npz", allow_pickle=False) as saved:
            assert_same(dict(saved), reference_round(TINY, 3))
        assert worker.peak_rss_mb > 10
    finally:
        worker.close()


def test_a_peer_that_cannot_run_says_why():
    with pytest.raises(protocol.PeerError, match=r"allowed: cnn4, lenet5_pad2, mlp, resnet18"):
        protocol.Worker(PEERS["torch"][0], dataclasses.replace(TINY, model="vgg"))


def test_presets_are_as_stated():
    stated = {  # name: clients, per round, examples of a client, steps of a client, trained parameters
        "W1": (100, 10, 540, 45, 61_706),
        "W2": (100, 10, 500, 8, 878_538),
        "W3": (200, 200, 250, 4, 878_538),
        "W4": (500, 500, 60, 6, 50_890),
        "W5": (10, 10, 64, 1, 11_181_642),
    }
    for name, (clients, per_round, examples, steps, parameters) in stated.items():
        workload = WORKLOADS[name]
        assert (workload.clients, workload.per_round) == (clients, per_round)
        assert workload.sizes == (examples,) * clients
        assert workloads.steps_of(examples, workload) == steps
        assert models.trainable(models.init_weights(workload)) == parameters
    ragged = WORKLOADS["W6"].sizes
    assert len(ragged) == 100 and sum(ragged) == 60_000 and min(ragged) >= 10 and max(ragged) > 3 * 600
    assert ragged == WORKLOADS["W6"].sizes
    same = {f.name: getattr(WORKLOADS["W6"], f.name) for f in dataclasses.fields(Workload)}
    different = {n for n in same if same[n] != getattr(WORKLOADS["W1"], n)}
    assert different == {"name", "examples", "dirichlet", "pool"}
    assert workloads.from_text(WORKLOADS["W6"].to_json()) == WORKLOADS["W6"]


def test_plan_covers_every_example_once_per_epoch():
    data = workloads.make_data(RAGGED)
    for one in workloads.plan(RAGGED, data, 5):
        own = np.arange(data.start[one.client], data.start[one.client + 1])
        assert all((np.sort(epoch) == own).all() for epoch in one.rows)
        assert len(list(one.batches(RAGGED.batch))) == workloads.steps_of(one.examples, RAGGED)
    again = workloads.plan(RAGGED, data, 5)
    assert [one.client for one in again] == [one.client for one in workloads.plan(RAGGED, data, 5)]
    assert np.bincount(data.labels, minlength=3).tolist() == workloads.label_counts(RAGGED).sum(0).tolist()


def test_multiply_adds_are_counted_by_hand():
    lenet = [28 * 28 * 25 * 6, 10 * 10 * 25 * 6 * 16, 400 * 120, 120 * 84, 84 * 10]
    assert models.multiply_adds(WORKLOADS["W1"]) == 3 * sum(lenet) - lenet[0]
    assert models.multiply_adds(WORKLOADS["W4"]) == 3 * (784 * 64 + 640) - 784 * 64


def test_interval_of_the_median():
    assert rounds_per_second.median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0, pytest.approx(0.9375))
    low, high, coverage = rounds_per_second.median_interval([float(v) for v in range(1, 12)])
    assert (low, high) == (3.0, 9.0) and coverage == pytest.approx(1 - 2 * 67 / 2**11)


def test_a_part_of_the_cohort_is_scaled_to_the_whole_and_labelled(monkeypatch):
    monkeypatch.setitem(rounds_per_second.EXTRAPOLATED, ("torch", "tiny"), 2)
    asked = []

    class OneSecondPerClient:
        ready, peak_rss_mb = {"compile_s": 0.0, "setup_s": 0.0, "versions": {}}, 1.0

        def __init__(self, module, workload, *_, **__):
            self.workload = workload

        def round(self, index):
            asked.append(len(workloads.plan(self.workload, workloads.make_data(self.workload), index)))
            return float(asked[-1])

        def close(self):
            pass

    monkeypatch.setattr(rounds_per_second, "Worker", OneSecondPerClient)
    options = rounds_per_second.arguments(["--reference", "torch_procs", "--pairs", "2", "--no-gemm"])[0]
    bench = rounds_per_second.Bench(options, {})
    bench.run(TINY, ["torch"])
    rows = {row["peer"]: row for row in bench.rows}
    assert sorted(asked) == [2, 2, 3, 3] and rows["torch"]["seconds"] == rows["torch_procs"]["seconds"] == [3.0, 3.0]
    assert rows["torch"]["extrapolated_from_clients"] == 2
    assert rows["torch_procs"]["extrapolated_from_clients"] is None
    assert "extrapolated from 2 clients" in rounds_per_second.table(bench.result())
    assert [row["peer"] for row in bench.order] == ["torch_procs", "torch", "torch", "torch_procs"]  # in turn


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--workloads", "W9"], "unknown workload 'W9'; allowed: W1, W2"),
        (["--peers", "tff"], "unknown peer 'tff'; allowed: ours, torch"),
        (["--peer-python", "flower=/nowhere/python"], "the Python of peer 'flower' is not executable: '/nowhere/python'"),
        (["--pairs", "0"], "--pairs 0 must be at least 1"),
    ],
)
def test_mistakes_on_the_command_line_are_named(argv, words, capsys):
    with pytest.raises(SystemExit):
        rounds_per_second.main(argv)
    assert words in capsys.readouterr().err


def test_driver_writes_rows_and_ratios(tmp_path, capsys):
    """A real run of two peers on a tiny workload."""
    file = tmp_path / "out.json"
    code = rounds_per_second.main(
        [
            "--workloads",
            TINY.to_json(),
            "--peers",
            "jax_naive",
            "--reference",
            "torch",
            "--pairs",
            "3",
            "--json",
            str(file),
            "--no-gemm",
        ]
    )
    assert code == 0
    result = json.loads(file.read_text())
    rows = {row["peer"]: row for row in result["rows"]}
    assert set(rows) == {"torch", "jax_naive"}
    for row in rows.values():
        assert {"peer", "workload", "s_per_round", "compile_s", "peak_rss_mb"} <= set(row)
        assert row["s_per_round"] > 0 and row["peak_rss_mb"] > 10
    (ratio,) = result["ratios"]
    assert ratio["peer"] == "jax_naive" and ratio["reference"] == "torch" and len(ratio["pairs"]) == 3
    assert np.median(ratio["pairs"]) == pytest.approx(ratio["median"])
    assert result["order"][0]["workload"] == "tiny" and len(result["order"]) == 6
    assert "jax_naive" in capsys.readouterr().out
