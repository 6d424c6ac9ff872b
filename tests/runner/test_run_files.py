"""Run directories under attack: changed files, other data, two processes, full disks; never
silently wrong results."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_runs import HALF, refused

import fedjax_sim as fs
from fedjax_sim.api import resume, run
from fedjax_sim.cli.main import main
from fedjax_sim.engine import layout as layouts
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner import checkpoint, driver
from fedjax_sim.runner import files as files_module
from fedjax_sim.runner.autotune import candidates, key_of
from fedjax_sim.runner.files import Lock, checksum
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.runner.run_directory import saved_rounds

jax.devices()
ROWS = ("metrics.csv", "rounds.csv", "timings.csv", "clients.npz")


def figures(folder: pathlib.Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("metrics.csv", "rounds.csv")}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Six rounds straight, and the same run at round 4 with its checkpoints of rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("base")
    run(
        "fedavg",
        tiny.federation(),
        out=folder / "whole",
        rounds=6,
        eval_every=2,
        checkpoint_every=2,
        **HALF,
    )
    run(
        "fedavg",
        tiny.federation(),
        out=folder / "cut",
        rounds=4,
        eval_every=2,
        checkpoint_every=2,
        **HALF,
    )
    return folder


@pytest.fixture
def cut(base, tmp_path):
    return pathlib.Path(shutil.copytree(base / "cut", tmp_path / "run"))


# ---- damage --------------------------------------------------------------------------------------
def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edit(file):
    file.write_text(file.read_text().replace("2", "3"))


def twice(file):
    file.write_bytes(file.read_bytes() + file.read_bytes())


def other_arrays(file):
    np.savez(
        file,
        personal_correct=np.zeros((2, 6)),
        personal_count=np.ones(6),
        personal_rounds=np.array([2, 4]),
    )


DAMAGE = [(name, how) for name in ROWS for how in (half, pathlib.Path.unlink, twice)]
DAMAGE += [
    ("metrics.csv", edit),
    ("rounds.csv", edit),
    ("clients.npz", other_arrays),
    ("manifest.json", half),
]


def test_damaged_rows_are_written_anew(base, tmp_path):
    """Whatever was done to the files of rows: the figures of the run that nobody touched."""
    for i, (name, how) in enumerate(DAMAGE):
        if i % 4:  # the files alone: they are whole again once the run is opened
            copy = pathlib.Path(shutil.copytree(base / "cut", tmp_path / str(i)))
            how(copy / name)
            said: list[str] = []
            resume(copy, fed=tiny.federation(), say=said.append)
            assert any(name in text and "written anew" in text for text in said), (name, how, said)
            assert figures(copy) == figures(base / "cut")
            for one in ("clients.npz",):
                with np.load(copy / one) as a, np.load(base / "cut" / one) as b:
                    assert all(np.array_equal(a[k], b[k]) for k in b.files) and a.files == b.files


@pytest.mark.parametrize("how", ["swap", "edit"])
def test_the_totals_of_a_continued_run_are_right(base, cut, how):
    a, b = cut / "metrics.csv", cut / "rounds.csv"
    if how == "swap":
        one, two = a.read_bytes(), b.read_bytes()
        a.write_bytes(two), b.write_bytes(one)
    else:
        edit(b)
    resume(cut, 6, fed=tiny.federation())
    assert figures(cut) == figures(base / "whole")


def test_untouched_files_give_no_warning(cut):
    said: list[str] = []
    resume(cut, fed=tiny.federation(), say=said.append)
    assert said == []
    entries = json.loads((cut / "manifest.json").read_text())["files"]
    assert sorted(entries) == sorted([*ROWS, "config.json", "labels.npz", "summary.json"])
    for name, entry in entries.items():
        assert entry == files_module.stamp((cut / name).read_bytes())


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["experiment"]["compute"].update(backend="loop"),
        lambda c: c["experiment"]["training"].update(rounds=5),
        lambda c: c["experiment"]["compute"].update(devices="2"),
        lambda c: c["experiment"]["compute"].update(checkpoint_every=1),
        lambda c: c["resolved"].update(chunk=2),
        lambda c: c["experiment"]["training"].update(rounds="many"),
        lambda c: c["experiment"]["training"].update(schedule=7),
        lambda c: c.update(resolved=3),
        lambda c: c.update(config=[]),
        lambda c: c.pop("checksum"),
    ],
)
def test_every_field_of_the_configuration_is_covered(cut, change):
    file = cut / "config.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    refused(lambda: resume(cut, 6, fed=tiny.federation()), "config")
    file.write_text("[1, 2]")
    refused(lambda: resume(cut, 6, fed=tiny.federation()), "is not a run directory")


@pytest.mark.parametrize("name", ROWS)
def test_damaged_rows_of_a_checkpoint_are_refused(cut, name):
    for how in (half, twice, pathlib.Path.unlink):
        how(cut / "checkpoints" / "00000004" / "files" / name)
        refused(lambda: resume(cut, 6, fed=tiny.federation()), name, "damaged", "older one")
        if how is not pathlib.Path.unlink:
            shutil.copy(cut / name, cut / "checkpoints" / "00000004" / "files" / name)


def test_edited_records_of_a_checkpoint_are_refused(cut):
    meta = cut / "checkpoints" / "00000004" / "meta.json"
    text = meta.read_text()
    for old, new in (('"round": 4', '"round": 3'), ('"large": false', '"large": true'), ("{", "[")):
        meta.write_text(text.replace(old, new))
        refused(lambda: resume(cut, 6, fed=tiny.federation()), "damaged")
    meta.write_text(text)
    (cut / "checkpoints" / "00000004").rename(cut / "checkpoints" / "00000005")
    refused(lambda: resume(cut, 6, fed=tiny.federation()), "is of round 4")


def test_killed_between_rows_and_checkpoint(base, tmp_path, monkeypatch):
    """Rows of round 4 are on disk, its checkpoint is not: from round 2 to the same bytes. So for an
    extension."""

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    real = driver.save
    monkeypatch.setattr(
        driver,
        "save",
        lambda axes, state, pick: (real if int(state.t) < 4 else killed)(axes, state, pick),
    )
    options = dict(eval_every=2, checkpoint_every=2, **HALF)
    with pytest.raises(Killed):
        run("fedavg", tiny.federation(), out=tmp_path / "a", rounds=6, **options)
    copy = pathlib.Path(shutil.copytree(base / "cut", tmp_path / "b"))
    monkeypatch.setattr(driver, "save", killed)
    with pytest.raises(Killed):
        resume(copy, 6, fed=tiny.federation())
    monkeypatch.undo()
    for folder in (tmp_path / "a", copy):
        assert not (folder / ".lock").exists()
        resume(folder, 6, fed=tiny.federation())
        assert figures(folder) == figures(base / "whole")


# ---- two at once, no room, no right --------------------------------------------------------------
def test_one_process_at_a_time(cut):
    lock = Lock(cut)
    lock.take()
    before = figures(cut)
    refused(lambda: resume(cut, 6, fed=tiny.federation()), "is in use by another process")
    assert figures(cut) == before
    lock.release()
    assert not (cut / ".lock").exists()
    (cut / ".lock").touch()  # of a process that was killed: nobody holds it
    assert resume(cut, 5, fed=tiny.federation()).summary["rounds"] == 5
    assert not (cut / ".lock").exists()


def test_the_lock_of_a_run_is_held_while_it_runs(tmp_path, monkeypatch):
    real = driver.segment_length

    def tried(*args):
        refused(lambda: Lock(tmp_path / "run").take(), "in use")
        return real(*args)

    monkeypatch.setattr(driver, "segment_length", tried)
    run("fedavg", tiny.federation(), out=tmp_path / "run", rounds=1, **HALF)
    Lock(tmp_path / "run").take()


def test_a_full_disk_is_a_sentence_and_the_run_goes_on_later(base, tmp_path, monkeypatch):
    real, left = os.fsync, [0]

    def full(handle):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle)

    monkeypatch.setattr(files_module.os, "fsync", full)
    options = dict(eval_every=2, checkpoint_every=2, **HALF)
    for number in (0, 1, 4, 8, 14, 16, 18, 20, 22):
        left[0] = number
        out = tmp_path / str(number)
        refused(
            lambda: run("fedavg", tiny.federation(), out=out, rounds=6, **options),
            "cannot be written: No space left",
        )
        hidden = [p for p in out.rglob("*") if p.name.startswith(".")] if out.exists() else []
        assert not hidden, hidden
        left[0] = 10**6
        if saved_rounds(out / "checkpoints"):
            resume(out, fed=tiny.federation())
            assert figures(out) == figures(base / "whole")
    assert not (tmp_path / "0").exists() and saved_rounds(tmp_path / "22" / "checkpoints") == [4, 6]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of so many kB, where the system lets us have one."""
    places = []

    def make(size: int) -> pathlib.Path:
        place = tmp_path / f"disk-{size}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)],
            capture_output=True,
        )
        if done.returncode:
            pytest.skip("no file system may be mounted here: a full disk was only pretended")
        places.append(place)
        return place

    yield make
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("size", [8, 32, 64, 160])
def test_a_disk_that_is_really_full(small_disk, size, capfd):
    """Whatever was being written, and whoever wrote it: the cause in one sentence, no traceback
    from anybody's threads."""
    place = small_disk(size)
    argv = [
        "run",
        "fedavg",
        "--model",
        "mlp",
        "--set",
        "model.hidden=64",
        "--clients",
        "4",
        "--participation",
        "0.5",
    ]
    argv += [
        "--epochs",
        "1",
        "--devices",
        "1",
        "--chunk",
        "1",
        "--rounds",
        "8",
        "--checkpoint-every",
        "2",
        "--quiet",
    ]
    assert main([*argv, "--out", str(place / "run")]) == 2
    err = capfd.readouterr().err
    assert (
        err.count("\n") == 1
        and "cannot be written: No space left on device" in err
        and "Traceback" not in err
    ), err
    assert not [p for p in (place / "run").rglob("*") if p.name.startswith(".")]


