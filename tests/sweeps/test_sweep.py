"""`sweep`: the grid, what is skipped or resumed, failures, workers, SLURM and Ray,
results.csv."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import tomllib
import types

import pytest
from commands import empty_folder, refused
from drawn import sign, write_run
from paths import ROOT

from fedjax_sim.cli.main import main
from fedjax_sim.report.runs import load_runs
from fedjax_sim.runner.files import Lock
from fedjax_sim.sweeps import launchers, queue
from fedjax_sim.sweeps.folder import Folder, write_results
from fedjax_sim.sweeps.plan import jobs_of
from fedjax_sim.sweeps.table import Table, results

__all__ = ["empty_folder"]  # used by every test
TINY = (
    '[settings]\nrounds = 2\nmodel = "mlp"\n"model.hidden" = [8]\nclients = 6\nepochs = 1\ndevices'
    " = 1\nchunk = 1\n"
)


def toml(text: str) -> pathlib.Path:
    path = pathlib.Path("grid.toml")
    path.write_text(text)
    return path


def rows(folder: str) -> list[dict[str, str]]:
    return list(csv.DictReader((pathlib.Path(folder) / "results.csv").open()))


# ---- the plan ------------------------------------------------------------------------------------
def test_the_grid_is_methods_times_settings_times_seeds():
    jobs = jobs_of(
        {
            "methods": ["fedavg", "fedprox", "fedpolicy", "fedprox:mu=5"],
            "seeds": [0, 7],
            "settings": {"rounds": 3, "loss": "ce", "model": "mlp", "data_seed": "follow"},
            "grid": {
                "partition": ["iid", "dirichlet:0.1"],
                "agent": ["sac", "ppo"],
                "fedprox": {"mu": [0.1, 1]},
            },
        }
    )
    count = lambda method: len([j for j in jobs if j.experiment.method.name == method])
    assert count("fedavg") == 2 * 2  # neither agent nor mu is one of its options: once each
    assert count("fedprox") == (2 + 1) * 2 * 2  # two from the grid, one that says its own
    assert count("fedpolicy") == 2 * 2 * 2
    assert {
        j.experiment.method.options.get("agent")
        for j in jobs
        if j.experiment.method.name == "fedpolicy"
    } == {"sac", "ppo"}
    assert {
        j.experiment.method.options.get("mu") for j in jobs if j.experiment.method.name == "fedprox"
    } == {0.1, 1.0, 5.0}
    assert all(
        j.experiment.training.rounds == 3
        and j.experiment.data.data_seed == j.experiment.training.seed
        for j in jobs
    )
    assert [j.index for j in jobs] == list(range(len(jobs))) and len({j.name for j in jobs}) == len(
        jobs
    )
    more = jobs_of({"methods": ["fedavg"], "settings": {"rounds": 9}})
    # more rounds: the same run is extended
    assert more[0].name == jobs_of({"methods": ["fedavg"]})[0].name
    # unless they are what is swept
    assert len(jobs_of({"methods": ["fedavg"], "grid": {"rounds": [2, 4]}})) == 2


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("methods = [", "is not TOML"),
        ("seeds = 2", "needs methods"),
        ('methods = ["fedavgg"]', "unknown method 'fedavgg' (did you mean 'fedavg'?)"),
        (
            'methods = ["fedavg"]\nseed = 3',
            "unknown part of a sweep file 'seed' (did you mean 'seeds'?)",
        ),
        ('methods = ["fedavg"]\nseeds = 0', "seeds 0 is not allowed"),
        ('methods = ["fedavg"]\nseeds = [1, 1]', "a list of different seeds"),
        ('methods = ["fedavg"]\n[grid]\nlr = 0.1', "grid.lr is not a list of values"),
        ('methods = ["fedavg"]\n[grid]\nlr = [0.1, "x"]', "lr 'x' is not a number"),
        ('methods = ["fedavg"]\n[settings]\nlrr = 1', "'lrr' (did you mean 'lr'?)"),
        (
            'methods = ["fedavg"]\n[settings]\nmu = 1',
            "unknown option of a run or of method 'fedavg' 'mu'",
        ),
        ('methods = ["fedavg"]\n[settings]\nout = "x"', "is an option of the whole command"),
        ('methods = ["fedavg"]\n[settings]\nrounds = 0', "rounds 0 is too small"),
        ('methods = ["fedprox:mu=-x"]', "fedprox.mu '-x' is not a number"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_runs(capsys, tmp_path, text, sentence):
    assert sentence in refused(capsys, "sweep", str(toml(text)), "--out", "out")
    assert "cannot be read" in refused(capsys, "sweep", "nowhere.toml")
    assert not (tmp_path / "out").exists()


# ---- one task ------------------------------------------------------------------------------------
def test_a_task_runs_skips_and_goes_on(capsys):
    file = toml('methods = ["fedavg"]\n' + TINY)
    task = ["sweep", str(file), "--out", "out", "--task", "0", "--quiet"]
    assert main(task) == 0
    (run,) = pathlib.Path("out/runs").iterdir()
    first = (run / "metrics.csv").read_text()
    stamp = (run / "summary.json").stat().st_mtime_ns
    assert main(task) == 0 and (run / "summary.json").stat().st_mtime_ns == stamp  # it has ended
    (run / "summary.json").unlink()  # as a kill before the end leaves it
    toml('methods = ["fedavg"]\n' + TINY.replace("rounds = 2", "rounds = 3"))
    assert main(task) == 0
    assert (run / "metrics.csv").read_text().startswith(first)  # from the checkpoint of round 2
    assert json.loads((run / "summary.json").read_text())["rounds"] == 3
    capsys.readouterr()
    assert main(["sweep", str(file), "--out", "out", "--gather"]) == 0
    assert "fedavg" in capsys.readouterr().out and rows("out")[0]["status"] == "done"
    assert "task 5 is not in the sweep" in refused(capsys, *task[:-2], "5")


# ---- workers -------------------------------------------------------------------------------------
def test_processes_side_by_side_and_a_failure_that_stops_nobody(capsys, monkeypatch):
    """Real processes: one run ends well, one fails; both are in results.csv, and the next start
    tries only the latter."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    file = toml('methods = ["fedavg"]\n' + TINY + '[grid]\ndataset = ["digits", "nowhere.npz"]\n')
    workers = min(2, len(launchers.cores()))
    assert main(["sweep", str(file), "--out", "out", "--workers", str(workers)]) == 1
    said = capsys.readouterr()
    status = {r["dataset"]: r for r in rows("out")}
    assert status["digits"]["status"] == "done" and float(status["digits"]["best_global"]) > 0
    assert (
        status["nowhere.npz"]["status"] == "failed"
        and "there is no file 'nowhere.npz'" in status["nowhere.npz"]["why"]
    )
    assert (
        "failed: there is no file 'nowhere.npz'" in said.out
        and "\r" not in said.err
        and "1 of 2 done, 1 failed" in said.err
    )
    jobs = jobs_of({"methods": ["fedavg"]} | tomllib.loads(file.read_text()))
    assert [job.experiment.data.dataset for job in Folder(pathlib.Path("out")).pending(jobs)] == [
        "nowhere.npz"
    ]
    # as `report` finds it
    assert [run.path.parent for run in load_runs(["out"])] == [pathlib.Path("out/runs")]


