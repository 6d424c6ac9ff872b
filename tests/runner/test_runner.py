"""A whole run from Python and from the command line: its files, its figures, exact repetition,
resume after a kill."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny
from commands import SMALL
from paths import ROOT

import fedjax_sim as fs
from fedjax_sim.api import resume, run
from fedjax_sim.cli.main import main
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.tree import read_config
from fedjax_sim.runner import checkpoint, driver
from fedjax_sim.runner.many import run_seeds, with_seed
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.runner.run_directory import saved_rounds

jax.devices()
ONE = dict(
    model="mlp", model_options={"hidden": (5,)}, devices="1", chunk="1", batch_size=4, lr=0.05
)
ENVIRONMENT = {**os.environ, "FEDJAX_SIM_CACHE": jax.config.values["jax_compilation_cache_dir"]}


def table(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def same_figures(a: pathlib.Path, b: pathlib.Path) -> None:
    """metrics.csv and rounds.csv byte for byte, clients.npz array for array."""
    for name in ("metrics.csv", "rounds.csv"):
        assert (a / name).read_text() == (b / name).read_text(), name
    with np.load(a / "clients.npz") as one, np.load(b / "clients.npz") as two:
        assert sorted(one.files) == sorted(two.files)
        assert all(np.array_equal(one[k], two[k]) for k in one.files)


# ---- one rich run: every evaluation mode, probes, unseen clients, dropout, stragglers, a range of
# cohort sizes ---------
@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    out = tmp_path_factory.mktemp("rich") / "run"
    return run(
        "ditto",
        tiny.federation(),
        out=out,
        rounds=5,
        eval_every=2,
        epochs=2.0,
        participation="0.4:1",
        unseen=1,
        dropout=0.3,
        stragglers="0.5:0.3",
        probe=True,
        seed=3,
        **ONE,
        evaluations=("global", "global@clients", "personal", "personal@global", "resident"),
    )


def test_run_directory_holds_every_file(rich):
    assert {p.name for p in rich.out.iterdir()} == {
        "config.json",
        "metrics.csv",
        "rounds.csv",
        "timings.csv",
        "clients.npz",
        "labels.npz",
        "checkpoints",
        "summary.json",
        "manifest.json",
    }
    summary = json.loads((rich.out / "summary.json").read_text())
    assert {
        "method",
        "best_global",
        "best_by_val",
        "last_global",
        "mean_last10",
        "client_acc_mean",
        "client_acc_pooled",
        "rounds",
        "seconds_per_round",
        "compile_seconds",
        "bytes_down",
        "bytes_up",
        "peak_rss_mb",
        "seed",
        "config_hash",
    } <= set(summary)
    assert summary["method"] == "ditto" and summary["rounds"] == 5 and summary["seed"] == 3
    assert "test" in summary["best_global_note"]  # labelled as what it is
    stored = json.loads((rich.out / "config.json").read_text())
    experiment, found = read_config(stored)
    assert stored["config_hash"] == summary["config_hash"] == experiment.hash(found)
    assert stored["resolved"]["chunk"] == 1


def test_metrics_columns_and_rounds(rich):
    rows = table(rich.out / "metrics.csv")
    assert [r["round"] for r in rows] == ["2", "4", "5"]  # every second, and the last
    named = [
        name for name in rows[0] if not name.startswith(("resident_", "personal_at_", "global_at_"))
    ]
    assert named[:16] == [
        "round",
        "global_acc",
        "global_loss",
        "val_acc",
        "val_loss",
        "client_mean",
        "client_pooled",
        "client_std",
        "client_loss",
        "client_worst10",
        "bytes_down",
        "bytes_up",
        "participants",
        "dropped",
        "diverged",
        "exploding",
    ]
    assert {
        "before_mean",
        "after_mean",
        "before_all_mean",
        "before_all_pooled",
        "resident_mean",
        "personal_at_global_mean",
        "global_at_clients_mean",
        "unseen_client_mean",
    } <= set(rows[0])
    # nothing depends on the clock
    assert not any("second" in name or "time" in name for name in rows[0])
    assert all(v != "" for r in rows for v in r.values())


def test_figures_follow_from_the_counts(rich):
    """Means, pooled and unseen figures recomputed from clients.npz."""
    rows = table(rich.out / "metrics.csv")
    unseen = list(rich.setup.unseen)
    seen = [i for i in range(tiny.N) if i not in unseen]
    assert len(unseen) == 1
    with np.load(rich.out / "clients.npz") as file:
        for mode, prefix in (
            ("personal", "client"),
            ("resident", "resident"),
            ("personal_at_global", "personal_at_global"),
            ("global_at_clients", "global_at_clients"),
        ):
            correct, count = file[f"{mode}_correct"], file[f"{mode}_count"]
            assert correct.shape == (3, tiny.N) and file[f"{mode}_rounds"].tolist() == [2, 4, 5]
            assert (
                count
                == (
                    len(tiny.federation().server_rows["test"])
                    if mode == "personal_at_global"
                    else 3
                )
            ).all()
            for i, row in enumerate(rows):
                assert float(row[f"{prefix}_mean"]) == pytest.approx(
                    (correct[i] / count)[seen].mean(), rel=1e-7
                )
                assert float(row[f"{prefix}_pooled"]) == pytest.approx(
                    correct[i][seen].sum() / count[seen].sum(), rel=1e-7
                )
                assert float(row[f"unseen_{prefix}_mean"]) == pytest.approx(
                    (correct[i] / count)[unseen].mean(), rel=1e-7
                )


def test_counts_and_bytes_add_up(rich):
    """Down: everybody invited; up: everybody who reported. Cumulative in metrics.csv, per round in
    rounds.csv."""
    rounds, rows = table(rich.out / "rounds.csv"), table(rich.out / "metrics.csv")
    parameters = 4 * 4 * 5 + 5 + 5 * 3 + 3
    down = [4 * parameters * int(r["participants"]) for r in rounds]
    up = [4 * parameters * (int(r["participants"]) - int(r["dropped"])) for r in rounds]
    assert [int(r["bytes_down"]) for r in rounds] == down and [
        int(r["bytes_up"]) for r in rounds
    ] == up
    # 0.4:1 of the 5 that may be sampled
    assert all(2 <= int(r["participants"]) <= 5 for r in rounds)
    assert (
        len({r["participants"] for r in rounds}) > 1 and sum(int(r["dropped"]) for r in rounds) > 0
    )
    for row, (first, last) in zip(rows, ((0, 2), (2, 4), (4, 5)), strict=True):
        assert int(row["bytes_down"]) == sum(down[:last]) and int(row["bytes_up"]) == sum(up[:last])
        for name in ("participants", "dropped", "diverged"):
            assert int(row[name]) == sum(int(r[name]) for r in rounds[first:last])
    summary = rich.summary
    assert summary["bytes_down"] == sum(down) and summary["dropped"] == sum(
        int(r["dropped"]) for r in rounds
    )
    assert summary["steps_needed"] == sum(int(r["steps_needed"]) for r in rounds)
    # stragglers do less: 2 epochs of ceil(n/4) batches each, in both of Ditto's passes, would be
    # the most
    most = sum(sorted((2 * 2 * -(-n // 4) for n in tiny.SIZES), reverse=True)[:5])
    assert (
        all(int(r["steps_needed"]) <= most for r in rounds) and int(rounds[0]["steps_executed"]) > 0
    )


def test_unseen_clients_never_train(rich):
    """Ditto keeps a private model per client: the unseen one's is the initial net, bit for bit."""
    stored = jax.tree.map(np.asarray, rich.state.clients.own)
    fresh = jax.tree.map(np.asarray, rich.setup.net)
    same = [
        all(
            np.array_equal(a[i], b)
            for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(fresh), strict=True)
        )
        for i in range(tiny.N)
    ]
    assert same[rich.setup.unseen[0]] and not all(same)


