"""Facts about the machine: processor, memory, versions, the GEMM peak; peak memory of a process
tree.

`python -m benchmarks.machine` prints them as JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PACKAGES = ("fedjax-sim", "jax", "jaxlib", "numpy", "flax", "optax", "torch")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts() -> dict[str, Any]:
    """Processor, cores, memory, system, Python and package versions, and the present load."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    )
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_gb": round(memory / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(v, 2) for v in os.getloadavg()],
        "versions": versions,
    }


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ---- GEMM peak -----------------------------------------------------------------------------------


def _best_gflops(multiply: Callable[[], Any], size: int, seconds: float) -> float:
    multiply()
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e9


def gemm_gflops(size: int = 2048, seconds: float = 1.5) -> dict[str, float]:
    """Best float32 GFLOPS of a size³ product, by each installed library (JAX on its default
    device)."""
    a = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    found = {"numpy": _best_gflops(lambda: a @ a, size, seconds)}
    try:
        import torch

        t = torch.from_numpy(a)
        found["torch"] = _best_gflops(lambda: t @ t, size, seconds)
    except ImportError:
        pass
    try:
        import jax

        j, product = jax.numpy.asarray(a), jax.jit(lambda x: x @ x)
        found["jax"] = _best_gflops(lambda: product(j).block_until_ready(), size, seconds)
    except ImportError:
        pass
    return {name: round(value, 1) for name, value in found.items()}


def gemm_in_own_process() -> dict[str, float]:
    """`gemm_gflops` in a fresh process, so that no thread pool stays behind in the caller's."""
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machine"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])["gemm_gflops"]


# ---- memory of a process tree (Linux) ------------------------------------------------------------


def _children(pid: int) -> list[int]:
    found = []
    for listing in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in listing.read_text().split()]
    return found


def peak_rss_mb(pid: int) -> float:
    """Sum over a process and its descendants of each one's peak resident memory, in MB (10^6
    bytes).

    Pages shared between processes are counted once per process, and the peaks need not coincide: an
    upper bound. 0 where /proc is missing.
    """
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        own = next(
            (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0
        )
        return own * 1024 / 1e6 + sum(peak_rss_mb(child) for child in _children(pid))
    except OSError:
        return 0.0


if __name__ == "__main__":
    print(json.dumps({**facts(), "gemm_gflops": gemm_gflops()}))