class Pretend:
    """A launcher without processes: a run takes some looks, and ends as it is told."""

    def __init__(self, room: int, codes: dict[int, int], folder: Folder):
        self.room, self.codes, self.folder = room, codes, folder
        self.at_once: list[int] = []
        self.going = 0
        self.stopped: list[int] = []

    def start(self, job):
        self.going += 1
        self.at_once.append(self.going)
        return types.SimpleNamespace(job=job, left=2)

    def poll(self, handle):
        handle.left -= 1
        if handle.left > 0:
            return None
        self.going -= 1
        code = self.codes.get(handle.job.index, 0)
        if code == 0:
            write_run(
                self.folder.run(handle.job),
                handle.job.experiment.method.name,
                handle.job.experiment.training.seed,
                rounds=2,
            )
            file = self.folder.run(handle.job) / "summary.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"rounds": 2}))
            sign(file.parent)
            self.folder.finish(handle.job)
        return code, "round 3" if code == -9 else ""

    def stop(self, handle):
        self.stopped.append(handle.job.index)
        handle.left = 1


@pytest.fixture
def seven(monkeypatch):
    monkeypatch.setattr(queue, "EVERY", 0.0)
    jobs = jobs_of({"methods": ["fedavg"], "seeds": 7, "settings": {"rounds": 2}})
    return jobs, Folder(pathlib.Path("out"))


