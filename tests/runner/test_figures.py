"""Figures against closed forms and plain loops: client figures, thresholds, convergence, probes,
bytes beyond 32 bit."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest

from fedjax_sim.metrics import make_metrics
from fedjax_sim.metrics.base import Metric, Primary, columns_of, described, over_clients, value_of
from fedjax_sim.plans import floats_on_wire, payload_bytes
from fedjax_sim.runner.figures import (
    clean,
    convergence,
    divergence_figures,
    probe_figures,
    progress_figures,
    relative_gain,
    rounds_to,
    summary_figures,
)
from fedjax_sim.runner.files import csv_bytes, csv_rows, number
from fedjax_sim.runner.recorder import Recorder

METRICS = make_metrics((), 3)
ACCURACY = METRICS[0]


def client_figures(correct, count):
    sums = dict(accuracy=dict(correct=correct, count=count), loss=dict(total=correct, count=count))
    return over_clients(METRICS, sums, range(len(count)))


def test_client_figures():
    # accuracies 1, 1/2, 0 and one client without examples, which counts nowhere
    got = client_figures(np.array([4.0, 1.0, 0.0, 0.0]), np.array([4.0, 2.0, 10.0, 0.0]))
    assert got["mean"] == pytest.approx(0.5, abs=1e-15)
    assert got["pooled"] == pytest.approx(5 / 16, abs=1e-15)
    assert got["std"] == pytest.approx(math.sqrt(1 / 6), abs=1e-15)  # population: (1/4 + 0 + 1/4)/3
    assert got["worst10"] == 0


@pytest.mark.parametrize(
    "clients, worst", [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (25, 3), (100, 10)]
)
def test_worst_tenth(clients, worst):
    """Accuracies 1/n, 2/n, …, 1: the worst k have mean (k + 1)/(2n)."""
    order = np.random.default_rng(0).permutation(clients)
    got = client_figures((order + 1).astype(float), np.full(clients, float(clients)))
    assert got["worst10"] == pytest.approx((worst + 1) / (2 * clients))


def test_client_figures_of_nobody():
    assert all(math.isnan(v) for v in client_figures(np.zeros(3), np.zeros(3)).values())


def test_large_counts_are_exact():
    """float32 counts above 2^24 would lose ones."""
    got = client_figures(np.array([2.0**25, 1.0]), np.array([2.0**25 + 1, 1.0]))
    assert got["pooled"] == (2**25 + 1) / (2**25 + 2)


def test_rounds_to():
    assert rounds_to([5, 10, 15], [0.2, 0.6, 0.7], 0.6) == 10
    assert rounds_to([5, 10, 15], [0.2, 0.6, 0.7], 0.71) is None
    assert rounds_to([5, 10], [math.nan, 0.6], 0.1) == 10


def test_convergence():
    """Moving average of 3 over [0 0 0 6 6 6 6 6]: 0 2 4 6 6 6, constant from its fourth value, i.e.
    the sixth round."""
    times, values = [10, 20, 30, 40, 50, 60, 70, 80], [0, 0, 0, 6, 6, 6, 6, 6]
    assert convergence(times, values, window=3, change=0.1) == 60
    assert convergence(times, values, window=3, change=2.5) == 50  # 4 6 6 6 stays within 2
    assert convergence(times, values, window=9, change=0.1) is None
    rng = np.random.default_rng(1)
    noisy = np.concatenate([np.linspace(0, 1, 30), 1 + 0.01 * rng.standard_normal(60)])
    window, change = 20, 0.02
    smooth = [noisy[i : i + window].mean() for i in range(len(noisy) - window + 1)]
    first = min(i for i in range(len(smooth)) if max(smooth[i:]) - min(smooth[i:]) < change)
    assert convergence(list(range(90)), noisy, window, change) == first + window - 1


def test_relative_gain():
    assert relative_gain(0.55, 0.5) == pytest.approx(10) and relative_gain(
        0.4, 0.5
    ) == pytest.approx(-20)


def test_probe_figures():
    """Participants 3, 1 and an empty seat; client 2 has no examples."""
    log = dict(
        probe_ids=np.array([3, 1, -1, 2]),
        probe_before_correct=np.array([1.0, 2.0, 9.0, 0.0]),
        probe_after_correct=np.array([4.0, 3.0, 9.0, 0.0]),
        probe_before_count=np.array([4.0, 4.0, 9.0, 0.0]),
        probe_after_count=np.array([4.0, 4.0, 9.0, 0.0]),
    )
    got = probe_figures(log, None, ACCURACY)
    assert got == dict(
        before_mean=pytest.approx((1 / 4 + 2 / 4) / 2), after_mean=pytest.approx((1 + 3 / 4) / 2)
    )
    resident = dict(correct=np.array([5.0, 0.0, 0.0, 0.0]), count=np.array([10.0, 4.0, 0.0, 4.0]))
    got = probe_figures(log, resident, ACCURACY)
    assert got["before_all_mean"] == pytest.approx((5 / 10 + 2 / 4 + 1 / 4) / 3)
    assert got["before_all_pooled"] == pytest.approx((5 + 2 + 1) / 18)
    assert resident["correct"][1] == 0  # not changed in place
    empty = {k: v[2:3] for k, v in log.items()}
    assert math.isnan(probe_figures(empty, None, ACCURACY)["before_mean"])


def test_payload_bytes_beyond_32_bit():
    """500 clients of an 11-million-parameter model: 22 GB a round."""
    floats = (10_000_000, 1_181_642)
    taken, sent = (
        np.array([[500, 500], [500, 0]], np.int32),
        np.array([[500, 0], [499, 499]], np.int32),
    )
    down, up = payload_bytes(
        taken,
        sent,
        floats_on_wire(floats, (7, 3)),
        np.array([500, 500], np.int32),
        np.array([500, 499], np.int32),
    )
    assert down.tolist() == [4 * (500 * sum(floats) + 500 * 7), 4 * (500 * floats[0] + 500 * 7)]
    assert up.tolist() == [4 * (500 * floats[0] + 500 * 3), 4 * (499 * sum(floats) + 499 * 3)]
    assert down.dtype == np.int64 and down[0] > 2**34


def test_summary_figures():
    accuracies = [0.1, 0.5, 0.9, 0.7, *([0.6] * 9)]
    validation = [0.1, 0.8, 0.7, 0.2, *([0.3] * 9)]
    rows = [
        dict(round=2 * i + 2, global_acc=accuracies[i], val_acc=validation[i]) for i in range(13)
    ]
    got = summary_figures(rows)
    assert got["best_global"] == 0.9 and got["best_global_round"] == 6
    assert got["best_by_val"] == 0.5 and got["last_global"] == 0.6
    assert got["mean_last10"] == pytest.approx((0.7 + 9 * 0.6) / 10)
    assert summary_figures([dict(round=1, global_acc=0.3)])["best_by_val"] is None
    assert summary_figures([dict(round=1, client_mean=0.3)])["best_global"] is None


def test_numbers_survive_the_csv(tmp_path):
    """What is written, read and written again has the same bytes: a resumed run rewrites its
    rows."""
    values = [
        0.1,
        1 / 3,
        -0.0,
        0.0,
        1e-30,
        2.0**70,
        123456789,
        -5,
        2**60,
        math.inf,
        math.nan,
        np.float32(0.1),
        True,
    ]
    rows = [{"a": number(v)} for v in values]
    stored = csv_bytes(["a"], rows)
    value = lambda text: (
        math.nan if text == "" else int(text) if text.lstrip("-").isdigit() else float(text)
    )
    again = [{"a": number(value(r["a"]))} for r in csv_rows(stored)]
    assert again == rows
    assert number(2**60) == str(2**60) and number(-0.0) == "0" and number(math.nan) == ""


def test_probe_figures_are_over_those_who_can_take_part():
    """Client 0 is kept out of training: it is in neither the BP nor the AP figures."""
    sums = dict(
        probe_before_correct=2.0,
        probe_before_count=4.0,
        probe_after_correct=3.0,
        probe_after_count=4.0,
    )
    log = dict(probe_ids=np.array([1])) | {name: np.array([value]) for name, value in sums.items()}
    resident = dict(correct=np.array([10.0, 3.0, 1.0]), count=np.array([10.0, 4.0, 4.0]))
    got = probe_figures(log, resident, ACCURACY, seen=(1, 2))
    assert got["before_all_mean"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert got["before_all_pooled"] == pytest.approx(3 / 8)


def fake_setup(split="test", seen=(0, 1), unseen=()):
    """As much of a Setup as a Recorder looks at: two groups of 3 and 2 floats, one float beside
    them each way."""
    env = types.SimpleNamespace(group_floats=lambda net: (3, 2), metrics=METRICS)
    wire = lambda env, net: floats_on_wire(env.group_floats(net), (1, 1))
    method = types.SimpleNamespace(wire=wire, adapts=False, warnings=lambda rounds: [])
    simulation = types.SimpleNamespace(env=env, method=method, client_split=split)
    config = types.SimpleNamespace(
        evaluations=("global", "personal", "resident"), eval_every=2, personal_every=0
    )
    participation = types.SimpleNamespace(seen=seen)
    return types.SimpleNamespace(
        simulation=simulation, net=None, participation=participation, unseen=unseen, config=config
    )


def some_rounds(first, number):
    """Logs in which round r has r participants."""
    at = np.arange(first, first + number)
    zero = np.zeros(number, int)
    return dict(
        round=at,
        participants=at,
        dropped=zero,
        diverged=at % 2,
        down=at,
        up=at,
        train_loss=at / 8.0,
        taken=np.stack([at, at], 1),
        sent=np.stack([at, zero], 1),
    )


def test_totals_of_evaluated_rows():
    """Running totals against sums over all rounds, also after a part was forgotten and came
    again."""
    recorder = Recorder(fake_setup())
    recorder.add_rounds(some_rounds(1, 6), 6)
    for at in (2, 4, 6):
        recorder.add_evaluation(dict(round=at), None)
    first = [dict(r) for r in recorder.rows]
    for row, start in zip(first, (1, 3, 5), strict=True):
        done = range(1, row["round"] + 1)
        assert row["bytes_down"] == sum(4 * (5 * r + r) for r in done)
        assert row["bytes_up"] == sum(4 * (3 * r + r) for r in done)
        assert row["participants"] == start + start + 1 and row["diverged"] == 1
        assert row["train_loss"] == row["round"] / 8
    recorder.truncate(3)
    recorder.add_rounds(some_rounds(4, 3), 3)
    for at in (4, 6):
        recorder.add_evaluation(dict(round=at), None)
    assert recorder.rows == first
    recorder.truncate(5, rounds=False)  # the last evaluation alone
    recorder.add_evaluation(dict(round=6), None)
    assert recorder.rows == first


def test_each_round_is_counted_once():
    """An evaluation after every round of a long run looks at every round once, not at all of them
    every time."""

    class Counting(list):
        looks = 0

        def __getitem__(self, at):
            Counting.looks += len(range(len(self))[at]) if isinstance(at, slice) else 1
            return super().__getitem__(at)

        def __iter__(self):
            Counting.looks += len(self)
            return super().__iter__()

    recorder = Recorder(fake_setup())
    recorder.add_rounds(some_rounds(1, 300), 300)
    recorder.rounds = Counting(recorder.rounds)
    for at in range(1, 301):
        recorder.add_evaluation(dict(round=at), None)
    assert Counting.looks < 10 * 300


def test_training_accuracy_is_named_and_unseen_clients_are_apart():
    count = np.array([4.0, 4.0])
    sums = dict(
        accuracy=dict(correct=np.array([1.0, 4.0]), count=count),
        loss=dict(total=np.array([2.0, 3.0]), count=count),
    )
    scores = dict(round=2, personal=sums)
    recorder = Recorder(fake_setup("train", (0,), (1,)))
    recorder.add_rounds(some_rounds(1, 2), 2)
    recorder.add_evaluation(scores, None)
    (row,) = recorder.rows
    assert (
        row["client_on_train_rows"] == 1
        and row["client_mean"] == 0.25
        and row["unseen_client_mean"] == 1.0
    )
    assert row["client_loss"] == 0.5 and recorder.clients["personal_correct"][0].tolist() == [
        1.0,
        4.0,
    ]
    tested = Recorder(fake_setup("test"))
    tested.add_rounds(some_rounds(1, 2), 2)
    tested.add_evaluation(scores, None)
    assert "client_on_train_rows" not in tested.rows[0]


def test_progress_figures():
    """Round 4 is the first at 50 %: bytes of its row, half of the second segment's time."""
    rows = [
        dict(round=r, global_acc=a, bytes_down=10**9 * r, bytes_up=0)
        for r, a in ((2, 0.25), (4, 0.55), (6, 0.45))
    ]
    timings = [
        dict(first_round=1, last_round=2, seconds=60.0),
        dict(first_round=3, last_round=6, seconds=240.0),
    ]
    got = progress_figures(rows, timings, eval_every=2)
    assert (
        got["rounds_to"]["50"] == 4
        and got["rounds_to"]["20"] == 2
        and got["rounds_to"]["60"] is None
    )
    assert got["comm_gb_to"]["50"] == 4.0 and got["comm_gb_to"]["60"] is None
    assert got["time_min_to"]["50"] == pytest.approx(3.0) and got["time_min_to"][
        "20"
    ] == pytest.approx(1.0)
    assert got["targets_of"] == "global_acc" and got["convergence_round"] is None
    private = [dict(round=1, global_acc=math.nan, client_mean=0.35, bytes_down=0, bytes_up=0)]
    got = progress_figures(private, timings)
    assert got["targets_of"] == "client_mean" and got["rounds_to"]["30"] == 1
    flat = [
        dict(round=r, global_acc=min(r, 5) / 10, bytes_down=0, bytes_up=0) for r in range(1, 60)
    ]
    # rounds 5 to 24 are the first 20 alike
    assert progress_figures(flat, timings)["convergence_round"] == 24
    assert progress_figures([], [])["targets_of"] is None


