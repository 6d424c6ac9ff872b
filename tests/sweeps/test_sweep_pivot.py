"""`sweep --pivot`, and runs of a sweep that start from another one of it."""

from __future__ import annotations

import json
import pathlib

import pytest
from commands import empty_folder, refused
from test_sweep import TINY, toml

from fedjax_sim.cli.main import main
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.papers.pivot import Cell, Pivot
from fedjax_sim.sweeps import queue
from fedjax_sim.sweeps.folder import Folder, started, waits
from fedjax_sim.sweeps.pivots import pivots
from fedjax_sim.sweeps.plan import jobs_of, read

__all__ = ["empty_folder"]  # used by every test


def task(i: int) -> int:
    return main(["sweep", "grid.toml", "--out", "s", "--task", str(i), "--quiet"])


def test_rows_and_columns_are_two_settings(capsys):
    file = toml(
        'methods = ["fedavg", "fedprox:mu=0.1"]\nseeds = 2\n' + TINY + "[grid]\nlr = [0.05, 0.1]\n"
    )
    assert all(task(i) == 0 for i in (0, 1, 2, 4, 5))
    capsys.readouterr()
    assert main(["sweep", str(file), "--out", "s", "--gather", "--pivot", "method,lr"]) == 0
    printed = capsys.readouterr().out
    head, first, second = printed.splitlines()[-4:-1]
    assert head.split() == ["0.05", "0.1"]
    assert first.startswith("fedavg") and first.count("±") == 1  # two seeds, and one
    assert "[2 r, 2 seeds]" in first and "[2 r, 1 seed]" in first
    assert second.startswith("fedprox") and second.endswith("not ended")
    assert "| fedavg |" in pathlib.Path("s/pivot.md").read_text()
    values = [
        json.loads(p.read_text())["best_global"]
        for p in sorted(pathlib.Path("s/runs").glob("fedavg-lr0.05*/summary.json"))
    ]
    assert f"{100 * sum(values) / 2:.2f} ±" in first
    assert (
        main(
            [
                "sweep",
                str(file),
                "--out",
                "s",
                "--gather",
                "--pivot",
                "lr,method",
                "--read",
                "last:client_mean",
            ]
        )
        == 0
    )
    assert "mean over clients" in capsys.readouterr().out
    assert "unknown setting in --pivot 'lrr' (did you mean 'lr'?)" in refused(
        capsys, "sweep", str(file), "--out", "s", "--gather", "--pivot", "method,lrr"
    )
    assert "does not name rows and columns" in refused(
        capsys, "sweep", str(file), "--out", "s", "--pivot", "method"
    )
    assert "it needs --pivot" in refused(
        capsys, "sweep", str(file), "--out", "s", "--read", "last:client_mean"
    )
    argv = (
        "sweep",
        str(file),
        "--out",
        "s",
        "--gather",
        "--pivot",
        "method,lr",
        "--read",
        "smallest:global_acc",
    )
    assert "unknown reading 'smallest'" in refused(capsys, *argv)
    jobs = jobs_of(read(file))
    Folder(pathlib.Path("s")).fail(jobs[-1], "no memory")
    (table,) = pivots(jobs, Folder(pathlib.Path("s")), "method,lr")
    assert table.cells["fedprox", "0.1"].note == "failed"


def test_the_settings_that_are_left_make_a_table_each():
    cell = lambda value: Cell((value,), rounds=(2,), planned=2)
    pivot = Pivot(
        "t", [("a", "a")], [("x", "x"), ("y", "y")], {("a", "x"): cell(1.0), ("a", "y"): cell(2.0)}
    )
    assert (
        pivot.as_text().splitlines()[-1].split() == ["a", "1.00", "2.00"]
        and pivot.same() == "2 rounds, 1 seed"
    )


BEFORE = (
    'methods = ["fedavg:start_from=@first:server", "fedavg"]\n'
    + TINY
    + '[before.first]\nmethod = "fedprox"\nrounds = 3\n'
)


def test_a_run_starts_from_another_one(capsys):
    toml(BEFORE)
    assert "which has not ended" in refused(
        capsys, "sweep", "grid.toml", "--out", "s", "--task", "1", "--quiet"
    )
    assert task(0) == 0 and task(1) == 0
    capsys.readouterr()
    runs = pathlib.Path("s/runs")
    (first,) = runs.glob("before-first-s0")
    cells = [
        flat_config(json.loads((p / "config.json").read_text()))
        for p in (first, *sorted(runs.glob("fedavg*")))
    ]
    assert [c["rounds"] for c in cells] == [3, 2] and cells[1]["started_with"].startswith("server@")
    assert main(["sweep", "grid.toml", "--out", "s", "--dry-run"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == [
        "done",
        "done",
        "waiting",
    ]


@pytest.mark.parametrize(
    "text, sentence",
    [
        (
            'methods = ["fedavg:start_from=@frist"]\n[before.first]\nmethod = "fedprox"',
            "did you mean 'first'",
        ),
        (
            'methods = ["fedavg:start_from=@first"]\n[before.first]\nmethod = "fedprox"',
            "has no default parts to start from",
        ),
        ('methods = ["fedavg"]\n[before.first]\nrounds = 2', "[before.first] needs a method"),
        (
            'methods = ["fedavg"]\n[before.first]\nmethod = "fedavg"\nround = 2',
            "did you mean 'rounds'",
        ),
    ],
)
def test_mistakes_are_sentences(text, sentence, capsys):
    assert sentence in refused(capsys, "sweep", str(toml(text)), "--dry-run")


def test_an_agent_is_handed_over_without_naming_parts():
    jobs = jobs_of(
        {
            "methods": ["pfedrlla:start_from=@pre"],
            "before": {"pre": {"method": "pfedrlla:regime=pretrain", "rounds": 4}},
        }
    )
    assert jobs[0].name == "before-pre-s0" and jobs[1].before is jobs[0]
    assert "agent" in jobs[1].parts and jobs[1].experiment.model.start_from is None


def test_the_queue_waits_and_gives_up(tmp_path):
    """What starts from another run is begun after it; it fails when that one does."""
    jobs = jobs_of(
        {
            "methods": ["fedavg:start_from=@a:server"],
            "before": {"a": {"method": "fedavg", "seed": 5}},
        }
    )
    folder, order = Folder(tmp_path), []

    class Fails:
        room = 2

        def start(self, job):
            order.append(job.name)
            return job

        def poll(self, handle):
            return 1, "no"

        def stop(self, handle):
            raise AssertionError

    queue.work_off(jobs, jobs, folder, Fails(), lambda running, changed: None)
    assert order == [jobs[0].name] and waits(jobs[1], folder)
    assert "before-a-s5, failed" in folder.why(jobs[1])
    assert started(jobs[1], folder).model.start_from == f"{folder.run(jobs[0])}:server"


def test_a_ranking_of_equal_figures_has_no_tau():
    def last_line(values):
        cells = {
            (row, "x"): Cell((value,), theirs=float(i))
            for i, (row, value) in enumerate(zip("abc", values, strict=True))
        }
        table = Pivot("t", [(row, row) for row in "abc"], [("x", "x")], cells)
        return table.as_text().splitlines()[-1].split()

    assert last_line([5.0, 5.0, 5.0]) == ["Kendall", "τ", "–"]
    assert last_line([1.0, 2.0, 3.0]) == ["Kendall", "τ", "1.00"]
