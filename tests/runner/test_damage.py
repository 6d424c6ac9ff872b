"""What was done to run directories behind the program's back: `report` and `sweep --gather` never
show other figures.

Every kind of damage to every file: the figures of the untouched run, or a sentence that names the
directory; no traceback.
"""

from __future__ import annotations

import csv
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from commands import SMALL, empty_folder

from fedjax_sim.cli.main import main
from fedjax_sim.errors import UserError
from fedjax_sim.report import tables
from fedjax_sim.report.groups import grouped
from fedjax_sim.report.runs import load_run, load_runs
from fedjax_sim.runner import run_directory

__all__ = ["empty_folder"]  # used by every test
SWEEP = (
    'methods = ["fedavg"]\nseeds = 2\n[settings]\nrounds = 2\nmodel = "mlp"\n"model.hidden" ='
    " [8]\nclients = 6\n"
)
SWEEP += "epochs = 1\ndevices = 1\nchunk = 1\n"


# ---- kinds of damage -----------------------------------------------------------------------------
def cut(file, rng):
    raw = file.read_bytes()
    file.write_bytes(raw[: rng.integers(0, len(raw))])


def flipped(file, rng):
    raw = bytearray(file.read_bytes())
    raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
    file.write_bytes(raw)


def lost_line(file, rng):
    lines = file.read_bytes().splitlines(keepends=True)
    del lines[rng.integers(len(lines))]
    file.write_bytes(b"".join(lines))


def other_digit(file, rng):
    raw = bytearray(file.read_bytes())
    places = [i for i, c in enumerate(raw) if chr(c).isdigit()]
    at = places[rng.integers(len(places))]
    raw[at] = ord("0") + (raw[at] - ord("0") + 1 + rng.integers(9)) % 10
    file.write_bytes(raw)


def twice(file, rng):
    file.write_bytes(2 * file.read_bytes())


def nothing(file, rng):
    file.write_bytes(b"")


def nested(file, rng):
    file.write_bytes(b"[" * 100_000)


def list_of_numbers(file, rng):
    file.write_bytes(b"[1, 2]")


def long_field(file, rng):
    file.write_bytes(file.read_bytes() + b'"' + b"a" * 200_000 + b'"\n')


def gone(file, rng):
    file.unlink()


def folder(file, rng):
    file.unlink()
    file.mkdir()


def not_text(file, rng):
    file.write_bytes(b"\xff\xfe\0" + file.read_bytes())


