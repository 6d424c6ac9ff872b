"""Directories that a kill, a user or another command left: what is taken over, what is refused, and
that nothing is lost."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny
from commands import SMALL, contents, empty_folder, refused

import fedjax_sim as fs
from fedjax_sim.api import resume, run
from fedjax_sim.cli.main import main
from fedjax_sim.runner import driver
from fedjax_sim.runner.run_directory import saved_rounds

__all__ = ["empty_folder"]  # used by every test
jax.devices()
OPTIONS = dict(
    model="mlp",
    model_options={"hidden": (5,)},
    devices="1",
    chunk="1",
    batch_size=4,
    lr=0.05,
    epochs=1.0,
)
OPTIONS |= dict(participation="0.5", rounds=4, eval_every=2)
TWO = ["--rounds", "2"]


class Killed(BaseException):
    """As kill -9: nobody can do anything about it."""


def killed(*_):
    raise Killed


def figures(folder: pathlib.Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("metrics.csv", "rounds.csv")}


def killed_run(out: pathlib.Path, where: str, **more) -> None:
    """A run that dies at `where` of the driver, before its first checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, where, killed)
        with pytest.raises(Killed):
            run("fedavg", tiny.federation(), out=out, **OPTIONS | more)
    assert not saved_rounds(out / "checkpoints")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run("fedavg", tiny.federation(), out=out, **OPTIONS)
    return out


# ---- before the first checkpoint -----------------------------------------------------------------
@pytest.mark.parametrize("where", ["compiled", "save"])
@pytest.mark.parametrize("again", ["run", "resume"])
def test_killed_before_the_first_checkpoint(whole, tmp_path, where, again, capsys):
    """While it compiled, or with rows on disk: both commands take it, to the same bytes; other
    files stay."""
    out = tmp_path / "run"
    killed_run(out, where)
    assert (out / "metrics.csv").exists() == (where == "save")
    (out / "notes.txt").write_text("mine")
    (out / "checkpoints" / ".00000002.partial").mkdir(parents=True)
    (out / ".metrics.csv.1.partial").touch()
    if again == "run":
        run("fedavg", tiny.federation(), out=out, **OPTIONS)
    else:
        resume(out, fed=tiny.federation())
    err = capsys.readouterr().err
    assert "had no checkpoint yet and starts over; removed: config.json" in err
    assert figures(out) == figures(whole) and (out / "notes.txt").read_text() == "mine"
    assert not [p for p in out.rglob("*") if p.name.startswith(".")]


def test_another_run_is_not_begun_there(tmp_path):
    killed_run(tmp_path / "run", "compiled")
    before = contents(tmp_path / "run")
    with pytest.raises(fs.UserError, match="holds another configuration"):
        run("fedavg", tiny.federation(), out=tmp_path / "run", **OPTIONS | dict(lr=0.1))
    assert contents(tmp_path / "run") == before


def test_given_weights_are_those_of_the_start(whole, tmp_path):
    """From a file they are read again and compared; from Python they must be given again."""
    net = jax.tree.map(
        lambda a: a + np.float32(0.1),
        run("fedavg", tiny.federation(), **OPTIONS | dict(rounds=1)).net,
    )
    fs.save_net(tmp_path / "net.npz", net)
    straight = run("fedavg", tiny.federation(), net=net, **OPTIONS)
    killed_run(tmp_path / "file", "compiled", init=str(tmp_path / "net.npz"))
    again = resume(tmp_path / "file", fed=tiny.federation())
    assert tiny.same_bits(again.state, straight.state)
    killed_run(tmp_path / "changed", "compiled", init=str(tmp_path / "net.npz"))
    fs.save_net(tmp_path / "net.npz", jax.tree.map(lambda a: 2 * a, net))
    with pytest.raises(fs.UserError, match=r"other weights than '.*net.npz' holds now"):
        resume(tmp_path / "changed", fed=tiny.federation())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "compiled", killed)
        with pytest.raises(Killed):
            run("fedavg", tiny.federation(), net=net, out=tmp_path / "python", **OPTIONS)
    with pytest.raises(fs.UserError, match="weights given from Python; begin it again with these"):
        resume(tmp_path / "python", fed=tiny.federation())
    again = run("fedavg", tiny.federation(), net=net, out=tmp_path / "python", **OPTIONS)
    assert tiny.same_bits(again.state, straight.state)


def test_empty_directories_block_nobody(tmp_path, capsys):
    for name in ("run", "compare", "python", "killed/fedavg"):
        (tmp_path / name).mkdir(parents=True)
    assert main(["run", "fedavg", *SMALL, *TWO, "--out", "run"]) == 0
    for name in ("compare", "killed"):
        assert main(["compare", "fedavg", "fedprox", *SMALL, *TWO, "--out", name]) == 0
    fs.compare("fedavg", "fedprox", fed=tiny.federation(), out="python", **OPTIONS)
    assert all(
        (tmp_path / name / "summary.json").exists()
        for name in ("run", "compare/fedavg", "python/fedprox")
    )
    (tmp_path / "new").mkdir()
    assert "it is empty; repeat the command that created it" in refused(capsys, "resume", "new")
    (tmp_path / "new" / "mine.txt").touch()
    for command in (["run", "fedavg"], ["compare", "fedavg", "fedprox"]):
        assert "exists already" in refused(capsys, *command, *SMALL, "--out", "new")


