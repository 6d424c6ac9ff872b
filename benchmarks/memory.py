"""Peak memory of large federations, each in a process of its own, against what it must hold.

    python -m benchmarks.memory [--cases a,b,c] [--clients-a 10000] [--clients-b 200] [--json FILE]

a  N = 10,000 stateless clients on cnn4 (32×32×3, a few examples each), 20 per round: nothing
   grows with N but data
b  N = 200 clients on ResNet-18 that each keep a model (8.9 GB in all), 2 per round: no second
   copy of the state
c  as b with the models on the host (`--state-on host`) and the cohort's rows sent to the device

Must hold = state + data + clients in training, from shapes alone (`runner.facts`). Passed: peak
≤ state + 4 GB. The excess is what the process grew by, beyond the state, after JAX had started
and one network was compiled and run (`baseline`): a second copy of the state anywhere would show
there in full. `--checkpoint` also writes and reads a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import machine

MB, ALLOWED_MB = 10**6, 4000
CASES = {
    "a": dict(
        method="fedavg",
        model="cnn4",
        clients=10_000,
        cohort=20,
        examples=4,
        batch=4,
        state_on="device",
    ),
    "b": dict(
        method="full",
        model="resnet18",
        clients=200,
        cohort=2,
        examples=4,
        batch=4,
        state_on="device",
    ),
    "c": dict(
        method="full", model="resnet18", clients=200, cohort=2, examples=4, batch=4, state_on="host"
    ),
}


def resident_mb() -> float:
    """Resident memory of this process now, in MB (Linux)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024 / 1e6
        for line in status.splitlines()
        if line.startswith("VmRSS")
    )


def config_of(case: dict[str, Any]) -> Any:
    from fedjax_sim.experiment import Experiment

    return Experiment.of(
        case["method"],
        model=case["model"],
        clients=case["clients"],
        rounds=10**6,
        eval_every=1,
        epochs=1,
        participation=f"{case['cohort']}/{case['clients']}",
        batch_size=case["batch"],
        devices="1",
        chunk="1",
        momentum=0.0,
        evaluations=("global", "personal"),
        state_on=case["state_on"],
    )


def federation_of(case: dict[str, Any]) -> Any:
    """Random images of CIFAR's size, equally many for every client."""
    from fedjax_sim.data.federation import Federation

    rng = np.random.default_rng(0)
    total, n = case["clients"] * case["examples"], case["examples"]
    return Federation.from_arrays(
        rng.integers(0, 256, (total + 10, 32, 32, 3), dtype=np.uint8),
        rng.integers(0, 10, total + 10),
        {"train": list(np.arange(total).reshape(case["clients"], n))},
        test=np.arange(total, total + 10),
        classes=10,
        mean=0.5,
        std=0.5,
        name="memory",
    )


