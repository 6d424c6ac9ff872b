"""Starts a peer module in its own process: `python -m benchmarks.peers.launch MODULE WORKLOAD`.

A peer module has `PACKAGES` (whose versions are reported) and `prepare(workload) -> Peer` or, where
the other side owns the training loop, `run(line, workload)`. Whatever goes wrong comes back as one
sentence.
"""

from __future__ import annotations

import importlib
import sys
import traceback

from benchmarks.peers.protocol import Line, PeerError, serve
from benchmarks.workloads import from_text


def main(module_name: str, workload_text: str) -> None:
    line = Line()
    try:
        workload = from_text(workload_text)
        module = importlib.import_module(module_name)
        if hasattr(module, "run"):
            module.run(line, workload)
        else:
            serve(line, workload, module.prepare, module.PACKAGES)
    except PeerError as problem:
        line.send(error=str(problem))
    except ImportError as problem:
        traceback.print_exc()
        line.send(error=f"not installed here ({problem})")
    except Exception as problem:
        traceback.print_exc()
        line.send(error=f"{type(problem).__name__}: {problem}".splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