def test_same_seed_same_bytes(rich, tmp_path):
    again = run(
        "ditto",
        tiny.federation(),
        out=tmp_path / "again",
        **{
            k: rich.setup.experiment.get(k)
            for k in (
                "rounds",
                "eval_every",
                "epochs",
                "participation",
                "unseen",
                "dropout",
                "stragglers",
                "probe",
                "seed",
                "evaluations",
                *ONE,
            )
        },
    )
    same_figures(rich.out, again.out)


# ---- own data, model, weights --------------------------------------------------------------------
def test_user_arrays_model_and_weights_in_ten_lines():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    x = rng.standard_normal((120, 3, 3, 1)).astype(np.float32) + 4 * y[:, None, None, None]
    rows = {"train": np.split(np.arange(80), 4), "val": np.split(np.arange(80, 100), 4)}
    fed = fs.Federation.from_arrays(x, y, rows, test=np.arange(100, 120), mean=0.0, std=1.0)
    model = fs.build("mlp", fed.shape, fed.classes, hidden=(4,))
    net = jax.tree.map(lambda a: a + 0.01, model.init(jax.random.key(5)))
    result = fs.run(
        "fedavg",
        fed,
        model=model,
        net=net,
        rounds=3,
        epochs=2,
        batch_size=5,
        lr=0.1,
        participation="1",
        devices="1",
        chunk="1",
    )
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(result.setup.net), jax.tree.leaves(net), strict=True)
    )
    assert result.summary["last_global"] > 0.9 and len(result.rows) == 3 and result.out is None
    assert result.summary["bytes_up"] == 3 * 4 * 4 * (9 * 4 + 4 + 4 * 2 + 2)


