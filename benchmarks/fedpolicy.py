"""What FedPolicy's round costs beside FedAvg's at equal local training.

    python -m benchmarks.fedpolicy [--dataset fashion_mnist --data-dir DATA] [--agent sac] [--reward
    combined] [--rounds 5]
        [--json FILE]

Rounds of both methods are run in turn (same cohorts, same local loss, no evaluation), so that a
busy machine disturbs both alike. Both train the same clients in the same round, so the ratio is
taken round by round, of the wall clock and of the processor time of this process (which other
processes hardly disturb); the medians are printed. The controller's share is measured with staged
programs: observing, acting and learning, over the whole round. By default on synthetic images of
Fashion-MNIST's shape and size; N = 100, 10 per round, E = 5, B = 64, lenet5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import jax

from fedjax_sim.engine import layout as layouts
from fedjax_sim.experiment import Experiment
from fedjax_sim.runner.compilation import want_host_devices
from fedjax_sim.runner.prepare import Setup, load_federation, prepare
from fedjax_sim.runner.profile import stage_seconds

SYNTHETIC = "synthetic:shape=28x28x1,classes=10,train=60000,test=1000"


class Stepper:
    """One method, one round at a time, each timed."""

    def __init__(self, setup: Setup):
        sim = setup.simulation
        self.state, self.data = layouts.place(
            sim.layout, sim.init(setup.experiment.training.seed, setup.net), sim.data
        )
        self.step = jax.jit(sim.round, donate_argnums=0)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.steps: list[int] = []

    def __call__(self, count: bool = True) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        self.state, log = self.step(self.state, self.data)
        jax.block_until_ready(self.state)
        if count:
            self.seconds.append(time.perf_counter() - began)
            self.cpu_seconds.append(time.process_time() - cpu)
            self.steps.append(int(log["steps_needed"]))


def median_ratio(base: list[float], other: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(base, other, strict=True))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    base = Experiment.of(
        dataset=args.dataset,
        data_dir=args.data_dir,
        partition=args.partition,
        model=args.model,
        clients=args.clients,
        participation=f"{args.cohort}/{args.clients}",
        epochs=args.epochs,
        batch_size=64,
        lr=0.01,
        rounds=105,
        loss=args.loss,
        evaluations=("global",),
        chunk=args.chunk,
        devices=args.devices,
    )
    want_host_devices(base)
    fed = load_federation(base)
    make = lambda method, **options: prepare(base.replace(method=method, options=options), fed=fed)
    setups = {
        "fedavg": make("fedavg"),
        "fedpolicy": make("fedpolicy", agent=args.agent, reward=args.reward),
    }
    steppers = {name: Stepper(setup) for name, setup in setups.items()}
    for stepper in steppers.values():  # compile, and fill the agent's memory past its first batch
        for _ in range(args.warmup):
            stepper(count=False)
    for i in range(args.rounds):
        for name in sorted(steppers, reverse=bool(i % 2)):
            steppers[name]()
        now = (
            f"{name} {s.seconds[-1]:.3f} s (cpu {s.cpu_seconds[-1]:.3f})"
            for name, s in steppers.items()
        )
        print(" ".join(now), file=sys.stderr, flush=True)
    plain, steered = steppers["fedavg"], steppers["fedpolicy"]
    assert plain.steps == steered.steps, "both methods must train the same cohorts"
    layout = setups["fedpolicy"].simulation.layout
    out: dict[str, Any] = dict(
        setting={k: v for k, v in vars(args).items() if k != "json"},
        chunk=layout.chunk,
        devices=layout.devices,
        fedavg_seconds=plain.seconds,
        fedpolicy_seconds=steered.seconds,
        fedavg_cpu_seconds=plain.cpu_seconds,
        fedpolicy_cpu_seconds=steered.cpu_seconds,
        local_steps=plain.steps,
        ratio=median_ratio(plain.seconds, steered.seconds),
        cpu_ratio=median_ratio(plain.cpu_seconds, steered.cpu_seconds),
    )
    if not args.no_stages:
        stages = stage_seconds(setups["fedpolicy"], repeats=args.repeats)
        whole = stages["round (fused, no evaluation)"]
        out |= dict(
            stages=stages,
            controller_share=stages["controller"] / whole,
            controller_and_plan_share=(stages["controller"] + stages["plan"]) / whole,
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default=SYNTHETIC)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--partition", default="dirichlet:0.1")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--loss", default="c3e")
    parser.add_argument("--agent", default="sac")
    parser.add_argument(
        "--reward", default="combined", help="contribution: what the leave-one-out accuracies cost"
    )
    parser.add_argument("--chunk", default="1")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each method")
    parser.add_argument(
        "--warmup", type=int, default=8, help="rounds before the clock; from 7 on the agent learns"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each stage")
    parser.add_argument("--no-stages", action="store_true", help="only the ratio")
    parser.add_argument("--json", default=None, metavar="FILE")
    args = parser.parse_args()
    out = measure(args)
    for name in ("fedavg", "fedpolicy"):
        print(
            f"{name:9s} {statistics.median(out[f'{name}_seconds']):8.3f} s per round, processor "
            f"{statistics.median(out[f'{name}_cpu_seconds']):8.3f} s (medians of {args.rounds})"
        )
    print(
        f"ratio     {out['ratio']:8.3f}   of the wall clock, {out['cpu_ratio']:.3f} of processor"
        " time (aim: at most 1.1)"
    )
    if "stages" in out:
        for name, seconds in out["stages"].items():
            print(f"  {name:30s} {1e3 * seconds:10.2f} ms")
        print(
            f"controller's share of the round: {100 * out['controller_share']:.2f} % learning,"
            f" {100 * out['controller_and_plan_share']:.2f} % with sampling, observing and acting"
            " (paper: 0.10 %)"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