# ---- nothing that others need is removed ---------------------------------------------------------
@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "out"
    assert main(["compare", "fedavg", "fedprox", *SMALL, *TWO, "--out", str(out)]) == 0
    return out


def test_compare_never_removes_a_finished_run(compared, tmp_path, capsys):
    """Its checkpoints are gone, to save room; then its summary too, which the manifest still
    names."""
    out = pathlib.Path(shutil.copytree(compared, tmp_path / "out"))
    shutil.rmtree(out / "fedavg" / "checkpoints")
    (out / "fedavg" / "mine.txt").write_text("mine")
    for lost in ((), ("summary.json",)):
        for name in lost:
            (out / "fedavg" / name).unlink()
        before = contents(out)
        assert "it is left unchanged" in refused(
            capsys, "compare", "fedavg", "fedprox", *SMALL, *TWO, "--out", str(out)
        )
        assert contents(out) == before


def test_compare_begins_an_unfinished_run_again_and_says_so(compared, tmp_path, capsys):
    """Only the files it wrote go; what a user put there stays."""
    out = pathlib.Path(shutil.copytree(compared, tmp_path / "out"))
    run = out / "fedavg"
    for name in ("checkpoints", "figures"):
        shutil.rmtree(run / name, ignore_errors=True)
    (run / "summary.json").unlink()
    (run / "manifest.json").unlink()
    (run / "mine.txt").write_text("mine")
    (run / "figures").mkdir()
    (run / "figures" / "a.png").write_text("drawn")
    assert main(["compare", "fedavg", "fedprox", *SMALL, *TWO, "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert f"'{run}' had no checkpoint yet and starts over; removed: config.json" in said
    assert (run / "mine.txt").read_text() == "mine" and (
        run / "figures" / "a.png"
    ).read_text() == "drawn"
    assert figures(run) == figures(compared / "fedavg")


def test_seeds_go_on_with_the_same_command(tmp_path, capsys):
    command = ["run", "fedavg", *SMALL, *TWO, "--seeds", "2", "--out", "out"]
    assert main(command) == 0
    shutil.rmtree("out/seed-1")
    first = figures(tmp_path / "out" / "seed-0")
    assert main(command) == 0
    assert (
        figures(tmp_path / "out" / "seed-0") == first
        and (tmp_path / "out" / "seed-1" / "summary.json").exists()
    )


# ---- the end of a resumed run --------------------------------------------------------------------
CLOCK = (
    "seconds_per_round",
    "rounds_per_second",
    "compile_seconds",
    "peak_rss_mb",
    "time_min_to",
    "convergence_seconds",
)


def without_clock(out: pathlib.Path) -> str:
    summary = json.loads((out / "summary.json").read_text())
    return json.dumps({name: value for name, value in summary.items() if name not in CLOCK})


@pytest.mark.parametrize(
    "method, more", [("fedavg", {}), ("fedavg_ft", dict(personal_every=2)), ("local", {})]
)
def test_the_summary_is_the_same_after_a_resume(tmp_path, method, more):
    """Killed after round 4 of 5 and resumed, or lost and run again: every figure to the last bit,
    but for the clock's."""
    options = OPTIONS | dict(rounds=5, eval_every=1, checkpoint_every=2, metrics=("recall",)) | more
    evaluate = dict(evaluations=("personal",)) if method == "local" else {}
    run(method, tiny.federation(), out=tmp_path / "whole", **options, **evaluate)
    with pytest.MonkeyPatch.context() as patch:
        real = driver.save
        patch.setattr(
            driver,
            "save",
            lambda axes, state, pick: (killed if int(state.t) == 5 else real)(axes, state, pick),
        )
        with pytest.raises(Killed):
            run(method, tiny.federation(), out=tmp_path / "cut", **options, **evaluate)
    resume(tmp_path / "cut", fed=tiny.federation())
    assert without_clock(tmp_path / "cut") == without_clock(tmp_path / "whole")
    before = (tmp_path / "whole" / "summary.json").read_bytes()
    resume(tmp_path / "whole", fed=tiny.federation())
    assert (
        tmp_path / "whole" / "summary.json"
    ).read_bytes() == before  # nothing ran: not even the clock has moved
    (tmp_path / "whole" / "summary.json").unlink()
    resume(tmp_path / "whole", fed=tiny.federation())
    assert without_clock(tmp_path / "whole") == without_clock(tmp_path / "cut")