def test_user_flax_module():
    import flax.linen as nn

    from fedjax_sim.models import from_module

    class Net(nn.Module):
        def setup(self):
            self.body, self.top = nn.Dense(6), nn.Dense(tiny.CLASSES)

        def features(self, x, train=False, mask=None, tap=None):
            return nn.relu(self.body(x.reshape(len(x), -1)))

        def head(self, features):
            return self.top(features)

        def __call__(self, x):
            return self.head(self.features(x))

    model = from_module(
        "mine",
        Net(),
        shape=(4, 4, 1),
        groups=("body", "top"),
        dense=("body", "top"),
        width=6,
        classes=tiny.CLASSES,
        stages=(),
        dtype=np.float32,
    )
    result = run(
        "head",
        tiny.federation(),
        model=model,
        rounds=2,
        epochs=1,
        participation="0.5",
        devices="1",
        chunk="1",
        batch_size=4,
        first="any",
    )
    assert result.summary["model"] == "mine"
    # the policy `head`: only the top comes down
    assert result.summary["bytes_down"] == 2 * 3 * 4 * (6 * 3 + 3)


# ---- resume --------------------------------------------------------------------------------------
def test_killed_run_resumes_to_the_same_bytes(tmp_path):
    """kill -9 in the middle, then resume: metrics.csv and rounds.csv of the uninterrupted run, byte
    for byte."""
    options = [
        "run",
        "scaffold",
        *SMALL,
        "--rounds",
        "25",
        "--checkpoint-every",
        "2",
        "--eval-every",
        "3",
        "--dropout",
        "0.2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedjax_sim", *options, "--out", str(tmp_path / "killed")],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 120
        while not (tmp_path / "killed" / "checkpoints" / "00000006" / "meta.json").exists():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    assert main(["resume", str(tmp_path / "killed"), "--quiet"]) == 0
    assert main([*options, "--out", str(tmp_path / "whole")]) == 0
    same_figures(tmp_path / "killed", tmp_path / "whole")
    assert [int(r["round"]) for r in table(tmp_path / "whole" / "metrics.csv")] == [
        *range(3, 25, 3),
        25,
    ]