def test_the_last_value_alone_is_no_convergence():
    assert convergence([1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0], window=2, change=0.1) is None


def test_divergence_figures():
    rounds = [
        dict(round=1, participants=4, dropped=1, diverged=0, diverged_id=-1),
        dict(round=2, participants=4, dropped=0, diverged=2, diverged_id=7),
        dict(round=3, participants=2, dropped=1, diverged=1, diverged_id=3),
    ]
    got = divergence_figures(rounds)
    assert got["diverged"] == 3 and got["diverged_share"] == pytest.approx(3 / 8)
    assert got["diverged_first"] == dict(round=2, client=7) and got["rounds_without_upload"] == 1
    assert divergence_figures(rounds[:1])["diverged_first"] is None


def test_what_is_not_finite_is_null():
    assert clean(dict(a=math.inf, b=dict(c=math.nan, d=2.0), e="x")) == dict(
        a=None, b=dict(c=None, d=2.0), e="x"
    )


# ---- a metric that is no accuracy: smaller is better, a plain number, more than a ratio
# -------------------------------
RMSE = Metric(
    "rmse",
    lambda says, truth, real: dict(square=((says - truth) ** 2 * real).sum(), count=real.sum()),
    lambda found: dict(rmse=(found["square"] / found["count"]) ** 0.5),
    better=-1,
    label="RMSE",
    unit="number",
    over="rmse_",
)
OTHER = (RMSE, METRICS[1], METRICS[2])


