"""The benchmark: every peer does the same work (NumPy, stored or live PyTorch), presets, intervals,
driver and table."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from golden.draws import minibatches
from golden.make_benchmarks import NORMALISED, RAGGED, ROUNDS, TINY, TINY_ROUND, WHOLE, summary
from golden.stored import torch_values

from benchmarks import jax_models, models, rounds_per_second, workloads
from benchmarks.peers import PEERS, ours, protocol
from benchmarks.workloads import WORKLOADS, Workload

RAGGED_MLP = dataclasses.replace(TINY, name="ragged mlp", examples=0, dirichlet=0.3, pool=60)
pytorch = pytest.mark.xdist_group("benchmarks")  # the rounds of PyTorch are run once


@pytest.fixture(autouse=True)
def one_client_at_a_time(monkeypatch):
    """No measuring of chunk sizes in these tests."""
    monkeypatch.setenv("FEDJAX_SIM_CHUNK", "1")
    monkeypatch.setenv("FEDJAX_SIM_DEVICES", "1")


def from_torch(name: str) -> np.ndarray:
    return torch_values("benchmarks", 1e-5)[name]


def reference_round(workload: Workload, index: int, batches_of=None) -> dict[str, np.ndarray]:
    """FedAvg on the two-layer network in NumPy, float64, gradients by hand; batches_of(client) ->
    rows of every step."""
    data, weights = workloads.make_data(workload), models.init_weights(workload)
    start = {name: value.astype(np.float64) for name, value in weights.items()}
    work = workloads.plan(workload, data, index)
    total = sum(len(one.rows[0]) for one in work)
    average = {name: np.zeros_like(value) for name, value in start.items()}
    for one in work:
        p, v = (
            {n: a.copy() for n, a in start.items()},
            {n: np.zeros_like(a) for n, a in start.items()},
        )
        for rows in batches_of(one.client) if batches_of else one.batches(workload.batch):
            x = data.pixels[rows].reshape(len(rows), -1) / 127.5 - 1
            hidden = x @ p["fc1.weight"].T + p["fc1.bias"]
            active = np.maximum(hidden, 0)
            z = active @ p["fc.weight"].T + p["fc.bias"]
            prob = np.exp(z - z.max(1, keepdims=True))
            prob /= prob.sum(1, keepdims=True)
            prob[np.arange(len(rows)), data.labels[rows]] -= 1
            dz = prob / len(rows)
            dh = (dz @ p["fc.weight"]) * (hidden > 0)
            g = {
                "fc1.weight": dh.T @ x,
                "fc1.bias": dh.sum(0),
                "fc.weight": dz.T @ active,
                "fc.bias": dz.sum(0),
            }
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


@pytest.mark.parametrize("peer", ["jax_step", "jax_naive"])
def test_a_round_equals_the_numpy_reference(peer):
    ready = prepared(peer, TINY)
    ready.round(TINY_ROUND)
    assert_same(ready.weights(), reference_round(TINY, TINY_ROUND))


@pytorch
@pytest.mark.parametrize("peer", ["torch", "torch_procs"])
def test_a_round_of_pytorch_equals_the_numpy_reference(peer):
    np.testing.assert_allclose(
        from_torch(peer), summary(reference_round(TINY, TINY_ROUND)), atol=2e-5
    )


@pytest.mark.parametrize("workload", [TINY, RAGGED_MLP], ids=lambda w: w.name)
def test_our_round_equals_the_numpy_reference(workload, tmp_path):
    """In a process of its own, over the protocol; the order of the examples is the engine's, drawn
    again here."""
    fed, _ = ours.federation(workload)
    batches_of = lambda client: minibatches(
        fed, 0, 3, client, batch_size=workload.batch, epochs=workload.epochs
    )
    worker = protocol.Worker(PEERS["ours"][0], workload)
    try:
        assert (
            worker.ready["ready"]
            and worker.ready["compile_s"] > 0
            and "jax" in worker.ready["versions"]
        )
        assert worker.round(3) > 0
        worker.ask(cmd="weights", file=str(tmp_path / "w.npz"))
        assert worker.peak_rss_mb > 10
    finally:
        worker.close()
    with np.load(tmp_path / "w.npz", allow_pickle=False) as saved:
        assert_same(dict(saved), reference_round(workload, 3, batches_of))


@pytorch
@pytest.mark.parametrize(
    "peer,workload", [("jax_step", RAGGED), ("jax_naive", RAGGED), ("ours", WHOLE)]
)
def test_peers_agree_with_torch_on_ragged_clients_with_convolutions(peer, workload):
    """Ours shuffles by itself, so there a batch is the whole client."""
    sizes = workload.sizes
    assert sum(sizes) == 60 and len(set(sizes)) > 1
    ready = prepared(peer, workload)
    assert_same(ready.weights(), models.init_weights(workload), 0)
    for index in ROUNDS:
        ready.round(index)
    want = from_torch(workload.name)
    assert np.abs(want - summary(models.init_weights(workload))).max() > 1e-3
    np.testing.assert_allclose(summary(ready.weights()), want, atol=2e-5)


@pytorch
def test_batch_normalisation_agrees():
    """One small ResNet-18 step in float64: running statistics and weights."""
    data, weights = workloads.make_data(NORMALISED), models.init_weights(NORMALISED)
    one = workloads.plan(NORMALISED, data, 0)[0]
    images = data.images().astype(np.float64)
    rows, mask = workloads.padded_batches([one], 1, 12)  # two padded examples: masked statistics
    with jax.enable_x64(True):
        doubles = {n: v.astype(np.float64) for n, v in weights.items()}
        params, stats = jax_models.split(jax_models.to_jax(doubles, NORMALISED))
        step = jax.jit(functools.partial(jax_models.sgd_step, NORMALISED))
        picked, on = rows[0, 0], mask[0, 0].astype(np.float64)
        params, _, stats = step(
            params, {}, stats, images[picked], data.labels[picked].astype(np.int32), on
        )
        got = jax_models.from_jax({**params, **stats}, NORMALISED)
    assert set(got) == set(weights)
    np.testing.assert_allclose(summary(got, 6), from_torch("normalised"), atol=1e-11)


def test_a_peer_that_cannot_run_says_why():
    with pytest.raises(protocol.PeerError, match=r"allowed: cnn4, lenet5_pad2, mlp, resnet18"):
        protocol.Worker(PEERS["jax_step"][0], dataclasses.replace(TINY, model="vgg"))
    with pytest.raises(
        protocol.PeerError,
        match=r"not installed here \(No module named 'benchmarks.peers.nobody'\)",
    ):
        protocol.Worker("benchmarks.peers.nobody", TINY)


def test_presets_are_as_stated():
    # name: clients, per round, examples of a client, steps of a client, trained parameters
    stated = {
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
    assert (
        len(ragged) == 100 and sum(ragged) == 60_000 and min(ragged) >= 10 and max(ragged) > 3 * 600
    )
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
    assert (
        np.bincount(data.labels, minlength=3).tolist()
        == workloads.label_counts(RAGGED).sum(0).tolist()
    )


def test_multiply_adds_are_counted_by_hand():
    lenet = [28 * 28 * 25 * 6, 10 * 10 * 25 * 6 * 16, 400 * 120, 120 * 84, 84 * 10]
    assert models.multiply_adds(WORKLOADS["W1"]) == 3 * sum(lenet) - lenet[0]
    assert models.multiply_adds(WORKLOADS["W4"]) == 3 * (784 * 64 + 640) - 784 * 64


def test_interval_of_the_median():
    assert rounds_per_second.median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (
        1.0,
        5.0,
        pytest.approx(0.9375),
    )
    low, high, coverage = rounds_per_second.median_interval([float(v) for v in range(1, 12)])
    assert (low, high) == (3.0, 9.0) and coverage == pytest.approx(1 - 2 * 67 / 2**11)


def test_interval_of_few_values_is_their_range():
    assert rounds_per_second.median_interval([2.0]) == (2.0, 2.0, 0.0)
    assert rounds_per_second.median_interval([2.0, 1.0]) == (1.0, 2.0, 0.5)
    low, high, coverage = rounds_per_second.median_interval(
        [4.0, 1.0, 3.0, 2.0, 5.0, 0.0], confidence=0.5
    )
    assert (low, high) == (1.0, 4.0) and coverage == pytest.approx(1 - 2 * 7 / 64)


# ---- the driver, with peers that only say how long they took -------------------------------------


@pytest.fixture
def pretend(monkeypatch):
    """pretend(seconds, argv, workload, peers) -> Bench after a run; seconds(peer, clients) is what
    a round takes."""

    def run(seconds, argv, workload, peers):
        asked = []
        name_of = {module: name for name, (module, _) in PEERS.items()}

        class Pretender:
            ready, peak_rss_mb = {"compile_s": 1.5, "setup_s": 0.5, "versions": {"it": "1"}}, 20.0

            def __init__(self, module, workload, *_, **__):
                self.peer, self.workload = name_of[module], workload
                if self.peer == "flower":
                    raise protocol.PeerError("not installed here (no flwr)")

            def round(self, index):
                clients = len(
                    workloads.plan(self.workload, workloads.make_data(self.workload), index)
                )
                asked.append((self.peer, index, clients))
                return seconds(self.peer, clients)

            def close(self):
                asked.append((self.peer, "closed", 0))

        monkeypatch.setattr(rounds_per_second, "Worker", Pretender)
        monkeypatch.setattr(
            rounds_per_second.machine, "gemm_in_own_process", lambda: {"numpy": 0.5, "jax": 1.0}
        )
        options = rounds_per_second.arguments(argv)[0]
        bench = rounds_per_second.Bench(options, {})
        bench.run(workload, peers)
        return bench, asked

    return run


def test_a_part_of_the_cohort_is_scaled_to_the_whole_and_labelled(monkeypatch, pretend):
    monkeypatch.setitem(rounds_per_second.EXTRAPOLATED, ("torch", "tiny"), 2)
    argv = ["--reference", "torch_procs", "--pairs", "2", "--no-gemm"]
    bench, asked = pretend(lambda peer, clients: float(clients), argv, TINY, ["torch"])
    rows = {row["peer"]: row for row in bench.rows}
    assert sorted(c for _, _, c in asked if c) == [2, 2, 3, 3]
    assert rows["torch"]["seconds"] == rows["torch_procs"]["seconds"] == [3.0, 3.0]
    assert rows["torch"]["extrapolated_from_clients"] == 2
    assert rows["torch_procs"]["extrapolated_from_clients"] is None
    assert "extrapolated from 2 clients" in rounds_per_second.table(bench.result())
    # in turn
    assert [row["peer"] for row in bench.order] == ["torch_procs", "torch", "torch", "torch_procs"]
    assert [peer for peer, what, _ in asked if what == "closed"] == ["torch", "torch_procs"]


def test_bars_aims_and_absent_peers_are_in_the_table(pretend, tmp_path):
    """W1 with five clients of twenty: ours 1 s, PyTorch 4 s (bar 3) and 2 s in processes (bar 2.1),
    no Flower."""
    workload = dataclasses.replace(WORKLOADS["W1"], clients=5, per_round=5, examples=20)
    file = tmp_path / "out.json"
    took = {"ours": 1.0, "torch": 4.0, "torch_procs": 2.0}
    argv = ["--pairs", "5", "--json", str(file)]
    bench, _ = pretend(
        lambda peer, _: took[peer], argv, workload, ["ours", "torch", "torch_procs", "flower"]
    )
    result = bench.result()
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    ratios = {r["peer"]: r for r in result["ratios"]}
    assert (
        ratios["torch"]["pairs"] == [4.0] * 5
        and ratios["torch"]["met"]
        and ratios["torch"]["bar"] == 3
    )
    assert not ratios["torch_procs"]["met"] and ratios["torch_procs"]["coverage"] == pytest.approx(
        0.9375
    )
    assert result["absent"] == [
        {"peer": "flower", "workload": "W1", "reason": "not installed here (no flwr)"}
    ]
    rows = {row["peer"]: row for row in result["rows"]}
    # 5 clients, 5 epochs of one batch of 20: 25 steps, 500 examples in one second
    assert rows["ours"]["s_per_step"] == pytest.approx(1 / 25) and rows["torch"][
        "s_per_step"
    ] == pytest.approx(4 / 25)
    rate = 500 * 2 * models.multiply_adds(workload) / 1e9
    assert rows["ours"]["gflops"] == pytest.approx(rate) and rows["ours"][
        "share_of_gemm_peak"
    ] == pytest.approx(rate)
    text = rounds_per_second.table(result)
    assert (
        "4.00 [4.00, 4.00; 94 %, 5 pairs]  bar 3: met" in text
        and "2.00 [2.00, 2.00; 94 %, 5 pairs]  bar 2.1: NOT" in text
    )
    assert f"aim 40% of GEMM: {'met' if rate >= 0.4 else 'NOT MET'}" in text
    assert "flower       not measured: not installed here (no flwr)" in text


def test_bars_name_presets_and_peers():
    for workload, bars in rounds_per_second.BARS.items():
        assert (
            workload in WORKLOADS and set(bars) <= set(PEERS) - {"ours"} and min(bars.values()) >= 1
        )
    assert set(rounds_per_second.BARS) == set(WORKLOADS)


def test_the_budget_ends_the_pairs_after_three(pretend):
    bench, _ = pretend(
        lambda *_: 1.0, ["--pairs", "9", "--budget", "0", "--no-gemm"], TINY, ["torch"]
    )
    (ratio,) = bench.ratios
    assert (
        len(ratio["pairs"]) == 3
        and ratio["bar"] is None
        and "bar" not in rounds_per_second.table(bench.result())
    )


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--workloads", "W9"], "unknown workload 'W9'; allowed: W1, W2"),
        (["--peers", "tff"], "unknown peer 'tff'; allowed: ours, torch"),
        (
            ["--peer-python", "flower=/nowhere/python"],
            "the Python of peer 'flower' is not executable: '/nowhere/python'",
        ),
        (["--pairs", "0"], "--pairs 0 must be at least 1"),
    ],
)
def test_mistakes_on_the_command_line_are_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        rounds_per_second.main(argv)
    assert message in capsys.readouterr().err


def test_driver_writes_rows_and_ratios(tmp_path, capsys):
    """A real run of two peers on a tiny workload."""
    file = tmp_path / "out.json"
    argv = [
        "--workloads",
        TINY.to_json(),
        "--peers",
        "jax_naive",
        "--pairs",
        "3",
        "--json",
        str(file),
        "--no-gemm",
    ]
    assert rounds_per_second.main(argv) == 0
    result = json.loads(file.read_text())
    rows = {row["peer"]: row for row in result["rows"]}
    assert set(rows) == {"ours", "jax_naive"}
    for row in rows.values():
        assert {"peer", "workload", "s_per_round", "compile_s", "peak_rss_mb"} <= set(row)
        assert row["s_per_round"] > 0 and row["peak_rss_mb"] > 10
    (ratio,) = result["ratios"]
    assert (
        ratio["peer"] == "jax_naive" and ratio["reference"] == "ours" and len(ratio["pairs"]) == 3
    )
    assert np.median(ratio["pairs"]) == pytest.approx(ratio["median"])
    assert result["order"][0]["workload"] == "tiny" and len(result["order"]) == 6
    assert "jax_naive" in capsys.readouterr().out