def test_rows_are_on_disk_before_their_checkpoint(tmp_path, monkeypatch):
    """Killed right after a checkpoint became visible: its rounds must already be in the files."""
    seen = []

    def save(folder, state, *args):
        seen.append(
            (int(state.t), [int(r["round"]) for r in table(folder.parent / "rounds.csv")][-1])
        )
        return folder

    monkeypatch.setattr(checkpoint, "save", save)
    run(
        "fedavg",
        tiny.federation(),
        out=tmp_path / "run",
        rounds=4,
        checkpoint_every=2,
        epochs=1,
        **ONE,
    )
    assert seen == [(2, 2), (4, 4)]


@pytest.mark.parametrize("personal_every, personal_at", [(0, [7]), (3, [3, 6, 7])])
def test_extended_run_equals_the_straight_one(tmp_path, personal_every, personal_at):
    """T = 5, then 7, with an evaluation every 2 rounds and fine-tuning every personal_every: what
    only the end of the first part recorded is dropped."""
    options = dict(
        eval_every=2, personal_every=personal_every, epochs=1, participation="0.5", **ONE
    )
    run("fedavg_ft", tiny.federation(), out=tmp_path / "a", rounds=5, **options)
    rows = table(tmp_path / "a" / "metrics.csv")
    assert rows[-1]["round"] == "5" and rows[-1]["client_mean"] != ""
    resume(tmp_path / "a", 7, fed=tiny.federation())
    run("fedavg_ft", tiny.federation(), out=tmp_path / "b", rounds=7, **options)
    same_figures(tmp_path / "a", tmp_path / "b")
    rows = table(tmp_path / "b" / "metrics.csv")
    assert [int(r["round"]) for r in rows] == sorted({2, 4, 6, 7, *personal_at})
    assert [int(r["round"]) for r in rows if r["client_mean"] != ""] == personal_at
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["rounds"] == 7


def test_extension_on_the_grid_drops_the_last_fine_tuning(tmp_path):
    """The old end is on the evaluation grid: its row stays, its fine-tuned figures go."""
    options = dict(eval_every=2, epochs=1, participation="0.5", **ONE)
    run("fedavg_ft", tiny.federation(), out=tmp_path / "a", rounds=6, **options)
    resume(tmp_path / "a", 8, fed=tiny.federation())
    run("fedavg_ft", tiny.federation(), out=tmp_path / "b", rounds=8, **options)
    same_figures(tmp_path / "a", tmp_path / "b")


# ---- layouts, seeds, types -----------------------------------------------------------------------
def test_loop_backend_equals_chunked(tmp_path):
    options = dict(rounds=3, eval_every=2, epochs=1, participation="0.5", **(ONE | dict(chunk="2")))
    fast = run("fedavg", tiny.federation(), backend="chunked", **options)
    slow = run("fedavg", tiny.federation(), backend="loop", **options)
    assert [r["round"] for r in fast.rows] == [r["round"] for r in slow.rows] == [2, 3]
    assert tiny.close(fast.state.server, slow.state.server)
    for a, b in zip(fast.rows, slow.rows, strict=True):
        assert all(a[k] == pytest.approx(b[k], abs=1e-5, nan_ok=True) for k in a)


def test_seeds_loop_and_vmap_agree(tmp_path):
    setup = prepare(
        Experiment.of(
            "fedavg", rounds=3, eval_every=2, epochs=1.0, participation="0.5", seed=4, **ONE
        ),
        fed=tiny.federation(),
    )
    loop = run_seeds(setup, 3, tmp_path / "loop", "loop")
    vmap = run_seeds(setup, 3, tmp_path / "vmap", "vmap")
    alone = run(
        "fedavg",
        tiny.federation(),
        rounds=3,
        eval_every=2,
        epochs=1.0,
        participation="0.5",
        seed=5,
        **ONE,
    )
    assert [r.summary["seed"] for r in loop] == [4, 5, 6]
    # one program for all, same bits as a run of its own
    assert tiny.same_bits(alone.state, loop[1].state)
    assert not tiny.same_bits(loop[0].state.server, loop[1].state.server)
    for a, b in zip(loop, vmap, strict=True):
        assert tiny.close(a.state.server, b.state.server)
        assert a.out.name == b.out.name == f"seed-{a.summary['seed']}"
        for x, y in zip(table(a.out / "metrics.csv"), table(b.out / "metrics.csv"), strict=True):
            assert all(float(x[k]) == pytest.approx(float(y[k]), abs=1e-5) for k in x if x[k])
    assert resume(tmp_path / "vmap" / "seed-5", 4, fed=tiny.federation()).summary["rounds"] == 4