def one_gradient(sim: Any, net: Any, batch: int) -> None:
    """A gradient step's program and memory belong to the baseline."""
    import jax
    import jax.numpy as jnp

    def loss(params: Any, x: Any) -> Any:
        features, _ = sim.env.model.features({**net, "params": params}, x, train=True)
        return sim.env.model.head({**net, "params": params}, features).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss))(net["params"], jnp.zeros((batch, 32, 32, 3))))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process: peak and present memory after every stage."""
    import jax
    import jax.numpy as jnp

    from fedjax_sim.engine import host_clients
    from fedjax_sim.engine import layout as layouts
    from fedjax_sim.runner import checkpoint
    from fedjax_sim.runner.compilation import use_compilation_cache, want_host_devices
    from fedjax_sim.runner.prepare import prepare

    config = config_of(case)
    want_host_devices(config)
    use_compilation_cache()
    setup = prepare(config, fed=federation_of(case), capacity=1)
    sim, net = setup.simulation, setup.net
    one_gradient(sim, net, case["batch"])
    stages: dict[str, dict[str, float]] = {}

    def note(name: str) -> None:
        stages[name] = {"rss_mb": resident_mb(), "peak_mb": machine.peak_rss_mb(os.getpid())}

    note("baseline")
    state = jax.block_until_ready(sim.init(0, net))
    place = host_clients.place if config.compute.state_on == "host" else layouts.place
    state, data = place(sim.layout, state, sim.data)
    note("init")
    temporary = None
    run: Any = sim.run
    if config.compute.state_on == "device":
        run = run.lower(state, data, jnp.int32(1)).compile()
        analysis = run.memory_analysis()
        # a copy of the state would be in here
        temporary = analysis.temp_size_in_bytes / MB if analysis else None
    note("compiled")
    # on the host this one also compiles
    state, logs, _ = jax.block_until_ready(run(state, data, jnp.int32(1)))
    began = time.perf_counter()
    for _ in range(2):
        state, logs, _ = jax.block_until_ready(run(state, data, jnp.int32(1)))
    seconds = (time.perf_counter() - began) / 2
    note("rounds")
    if case.get("checkpoint"):
        with tempfile.TemporaryDirectory(dir=case["checkpoint"]) as folder:
            path = checkpoint.save(pathlib.Path(folder), state, config.hash())
            note("saved")
            state = jax.block_until_ready(checkpoint.load(path, state, config.hash()))
        note("loaded")
    measured = dict(
        compiled_temporary_mb=temporary,
        device_arrays_mb=sum(a.nbytes for a in jax.live_arrays()) / MB,
    )
    loss = float(np.asarray(logs["train_loss"]).reshape(-1)[0])
    return (
        row_of(case, setup, stages)
        | measured
        | dict(s_per_round_with_evaluation=seconds, train_loss=loss)
    )


def row_of(case: dict[str, Any], setup: Any, stages: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The case, what a run says it needs, and what was measured stage by stage."""
    from fedjax_sim.runner.facts import facts as sizes

    facts = sizes(setup)
    return {
        **{name: case[name] for name in ("clients", "cohort", "model", "method", "state_on")},
        "state_mb": facts["state"] / MB,
        "data_mb": facts["data"] / MB,
        "training_mb": facts["side_by_side"] * facts["training"] / MB,
        "must_hold_mb": facts["peak"] / MB,
        "baseline_mb": stages["baseline"]["rss_mb"],
        "peak_mb": stages[list(stages)[-1]]["peak_mb"],
        "stages": stages,
    }


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The verdict: peak ≤ state + 4 GB; and what was held beyond baseline and state."""
    return {
        **row,
        "excess_mb": row["peak_mb"] - row["baseline_mb"] - row["state_mb"],
        "passed": row["peak_mb"] <= row["state_mb"] + ALLOWED_MB,
    }


def in_own_process(case: dict[str, Any]) -> dict[str, Any]:
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--measure", json.dumps(case)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(
            f"the case failed (a killed process: not enough memory):\n{done.stderr[-2000:]}"
        )
    return judged(json.loads(done.stdout.splitlines()[-1]))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'case':4} {'model':9} {'clients':>8} {'state on':>8} {'state MB':>9} {'data MB':>8}"
        f" {'train MB':>8} {'base MB':>8} {'peak MB':>8} {'excess MB':>9} {'device MB':>9}  peak ≤"
        f" state + {ALLOWED_MB} MB"
    ]
    for r in rows:
        lines.append(
            f"{r['case']:4} {r['model']:9} {r['clients']:8,} {r['state_on']:>8}"
            f" {r['state_mb']:9.0f} {r['data_mb']:8.0f} {r['training_mb']:8.0f}"
            f" {r['baseline_mb']:8.0f} {r['peak_mb']:8.0f} {r['excess_mb']:9.0f}"
            f" {r['device_arrays_mb']:9.0f}  {'passed' if r['passed'] else 'NOT PASSED'};"
            f" {r['s_per_round_with_evaluation']:.1f} s per round with evaluation"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cases", default="a,b", help=f"comma-separated, of {', '.join(CASES)}")
    for name, case in CASES.items():
        parser.add_argument(f"--clients-{name}", type=int, default=case["clients"], metavar="N")
    parser.add_argument("--model", help="another model in all cases, for a quick look")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="also write and read a checkpoint under this folder"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--measure", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(measure(json.loads(options.measure))))
        return 0
    rows = []
    for name in options.cases.split(","):
        if name not in CASES:
            parser.error(f"unknown case '{name}'; allowed: {', '.join(CASES)}")
        case = {
            **CASES[name],
            "clients": getattr(options, f"clients_{name}"),
            "checkpoint": options.checkpoint,
            "model": options.model or CASES[name]["model"],
        }
        if case["clients"] < CASES[name]["cohort"]:  # type: ignore[operator]
            parser.error(
                f"--clients-{name} {case['clients']} is less than the {CASES[name]['cohort']} of a"
                " round"
            )
        rows.append({"case": name, **in_own_process(case)})
        print(f"case {name}: {rows[-1]['peak_mb']:.0f} MB", file=sys.stderr, flush=True)
    print(table(rows))
    if options.json:
        pathlib.Path(options.json).write_text(
            json.dumps(
                {"rows": rows, "allowed_mb": ALLOWED_MB, "machine": machine.facts()}, indent=1
            )
        )
    return 0 if all(r["passed"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