def test_another_primary_metric_names_its_columns():
    sums = dict(square=np.array([4.0, 36.0, 0.0, 1.0]), count=np.array([1.0, 4.0, 0.0, 1.0]))
    loss = dict(total=np.ones(4), count=sums["count"])
    got = over_clients(OTHER, dict(rmse=sums, loss=loss), range(4))
    assert got["rmse_mean"] == pytest.approx((2 + 3 + 1) / 3) and got[
        "rmse_pooled"
    ] == pytest.approx((41 / 6) ** 0.5)
    assert got["rmse_worst10"] == 3  # the largest: smaller is better
    assert {f"client_{name}" for name in got} <= set(columns_of(OTHER, ("global", "personal")))
    assert float(value_of(RMSE, dict(square=np.float32(0), count=np.float32(0)))) == 0


def test_another_primary_metric_is_read_by_summary_progress_and_files():
    primary = Primary.read(described(OTHER, ("global", "personal")))
    assert (
        primary.columns == ("global_rmse", "client_rmse_mean")
        and primary.of_clients("worst10") == "client_rmse_worst10"
    )
    rows = [
        dict(round=r, global_rmse=v, bytes_down=0, bytes_up=0)
        for r, v in ((1, 3.0), (2, 1.0), (3, 2.0))
    ]
    got = summary_figures(rows, primary)
    assert got["best_global"] == 1.0 and got["best_global_round"] == 2 and got["last_global"] == 2.0
    assert (
        progress_figures(rows, [], primary=primary)["rounds_to"] == {}
        and primary.about.text(2.0) == "2"
    )
    setup = fake_setup()
    setup.simulation.env.metrics = OTHER
    recorder = Recorder(setup)
    recorder.add_rounds(some_rounds(1, 2), 2)
    sums = dict(square=np.array([4.0, 36.0]), count=np.array([1.0, 4.0]))
    found = dict(rmse=sums, loss=dict(total=np.ones(2), count=sums["count"]))
    recorder.add_evaluation(
        dict(
            round=2,
            personal=found,
            **{"global": {k: {n: v[0] for n, v in s.items()} for k, s in found.items()}},
        ),
        None,
    )
    assert recorder.rows[0]["global_rmse"] == 2.0 and recorder.rows[0]["client_rmse_worst10"] == 3.0
    # no ratio of two sums: kept for the report
    assert recorder.arrays()["personal_values"].tolist() == [[2.0, 3.0]]
    recorder.drop_clients("personal", 1)
    assert recorder.clients["personal_values"] == [] == recorder.clients["personal_square"]