KINDS = [
    cut,
    flipped,
    lost_line,
    other_digit,
    twice,
    nothing,
    nested,
    list_of_numbers,
    long_field,
    gone,
    folder,
    not_text,
]
NAMES = [*run_directory.FILES, run_directory.MANIFEST]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two finished runs of a sweep."""
    root = tmp_path_factory.mktemp("swept")
    (root / "grid.toml").write_text(SWEEP)
    for task in ("0", "1"):
        assert (
            main(
                [
                    "sweep",
                    str(root / "grid.toml"),
                    "--out",
                    str(root / "out"),
                    "--task",
                    task,
                    "--quiet",
                ]
            )
            == 0
        )
    return root


def figures(paths) -> list[dict]:
    return tables.rows_of(grouped(load_runs(paths)))


def same(run, whole) -> bool:
    """Everything that the report reads of a run."""
    a, b = load_run(run), load_run(whole)
    arrays = lambda r: {**r.rounds, **r.metrics, **r.timings, **r.clients}
    equal = arrays(a).keys() == arrays(b).keys() and a.summary == b.summary and a.config == b.config
    return equal and all(
        np.array_equal(x, arrays(b)[n], equal_nan=True) for n, x in arrays(a).items()
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_report_never_shows_other_figures(swept, tmp_path, kind):
    whole = swept / "out" / "runs" / "fedavg-s0"
    refused = 0
    for i, name in enumerate(NAMES):
        run = pathlib.Path(shutil.copytree(whole, tmp_path / f"{i}" / "fedavg-s0"))
        shutil.copytree(swept / "out" / "runs" / "fedavg-s1", tmp_path / f"{i}" / "fedavg-s1")
        kind(run / name, np.random.default_rng([i, KINDS.index(kind)]))
        said: list[str] = []
        runs = load_runs([tmp_path / f"{i}"], said.append)
        if len(runs) == 2:
            assert same(run, whole), name
            continue
        refused += 1
        assert [r.path.name for r in runs] == ["fedavg-s1"] and len(said) == 1, (name, said)
        assert said[0].startswith(f"left out: '{run}'") and "\n" not in said[0]
        with pytest.raises(UserError, match=r"damaged|not a run directory"):
            load_runs([run])
    assert refused >= len(NAMES) - 1


def test_gather_leaves_damaged_runs_out_and_names_them(swept, tmp_path, capsys):
    command = ["sweep", str(swept / "grid.toml"), "--out", str(tmp_path / "out"), "--gather"]
    shutil.copytree(swept / "out", tmp_path / "out")
    assert main(command) == 0
    read = lambda: list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    before = read()
    assert [r["status"] for r in before] == ["done", "done"]
    capsys.readouterr()
    run = tmp_path / "out" / "runs" / "fedavg-s0"
    for i, name in enumerate(NAMES):
        for kind in KINDS:
            shutil.rmtree(run)
            shutil.copytree(swept / "out" / "runs" / "fedavg-s0", run)
            kind(run / name, np.random.default_rng([i, 7]))
            code, (first, second) = main(command), read()
            captured = capsys.readouterr()
            assert second == before[1] and "Traceback" not in captured.err, (name, kind)
            if code == 0:
                assert first == before[0], (name, kind)
                continue
            assert (
                first["status"] == "damaged"
                and f"'{run}'" in first["why"]
                and not first["best_global"]
            ), (name, kind)
            assert f"fedavg-s0 damaged: '{run}'" in captured.out


def test_a_damaged_run_of_a_sweep_is_repaired_by_the_next(swept, tmp_path, capsys):
    shutil.copytree(swept / "out", tmp_path / "out")
    run = tmp_path / "out" / "runs" / "fedavg-s0"
    text = (run / "summary.json").read_text()
    (run / "summary.json").write_text(re.sub(r'"best_global": 0\.\d', '"best_global": 0.9', text))
    task = [
        "sweep",
        str(swept / "grid.toml"),
        "--out",
        str(tmp_path / "out"),
        "--task",
        "0",
        "--quiet",
    ]
    assert main(task) == 0
    assert (
        json.loads((run / "summary.json").read_text())["best_global"]
        == json.loads(text)["best_global"]
    )


def test_another_runs_directory_is_not_taken_for_this_one(swept, tmp_path, capsys):
    """Renamed, or of a sweep file that has changed since."""
    shutil.copytree(swept / "out", tmp_path / "out")
    runs = tmp_path / "out" / "runs"
    shutil.rmtree(runs / "fedavg-s0")
    shutil.copytree(runs / "fedavg-s1", runs / "fedavg-s0")
    command = ["sweep", str(swept / "grid.toml"), "--out", str(tmp_path / "out"), "--gather"]
    assert main(command) == 1 and "fedavg-s0 damaged" in capsys.readouterr().out
    (tmp_path / "other.toml").write_text(SWEEP + "lr = 0.5\n")
    command[1] = str(tmp_path / "other.toml")
    assert main(command) == 1
    assert capsys.readouterr().out.count("was not run with the settings of this sweep file") == 2
    assert main([*command[:-1], "--task", "1", "--quiet"]) == 2
    assert "holds another configuration" in capsys.readouterr().err


def test_a_manifest_names_only_files_of_the_run(swept, tmp_path):
    """Others are not read, wherever they are."""
    run = pathlib.Path(shutil.copytree(swept / "out" / "runs" / "fedavg-s0", tmp_path / "run"))
    manifest = json.loads((run / "manifest.json").read_text())
    assert set(manifest["files"]) == set(run_directory.FILES)
    (tmp_path / "secret").write_text("x")
    run_directory.write_manifest(run, manifest["files"] | {"../secret": {"size": 1, "sha256": "0"}})
    assert run_directory.changed(run) == ["manifest.json"]
    with pytest.raises(UserError, match=r"manifest\.json is not as written"):
        load_run(run)


def test_an_extended_run_that_has_not_ended_has_no_old_summary(tmp_path):
    """Between the extension and its end the summary is of fewer rounds than the rows."""
    from fedjax_sim.runner import driver

    assert main(["run", "fedavg", *SMALL, "--rounds", "2", "--out", "run", "--quiet"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["resume", "run", "--rounds", "4", "--quiet"]) == 130
    run = load_run("run")
    assert run.stored == {} and run.summary["rounds"] == 4


def test_a_damaged_profile_is_left_out(tmp_path):
    from fedjax_sim.report.costs import read_profiles

    assert (
        main(["profile", "fedavg", *(word for word in SMALL if word != "--quiet"), "--out", "p"])
        == 0
    )
    assert len(read_profiles(["p"])) == 1
    file = tmp_path / "p" / "profile.json"
    for kind in KINDS:
        text, said = file.read_bytes(), []
        kind(file, np.random.default_rng(3))
        assert read_profiles(["p"], said.append) == [] and (len(said) == 1 or not file.is_file()), (
            kind
        )
        file.rmdir() if file.is_dir() else None
        file.write_bytes(text)


def test_a_long_field_in_the_rows_is_no_progress(swept, tmp_path):
    """The live table of a sweep reads rows that are being written, and whatever else lies there."""
    from fedjax_sim.sweeps.folder import Folder
    from fedjax_sim.sweeps.plan import jobs_of, read

    shutil.copytree(swept / "out", tmp_path / "out")
    folder, job = Folder(tmp_path / "out"), jobs_of(read(swept / "grid.toml"))[0]
    assert folder.progress(job)[0] == 2
    long_field(folder.run(job) / "metrics.csv", None)
    assert folder.progress(job) == (0, None)
