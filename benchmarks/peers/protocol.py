"""One JSON line in, one JSON line out, so that a driver can interleave rounds of peers in other
processes.

Worker (`serve`):   → {"ready": true, "setup_s": …, "compile_s": …, "versions": {…}}
                      once it can run a round
                    ← {"cmd": "round", "index": 3}          → {"seconds": …}
                      measured inside the worker
                    ← {"cmd": "weights", "file": "x.npz"}   → {"saved": "x.npz"}
                    ← {"cmd": "quit"}
                    → {"error": "one sentence"}          instead of any answer; the worker then ends

Driver (`Worker`):  starts a module with a chosen Python, asks, and reads the peak memory of its
process tree.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.workloads import Workload

ROOT = pathlib.Path(__file__).resolve().parents[2]


class PeerError(RuntimeError):
    """A peer cannot run here; the message is one sentence."""


@dataclasses.dataclass
class Peer:
    """What a peer module prepares for a workload."""

    round: Callable[[int], None]  # do round `index`; return when its result exists
    weights: Callable[[], dict[str, np.ndarray]]  # the global model, torch names and layouts
    compile_s: float = 0.0  # of compiling (or of starting actors), already spent


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Line:
    """The worker's end: the real stdout is for answers, everything else that is printed goes to
    stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._in = sys.stdin

    def send(self, **answer: Any) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def read(self) -> dict[str, Any]:
        text = self._in.readline()
        return json.loads(text) if text else {"cmd": "quit"}


def serve(
    line: Line, workload: Workload, prepare: Callable[[Workload], Peer], packages: Iterable[str]
) -> None:
    """Prepare a peer and answer until told to quit."""
    started = time.perf_counter()
    peer = prepare(workload)
    ready = time.perf_counter() - started
    line.send(
        ready=True,
        setup_s=ready - peer.compile_s,
        compile_s=peer.compile_s,
        versions=versions_of(packages),
    )
    while (request := line.read())["cmd"] != "quit":
        if request["cmd"] == "round":
            started = time.perf_counter()
            peer.round(request["index"])
            line.send(seconds=time.perf_counter() - started)
        elif request["cmd"] == "weights":
            save_weights(line, request["file"], peer.weights())


def save_weights(line: Line, file: str, weights: Mapping[str, np.ndarray]) -> None:
    np.savez(file, **weights)  # type: ignore[arg-type]
    line.send(saved=file)


class Worker:
    """The driver's end of one peer process."""

    def __init__(
        self,
        module: str,
        workload: Workload,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        log: pathlib.Path | None = None,
        root: pathlib.Path = ROOT,  # the source tree whose peer runs
    ):
        self._log = open(log, "w") if log else subprocess.DEVNULL  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.launch", module, workload.to_json()],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.peak_rss_mb = 0.0
        try:
            self.ready = self._answer()
        except PeerError:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise PeerError(
                f"the worker ended without an answer (exit code {self._process.wait()})"
            )
        answer = json.loads(text)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_rss_mb = max(self.peak_rss_mb, machine.peak_rss_mb(self._process.pid))
        return answer

    def round(self, index: int) -> float:
        return self.ask(cmd="round", index=index)["seconds"]

    def close(self) -> None:
        """Ask it to quit; end it if it does not."""
        try:
            if self._process.poll() is None and self._process.stdin is not None:
                self._process.stdin.write('{"cmd": "quit"}\n')
                self._process.stdin.close()
            self._process.wait(timeout=60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        if self._log is not subprocess.DEVNULL:
            self._log.close()  # type: ignore[union-attr]
