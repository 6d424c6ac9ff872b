"""Signals: a checkpoint within the segment, the command to go on, exit codes 130 and 143, the same
bytes afterwards."""

from __future__ import annotations

import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import jax
import pytest
from paths import ROOT

from fedjax_sim.cli.main import main
from fedjax_sim.runner import interrupts
from fedjax_sim.runner.run_directory import saved_rounds

jax.devices()
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "FEDJAX_SIM_CACHE": jax.config.values["jax_compilation_cache_dir"],
}
TINY = [
    "run",
    "fedavg",
    "--model",
    "mlp",
    "--set",
    "model.hidden=5",
    "--clients",
    "4",
    "--participation",
    "0.5",
]
TINY += ["--epochs", "1", "--devices", "1", "--chunk", "1", "--quiet"]


# a child of a background job would ignore Ctrl-C
USUAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
USUAL += "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
COMMAND = USUAL + "import sys; from fedjax_sim.cli.main import main; sys.exit(main(sys.argv[1:]))"


def started(out: pathlib.Path, rounds: int, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *TINY, "--rounds", str(rounds), "--out", str(out), *more],
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(process: subprocess.Popen, there, limit: float = 180) -> None:
    end = time.monotonic() + limit
    while not there():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_saved_and_goes_on(tmp_path, number, code):
    """In the middle of a run that would write its first checkpoint after a minute."""
    out = tmp_path / "run"
    process = started(out, 100_000, "--eval-every", "10")
    try:
        wait_for(process, (out / "rounds.csv").exists)
        process.send_signal(number)
        _, err = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert f"continue with: fedjax-sim resume {out}" in err and "Traceback" not in err
    (done,) = saved_rounds(out / "checkpoints")
    assert (
        0 < done < 100_000 and not (out / "summary.json").exists() and not (out / ".lock").exists()
    )
    if number == signal.SIGINT:
        more = (done // 10 + 1) * 10
        assert main(["resume", str(out), "--rounds", str(more), "--quiet"]) == 0
        assert (
            main(
                [
                    *TINY,
                    "--rounds",
                    str(more),
                    "--eval-every",
                    "10",
                    "--out",
                    str(tmp_path / "whole"),
                ]
            )
            == 0
        )
        for name in ("metrics.csv", "rounds.csv"):
            assert (out / name).read_text() == (tmp_path / "whole" / name).read_text()


# the compiler hangs in native code from its NUMBERth program on; nobody but the system can end that
SLOW = """
import ctypes, pathlib, jax
real, left = jax.stages.Lowered.compile, [int(NUMBER)]
def compile(self, *args, **named):
    left[0] -= not named  # rounds have a compiler's options; the initial weights have none
    if left[0] > 0 or named:
        return real(self, *args, **named)
    pathlib.Path("compiling").touch()
    for _ in range(600):
        ctypes.CDLL(None).usleep(900000)
jax.stages.Lowered.compile = compile
"""


def interrupted_in_compiler(
    argv: list[str], program: int, number: int, folder: pathlib.Path
) -> tuple[int, str]:
    """(exit code, standard error) of a command that gets one signal while it compiles; 240 s guard
    against a hang."""
    code = USUAL + SLOW.replace("NUMBER", str(program)) + COMMAND.removeprefix(USUAL)
    (folder / "compiling").unlink(missing_ok=True)
    pipes = dict(
        env=ENVIRONMENT, cwd=folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    process = subprocess.Popen([sys.executable, "-c", code, *argv], **pipes)
    try:
        wait_for(process, (folder / "compiling").exists)
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert "Traceback" not in err, err
    return process.returncode, err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_compilation(tmp_path, number, code, monkeypatch):
    """One is enough; what was saved is said, and both commands take the directory."""
    monkeypatch.chdir(tmp_path)
    command = [*TINY, "--rounds", "2", "--out", "run"]
    assert main([*TINY, "--rounds", "2", "--out", "whole"]) == 0
    ended, err = interrupted_in_compiler(command, 1, number, tmp_path)
    assert ended == code, err
    assert "interrupted before the first round was done, nothing had to be saved" in err
    assert "continue with: fedjax-sim resume run" in err
    assert not pathlib.Path("run/.lock").exists() and not pathlib.Path("run/checkpoints").exists()
    assert main(command if number == signal.SIGINT else ["resume", "run", "--quiet"]) == 0
    for name in ("metrics.csv", "rounds.csv"):
        assert pathlib.Path("run", name).read_text() == pathlib.Path("whole", name).read_text()
    if number == signal.SIGTERM:  # resumed, from a checkpoint
        ended, err = interrupted_in_compiler(
            ["resume", "run", "--rounds", "4", "--quiet"], 1, number, tmp_path
        )
        assert (
            ended == code
            and "interrupted after round 2, saved at round 2; continue with: fedjax-sim resume run"
            in err
        )
        assert main(["resume", "run", "--rounds", "4", "--quiet"]) == 0


@pytest.mark.parametrize(
    "command", [["compare", "fedavg", "fedprox:mu=0.5"], ["run", "fedavg", "--seeds", "2"]]
)
def test_what_is_printed_goes_on_with_everything(tmp_path, command, monkeypatch):
    """In the second of several runs: not with that run alone."""
    monkeypatch.chdir(tmp_path)
    argv = [*command, *TINY[2:], "--rounds", "2", "--shuffle", "off"]
    if command[0] == "run":  # one program for all seeds: interrupted in the first
        ended, err = interrupted_in_compiler(argv, 1, signal.SIGINT, tmp_path)
    else:
        ended, err = interrupted_in_compiler(argv, 2, signal.SIGINT, tmp_path)
    assert ended == 130, err
    said = shlex.split(err.strip().splitlines()[-1].partition("continue with: ")[2])
    assert said[:2] == ["fedjax-sim", command[0]] and said[-2] == "--out", err
    assert main(said[1:]) == 0
    out = pathlib.Path(said[-1])
    places = ("seed-0", "seed-1") if command[0] == "run" else ("fedavg", "fedprox,mu=0.5")
    assert all((out / place / "summary.json").exists() for place in places)


def test_in_thread_returns_results_and_raises_failures():
    assert interrupts.in_thread(lambda: 3) == 3
    with pytest.raises(KeyError):
        interrupts.in_thread(lambda: {}["a"])
    with pytest.raises(SystemExit) as caught, interrupts.guard():
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.in_thread(lambda: time.sleep(1))
    assert caught.value.code == 143


def test_the_program_ends_while_native_code_runs_on(tmp_path):
    """At once, with the code of its signal: nothing is taken down around a compiler in another
    thread, which would come back into an interpreter that is no more."""
    code = (
        "import atexit, ctypes, os, signal, sys, threading\n"
        "from fedjax_sim.runner import interrupts\n"
        "atexit.register(lambda: print('taken down'))\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        "with interrupts.guard():\n"
        "    try:\n"
        "        interrupts.in_thread(lambda: ctypes.CDLL(None).sleep(60))\n"
        "    finally:\n"
        "        print('said')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", USUAL + code],
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=50,
    )
    assert (run.returncode, run.stdout, run.stderr) == (143, "said\n", "")


def test_signals_are_noted_and_raised_at_the_end():
    before = signal.getsignal(signal.SIGTERM)
    steps = []
    with pytest.raises(SystemExit) as caught, interrupts.guard():
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append(interrupts.pending())
        with interrupts.guard():  # nested: raised by the outer one
            steps.append("inner")
        steps.append("after")
    assert caught.value.code == 143 and steps == [signal.SIGTERM, "inner", "after"]
    assert signal.getsignal(signal.SIGTERM) is before and interrupts.pending() is None
    with pytest.raises(SystemExit), interrupts.guard():
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.check()
        raise AssertionError("not reached")


def test_handlers_of_the_program_are_left_alone():
    heard = []
    old = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with interrupts.guard():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert heard == [1]


def test_a_second_signal_ends_native_code_at_once():
    """The main thread hangs in a call that no Python handler can interrupt."""
    code = (
        "import signal, threading, ctypes, time\n"
        "from fedjax_sim.runner import interrupts\n"
        "with interrupts.guard():\n"
        "    print('ready', flush=True)\n"
        "    libc, end = ctypes.CDLL(None), time.monotonic() + 60\n"
        "    while time.monotonic() < end:\n"
        "        libc.usleep(900000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", USUAL + code],
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(interrupts.APART + 0.2)
        assert process.poll() is None  # the first one waits for the end of the guard
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "repeat to stop at once" in err and "Traceback" not in err