def test_the_queue_keeps_its_room_and_writes_down_failures(seven, capsys):
    jobs, folder = seven
    folder.fail(jobs[0], "of the last time")
    launcher = Pretend(3, {2: -9, 5: 1}, folder)
    folder.path.mkdir(exist_ok=True)
    queue.work_off(jobs, jobs, folder, launcher, Table(jobs, folder))
    assert max(launcher.at_once) == 3
    assert [folder.status(job) for job in jobs] == [
        "done",
        "done",
        "failed",
        "done",
        "done",
        "failed",
        "done",
    ]
    assert (
        folder.why(jobs[2]) == "it was ended by signal 9, after: round 3"
        and folder.why(jobs[5]) == "it ended with code 1"
    )
    lines = capsys.readouterr().err.splitlines()
    assert (
        sum(" running " in line for line in lines) == 7
        and sum(" failed: " in line for line in lines) == 2
    )
    assert "5 of 7 done, 2 failed" in lines[-1]
    table = results(jobs, folder)
    assert "fedavg" in table and "failed: it was ended by signal 9" in table and "±" in table
    again = Pretend(3, {}, folder)
    queue.work_off(folder.pending(jobs), jobs, folder, again, lambda running, changed: None)
    assert len(again.at_once) == 2 and {r["status"] for r in rows("out")} == {"done"}


def test_an_interrupt_stops_what_runs_and_fails_nobody(seven):
    jobs, folder = seven
    launcher = Pretend(2, {}, folder)
    folder.path.mkdir()

    def look(running, changed):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.work_off(jobs, jobs, folder, launcher, look)
    assert launcher.stopped == [0, 1] and not any(folder.why(job) for job in jobs)
    assert write_results(folder, jobs).exists()


def test_a_terminal_sees_one_table(seven, monkeypatch, capsys):
    jobs, folder = seven
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    table = Table(jobs, folder)
    table(jobs[:2], True)
    table(jobs[:1], False)
    err = capsys.readouterr().err
    # back over five lines
    assert "0 of 7 done" in err and jobs[1].name in err and "0 / 2" in err and "\x1b[5F" in err