def test_the_cause_of_a_failed_checkpoint_is_said(tmp_path, monkeypatch):
    """The storage layer's own words are long and end with the number of the system's error."""

    class Full:
        def save(self, *_):
            raise ValueError(
                f"RESOURCE_EXHAUSTED: Error writing '{'x' * 300}': Failed"
                f" [os_error_code='{errno.EDQUOT}']"
            )

    monkeypatch.setattr(checkpoint, "_checkpointer", Full)
    sentence = f"cannot be written: {os.strerror(errno.EDQUOT)}"
    refused(
        lambda: run("fedavg", tiny.federation(), out=tmp_path / "a", rounds=1, **HALF), sentence
    )


def test_places_where_nothing_can_be_written(cut, tmp_path, monkeypatch, capsys):
    long = tmp_path / ("n" * 300)
    refused(lambda: run("fedavg", tiny.federation(), out=long, rounds=1, **HALF), "cannot be")
    assert main(["run", "fedavg", "--out", str(long), "--rounds", "1", "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    refused(lambda: run("fedavg", tiny.federation(), out="a\0b", rounds=1, **HALF), "cannot be")
    (tmp_path / "file").touch()
    refused(
        lambda: run("fedavg", tiny.federation(), out=tmp_path / "file" / "x", rounds=1, **HALF),
        "cannot be created",
    )

    real = os.open

    def forbidden(path, flags, *more, **named):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(files_module.os, "open", forbidden)
    before = figures(cut)
    refused(lambda: resume(cut, 6, fed=tiny.federation()), "cannot be written: Permission denied")
    refused(
        lambda: run("fedavg", tiny.federation(), out=tmp_path / "new", rounds=1, **HALF),
        "Permission denied",
    )
    assert figures(cut) == before and not (tmp_path / "new").exists()


def test_files_can_be_read_by_whom_the_mask_allows(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        old = os.umask(mask)
        try:
            files_module.write_bytes(tmp_path / f"{mask}", b"x")
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / f"{mask}").stat().st_mode) == mode


def test_temporary_files_are_never_others(tmp_path, monkeypatch):
    """Made under a name that nobody foresees, and only if it is new: no link that lies there is
    followed."""
    asked = []
    real = os.open

    def heard(path, flags, *more, **named):
        asked.append((pathlib.Path(path).name, bool(flags & os.O_EXCL)))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(files_module.os, "open", heard)
    for _ in range(2):
        files_module.write_bytes(tmp_path / "a.json", b"x")
    (one, first), (other, second) = asked
    assert first and second and one != other
    (tmp_path / "victim").write_text("mine")
    monkeypatch.setattr(files_module.secrets, "token_hex", lambda _: "foreseen")
    (tmp_path / ".a.json.foreseen.partial").symlink_to(tmp_path / "victim")
    refused(
        lambda: files_module.write_bytes(tmp_path / "a.json", b"y"),
        "cannot be written: File exists",
    )
    assert (tmp_path / "victim").read_text() == "mine" and (
        tmp_path / "a.json"
    ).read_bytes() == b"x"


def test_killed_deletions_are_cleared_by_the_next_save(tmp_path, monkeypatch):
    state = tiny.start(tiny.simulation("fedavg"))[0]
    at = lambda t: state._replace(t=jnp.int32(t))
    (tmp_path / "00000001" / "state").mkdir(parents=True)  # half deleted by an older version
    checkpoint.save(tmp_path, at(2), "h", keep=1)

    def killed(path, **_):
        if path.name.startswith(".00000002") and path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, at(3), "h", keep=1)
    monkeypatch.undo()
    assert saved_rounds(tmp_path) == [3]
    checkpoint.save(tmp_path, at(4), "h", keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["00000004"]


# ---- devices -------------------------------------------------------------------------------------
def test_a_run_goes_on_with_fewer_devices_and_with_as_many(tmp_path, monkeypatch):
    """Rows of client state fill up four devices (8 rows for 6 clients) and fit on one; the other
    way round as well."""
    fed, options = tiny.federation(), {**HALF, "devices": "4"}
    whole = run("ditto", fed, rounds=3, **options)
    for folder in ("a", "b"):
        run("ditto", fed, rounds=2, out=tmp_path / folder, **options)
    same = resume(tmp_path / "a", 3, fed=fed)
    assert same.setup.simulation.layout.devices == 4 and tiny.same_bits(same.state, whole.state)
    monkeypatch.setattr(layouts, "available_devices", lambda: 1)
    said: list[str] = []
    fewer = resume(tmp_path / "b", 3, fed=fed, say=said.append)
    assert "on 4 devices and there are 1" in said[0] and fewer.setup.simulation.layout.devices == 1
    cut = lambda clients: jax.tree.map(lambda a: np.asarray(a)[: tiny.N], clients)
    tiny.assert_close(fewer.state.server, whole.state.server)
    tiny.assert_close(cut(fewer.state.clients), cut(whole.state.clients))
    monkeypatch.undo()
    # written on one device: now on four
    data = json.loads((tmp_path / "b" / "config.json").read_text())
    data["resolved"]["devices"] = 4
    (tmp_path / "b" / "config.json").write_text(json.dumps(data | dict(checksum=checksum(data))))
    more = resume(tmp_path / "b", 4, fed=fed)
    assert more.setup.simulation.layout.devices == 4
    tiny.assert_close(more.state.server, resume(tmp_path / "a", 4, fed=fed).state.server)


SCRIPT = """
import sys, warnings
import fedjax_sim as fs
from fedjax_sim.engine import layout
layout.host_cores = lambda: 3
if sys.argv[1] == "late":
    import jax
    jax.devices()
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    small = dict(model="mlp", model_options={"hidden": 5}, clients=4)
    setup = fs.prepare(fs.Experiment.of("fedavg", **small, participation="1", rounds=1))
import jax
cached = jax.config.values["jax_compilation_cache_dir"] is not None
print(len(jax.devices()), setup.simulation.layout.devices, cached)
print(*[str(w.message) for w in heard if "JAX was started" in str(w.message)])
"""


@pytest.mark.parametrize("when, devices", [("first", 3), ("late", 1)])
def test_python_starts_jax_as_the_command_does(tmp_path, when, devices):
    """One device per core and programs kept on disk; what is lost where JAX runs already is
    said."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {
        "PYTHONPATH": str(pathlib.Path(fs.__file__).parent.parent),
        "FEDJAX_SIM_CACHE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when], env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    counts, said = done.stdout.split("\n")[:2]
    assert counts == f"{devices} {devices} True"
    assert ("clients train on 1 of 3 cores" in said) == (when == "late")


def test_large_rows_fit_other_numbers_of_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK", 1)
    sim, wide = tiny.simulation("scaffold"), tiny.simulation("scaffold", devices=4)
    for one, other in ((sim, wide), (wide, sim)):
        state, data = tiny.start(one)
        state, *_ = one.run(state, data, jnp.int32(2))
        path = checkpoint.save(tmp_path / str(one.layout.devices), state, "h")
        back = checkpoint.load(path, tiny.start(other, seed=1)[0], "h", tiny.N)
        for a, b in zip(*(jax.tree.leaves(s.clients) for s in (state, back)), strict=True):
            assert np.array_equal(np.asarray(a)[: tiny.N], np.asarray(b)[: tiny.N])
        refused(lambda: checkpoint.load(path, tiny.start(other)[0], "h"), "does not fit this run")


def test_backends_mean_what_they_say():
    fed = tiny.federation()
    options = {k: v for k, v in HALF.items() if k != "devices"}
    layout = lambda **more: (
        prepare(Experiment.of("fedavg", rounds=1, **options, **more), fed=fed).simulation.layout
    )
    assert layout(backend="chunked").mesh is None
    assert layout(backend="sharded").devices == 3  # the cohort
    assert layout(backend="sharded", devices="1").mesh is not None
    refused(
        lambda: layout(backend="chunked", devices="2"), "backend chunked runs on one device, not 2"
    )
    assert {c.devices for c in candidates(Experiment.of(backend="chunked"), 4)} == {1}
    assert {c.devices for c in candidates(Experiment.of(backend="sharded"), 4)} == {4}
    assert key_of(Experiment.of(backend="chunked"), 4, 1, 1) != key_of(
        Experiment.of(backend="sharded"), 4, 1, 1
    )
    one = run("fedavg", fed, rounds=2, backend="sharded", **HALF)
    tiny.assert_close(
        one.state.server, run("fedavg", fed, rounds=2, backend="chunked", **HALF).state.server
    )


def test_an_extension_says_what_it_changes(tmp_path):
    said: list[str] = []
    run("fedavg", tiny.federation(), out=tmp_path / "a", rounds=2, schedule="cosine", **HALF)
    resume(tmp_path / "a", 3, fed=tiny.federation(), say=said.append)
    assert (
        "2 rounds were planned and it continues to 3" in said[0]
        and "the schedule of the learning rate still spans 2" in said[0]
    )
    said.clear()
    run("fedpolicy", tiny.federation(), out=tmp_path / "b", rounds=1, **HALF)
    resume(tmp_path / "b", 2, fed=tiny.federation(), say=said.append)
    assert "refer to 2 rounds from here on" in said[0]