def small_setup(**more):
    options = dict(
        rounds=6, eval_every=2, epochs=1.0, participation="0.5", seed=4, checkpoint_every=2, **ONE
    )
    return prepare(Experiment.of("fedavg", **{**options, **more}), fed=tiny.federation())


def test_seeds_side_by_side_write_as_they_go_and_resume_alone(tmp_path, monkeypatch):
    """Interrupted between checkpoints: every run has its rows and a checkpoint, and is resumed
    alone to the same figures."""
    whole = run_seeds(small_setup(), 2, tmp_path / "whole", "vmap")
    real, calls = driver.segment_length, []

    def third_is_interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(driver, "segment_length", third_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_seeds(small_setup(), 2, tmp_path / "cut", "vmap")
    monkeypatch.undo()
    for i, seed in enumerate((4, 5)):
        cut = tmp_path / "cut" / f"seed-{seed}"
        assert [r["round"] for r in table(cut / "rounds.csv")] == ["1", "2", "3", "4"]
        assert saved_rounds(cut / "checkpoints") == [2, 4] and not (cut / "summary.json").exists()
        rest = resume(cut, fed=tiny.federation())
        assert rest.summary["rounds"] == 6 and rest.summary["seed"] == seed
        assert tiny.close(rest.state, whole[i].state)
        for a, b in zip(rest.rows, whole[i].rows, strict=True):
            assert all(a[k] == pytest.approx(b[k], abs=1e-5, nan_ok=True) for k in a)


def test_interrupted_seeds_name_every_directory(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "segment_length", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_seeds(small_setup(rounds=2), 2, tmp_path / "s", "vmap")
    err = capsys.readouterr().err
    assert (
        "interrupted before the first round was done, nothing had to be saved; continue with:"
        " fedjax-sim resume" in err
    )
    assert {p.name for p in (tmp_path / "s").iterdir()} == {"seed-4", "seed-5"}
    assert all(f"resume {tmp_path / 's' / name}" in err for name in ("seed-4", "seed-5"))
    monkeypatch.undo()
    assert resume(tmp_path / "s" / "seed-5", fed=tiny.federation()).summary["rounds"] == 2


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_seeds_start_from_the_callers_weights(mode):
    """Weights given from Python are every seed's; weights from a seed are not."""
    net = jax.tree.map(lambda a: a + 0.25, small_setup().net)
    options = dict(rounds=1, eval_every=1, epochs=1.0, participation="0.5", seed=4, **ONE)
    given = run_seeds(
        prepare(Experiment.of("fedavg", **options), fed=tiny.federation(), net=net), 2, None, mode
    )
    assert all(tiny.same_bits(r.setup.net, net) for r in given)
    assert not tiny.same_bits(given[0].state.server, given[1].state.server)
    drawn = [
        with_seed(prepare(Experiment.of("fedavg", **options), fed=tiny.federation()), seed)
        for seed in (4, 5)
    ]
    assert not tiny.same_bits(drawn[0].net, drawn[1].net)


@pytest.mark.parametrize(
    "more, sentence",
    [
        (dict(state_on="host"), "state-on host is not possible with seeds-mode 'vmap'"),
        (dict(backend="loop"), "backend loop is not possible with seeds-mode 'vmap'"),
        (dict(devices="2"), "seeds-mode vmap runs on one device, not 2"),
    ],
)
def test_what_cannot_run_side_by_side_is_refused(tmp_path, more, sentence):
    with pytest.raises(fs.UserError, match=sentence):
        run_seeds(small_setup(**more), 2, tmp_path / "s", "vmap")
    with pytest.raises(fs.UserError, match="unknown seeds-mode 'vmpa'"):
        run_seeds(small_setup(), 2, tmp_path / "s", "vmpa")
    assert not (tmp_path / "s").exists()


def test_float64_runs_in_double_precision(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "fedjax_sim",
            "run",
            "fedavg",
            *SMALL,
            "--rounds",
            "2",
            "--dtype",
            "float64",
            "--out",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    leaves = json.loads((tmp_path / "run" / "checkpoints" / "00000002" / "meta.json").read_text())[
        "leaves"
    ]
    kinds = {leaf["dtype"] for leaf in leaves}
    assert "float64" in kinds and "float32" not in kinds
    assert len(table(tmp_path / "run" / "metrics.csv")) == 2 and "run directory" in done.stdout


@pytest.mark.parametrize("every", [1, 3, 600])
def test_segments_are_short_from_the_first(every):
    """However rare evaluations are, the first call is a few rounds, later ones about ten seconds;
    all rounds are run."""
    config, done, speed, asked = Experiment.of(rounds=700, eval_every=every), 0, None, []
    while done < config.training.rounds:
        asked.append(driver.segment_length(config, 32, done, speed))
        done, speed = done + asked[-1], 4.0
    assert asked[0] == min(every, 5) and done == 700
    assert max(asked[1:]) == 2


@pytest.mark.parametrize(
    "more", [{}, {"backend": "loop"}, {"state_on": "host"}], ids=["compiled", "loop", "host"]
)
def test_segments_off_the_grid_are_not_evaluated_for_nothing(more, monkeypatch):
    """Rounds so slow that each is a call of its own: evaluated are those on the grid and the last;
    nothing else changes."""
    real, seen = driver.collect, []

    def collect(active, here, logs, scores, done, count):
        seen.extend(int(at) for at in scores["round"] if at)
        real(active, here, logs, scores, done, count)

    monkeypatch.setattr(driver, "collect", collect)
    setup = small_setup(rounds=5, checkpoint_every=0, **more)
    (whole,) = driver.drive([setup], [None])
    assert seen == [2, 4, 5]
    seen.clear()
    monkeypatch.setattr(driver, "SEGMENT_SECONDS", 0.0)
    monkeypatch.setattr(driver, "FIRST_ROUNDS", 1)
    (slow,) = driver.drive([setup], [None], program=whole.program)
    assert seen == [2, 4, 5] == [row["round"] for row in slow.rows]
    assert slow.rows == whole.rows and tiny.close(slow.state, whole.state, 0)
    # a branch, no loop: XLA moves what is the same in every turn out of a loop, even of one that
    # takes none
    if not more:
        sim = setup.simulation
        always = sim.run.lower(sim.init(4, setup.net), sim.data, np.int32(1)).compile()
        branches = lambda program: program.as_text().count(" conditional(")
        assert branches(whole.program) == branches(always) + 1


@pytest.mark.filterwarnings("error:Explicitly requested dtype")
def test_a_run_leaves_nothing_behind_in_the_process():
    """A, B, A: after a run in double precision, or with other products, the first one gives its own
    bits again."""
    small = dict(
        model="mlp",
        model_options={"hidden": (8,)},
        clients=4,
        participation=1,
        rounds=2,
        epochs=1,
        devices=1,
    )
    before = dict(jax.config.values)
    first = fs.run("fedavg", **small)
    other = fs.run("fedavg", dtype="float64", precision="highest", **small)
    assert {np.asarray(leaf).dtype for leaf in jax.tree.leaves(other.net)} == {np.dtype("float64")}
    assert other.predict(other.setup.fed.x[:2], logits=True).dtype == np.float64
    steps = fs.rounds("fedavg", dtype="float64", **small)
    assert (
        next(steps).net["params"]["fc"]["bias"].dtype == np.float64
        and not jax.config.jax_enable_x64
    )
    again = fs.run("fedavg", **small)
    assert again.rows == first.rows and tiny.same_bits(again.state, first.state)
    assert dict(jax.config.values) == before