def test_workers_share_cores_and_accelerators(seven, monkeypatch, capsys):
    jobs, folder = seven
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    code = "import os; print('devices', os.environ['CUDA_VISIBLE_DEVICES'])"
    launcher = launchers.Local([sys.executable, "-c", code], folder)
    assert launcher.room == 3
    handles = [launcher.start(job) for job in jobs[:3]]
    for process, _, _ in handles:
        process.wait()
    assert [launcher.poll(h) for h in handles] == [
        (0, "devices 4"),
        (0, "devices 5"),
        (0, "devices 7"),
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    file = toml('methods = ["fedavg"]')
    assert f"is more than the {len(launchers.cores())} cores" in refused(
        capsys, "sweep", str(file), "--workers", "9999"
    )


# ---- beyond one machine --------------------------------------------------------------------------
def test_slurm_script_and_submission(capsys, tmp_path, monkeypatch):
    """Against a stand-in sbatch; the written script is then run as SLURM would, for one task."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    refuse = f"[ -e {tmp_path}/refuse ] && echo no such partition >&2 && exit 1"
    sbatch.write_text(
        f'#!/bin/sh\ncp "$1" {tmp_path}/submitted\n{refuse}\necho Submitted batch job 4711\n'
    )
    sbatch.chmod(0o755)
    file = toml(
        'methods = ["fedavg", "fedprox"]\nseeds = 2\n'
        + TINY.replace("[settings]", '[settings]\ndataset = "gone.npz"')
    )
    command = [
        "sweep",
        str(file),
        "--out",
        "out",
        "--launcher",
        "slurm",
        "--workers",
        "3",
        "--slurm",
        "-p gpu --time=1:00:00",
    ]
    monkeypatch.setenv("PATH", "")
    assert "needs sbatch" in refused(capsys, *command)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    jobs = jobs_of({"methods": ["fedavg", "fedprox"], "seeds": 2} | tomllib.loads(file.read_text()))
    ended = Folder(pathlib.Path("out"))
    write_run(ended.run(jobs[1]), "fedavg", 1, rounds=2)
    summary = ended.run(jobs[1]) / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"rounds": 2}))
    sign(summary.parent)
    ended.finish(jobs[1])
    assert main(command) == 0
    said = capsys.readouterr()
    assert "as job 4711" in said.err and "--gather" in said.err
    text = (tmp_path / "submitted").read_text()
    # not the one that has ended
    assert text.startswith("#!/bin/bash\n") and "#SBATCH --array=0,2-3%3\n" in text
    assert (
        "#SBATCH -p gpu\n" in text
        and "#SBATCH --time=1:00:00\n" in text
        and f"#SBATCH --chdir={tmp_path}" in text
    )
    env = dict(os.environ, SLURM_ARRAY_TASK_ID="2", PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    done = subprocess.run(
        ["bash", "submitted"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "there is no file 'gone.npz'" in done.stderr
    assert main([*command[:4], "--gather"]) == 1
    assert [r["status"] for r in rows("out")] == ["waiting", "done", "failed", "waiting"]
    (tmp_path / "refuse").touch()
    assert "no such partition" in refused(capsys, *command)
    assert "--slurm 'gpu' cannot be read" in refused(capsys, *command[:-1], "gpu")


def pretended_ray(monkeypatch, cpus: int = 8):
    """As much of Ray as the launcher uses; tasks run when they are asked for."""
    asked: list[dict] = []

    def remote(**needs):
        asked.append(needs)
        return lambda fn: types.SimpleNamespace(remote=lambda *args: lambda: fn(*args))

    ray = types.SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": cpus},
        remote=remote,
        wait=lambda handles, timeout: (handles, []),
        get=lambda handle: handle(),
        cancel=lambda handle: None,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    return asked


def test_ray_tasks_share_the_queue(seven, monkeypatch, capsys):
    jobs, folder = seven
    asked = pretended_ray(monkeypatch)
    code = "import sys; print('fedjax-sim: no memory'); sys.exit(3 if sys.argv[1] == '1' else 0)"
    launcher = launchers.OnRay([sys.executable, "-c", code], folder, 2)
    folder.path.mkdir()
    queue.work_off(jobs[:2], jobs, folder, launcher, lambda running, changed: None)
    assert asked == [{"num_cpus": 4, "max_retries": 0}] * 2 and launcher.room == 2
    assert (
        folder.why(jobs[1]) == "no memory"
        and not folder.why(jobs[0])
        and "no memory" in folder.log(jobs[0]).read_text()
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs Ray; install it with" in refused(
        capsys, "sweep", str(toml('methods = ["fedavg"]')), "--launcher", "ray"
    )


def test_an_interrupted_task_lets_its_run_save(tmp_path, monkeypatch):
    code = (
        "import signal, sys, time; signal.signal(15, lambda *a: (print('saved'), sys.exit(143)));"
        " print(1); time.sleep(60)"
    )
    naps = iter([None, KeyboardInterrupt])

    def nap(seconds):
        while "1" not in (tmp_path / "log").read_text():
            pass
        if (problem := next(naps)) is not None:
            raise problem

    monkeypatch.setattr(queue.time, "sleep", nap)
    with pytest.raises(KeyboardInterrupt):
        queue.task([sys.executable, "-u", "-c", code], str(tmp_path / "log"))
    assert (tmp_path / "log").read_text().split() == ["1", "saved"]


def test_a_second_sweep_in_the_folder_is_refused(capsys):
    file = toml('methods = ["fedavg"]\n' + TINY)
    pathlib.Path("out").mkdir()
    lock = Lock(pathlib.Path("out"))
    lock.take()
    assert "'out' is in use by another process" in refused(
        capsys, "sweep", str(file), "--out", "out"
    )
    lock.release()
    assert not list(pathlib.Path("out").glob("runs/*/"))


def test_a_run_that_another_process_has_begun_is_not_begun_again(capsys):
    """Before its first checkpoint it cannot be resumed, but others may not throw it
    away."""
    from fedjax_sim.runner.prepare import prepare
    from fedjax_sim.runner.run_directory import RunDirectory

    file = toml('methods = ["fedavg"]\n' + TINY)
    job = jobs_of(tomllib.loads(file.read_text()))[0]
    directory = Folder(pathlib.Path("out")).run(job)
    setup = prepare(job.experiment)
    begun = RunDirectory(directory)
    begun.create(setup)
    (directory / "mine.txt").write_text("mine")
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    task = ["sweep", str(file), "--out", "out", "--task", "0", "--quiet"]
    assert "is in use by another process" in refused(capsys, *task)
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    begun.lock.release()
    assert main(task) == 0 and (directory / "mine.txt").read_text() == "mine"
    assert "had no checkpoint yet and starts over; removed: config.json" in capsys.readouterr().err


def test_a_task_leaves_a_finished_run_without_checkpoints_alone(capsys):
    """Its summary was lost and there is no checkpoint: it is refused, not begun again."""
    file = toml('methods = ["fedavg"]\n' + TINY)
    task = ["sweep", str(file), "--out", "out", "--task", "0", "--quiet"]
    assert main(task) == 0
    (run,) = pathlib.Path("out/runs").iterdir()
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    assert "it is left unchanged" in refused(capsys, *task)
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel tells a process only there that its parent is gone"
)
def test_a_killed_sweep_leaves_no_run_behind(tmp_path):
    """kill -9 of whoever started a run: it ends, so that the next sweep finds no lock."""
    inside = (
        "import os, time; from fedjax_sim.sweeps import queue; queue.end_with_parent();"
        " print(os.getpid()); "
    )
    inside += "time.sleep(60)"
    outside = (
        f"from fedjax_sim.sweeps.queue import task; task([{sys.executable!r}, '-u', '-c',"
        f" {inside!r}], 'log')"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", outside], cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(ROOT))
    )
    pids = lambda: (tmp_path / "log").read_text().split() if (tmp_path / "log").exists() else []
    wait_for(pids)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(int(pids()[0])))


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ray_on_a_local_cluster(monkeypatch, capsys):
    ray = pytest.importorskip(
        "ray", reason="ray is not installed: the launcher ran against a stand-in only"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = toml('methods = ["fedavg", "fedprox", "fedavg:dataset=nowhere.npz"]\nseeds = 2\n' + TINY)
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        assert (
            main(["sweep", str(file), "--out", "out", "--launcher", "ray", "--workers", "2"]) == 1
        )
    finally:
        ray.shutdown()
    assert sorted(r["status"] for r in rows("out")) == ["done"] * 4 + ["failed"] * 2
    assert all("nowhere.npz" in r["why"] for r in rows("out") if r["status"] == "failed")
