"""`fedjax-sim train METHOD --over …`: one policy for many federations."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from fedjax_sim.cli.settings import as_path, free_directory
from fedjax_sim.experiment.given import experiment_of, layered
from fedjax_sim.methods import controlled
from fedjax_sim.sweeps.plan import as_text


def train_across(args: argparse.Namespace, method: str, settings: dict[str, Any]) -> int:
    """Tune, search, score; the same command with the same --out resumes."""
    from fedjax_sim.runner.across.evolve import train_over
    from fedjax_sim.runner.compilation import start_jax

    agent = {f"{method}.agent": "evolved"} if controlled(method) else {}
    experiment = experiment_of(method, layered(agent, settings))
    start_jax(experiment)
    seed = experiment.training.seed
    out = as_path(args.out) if args.out else free_directory(f"over-{method}-s{seed}")
    quiet = (lambda text: None) if args.quiet else lambda text: print(text, file=sys.stderr)
    bar = not args.quiet and sys.stderr.isatty()
    found = train_over(args.over, experiment, pathlib.Path(out), say=quiet, bar=bar)
    same = [f"--transform {text}" for text in experiment.method.transforms]
    same += [f"--set {name}=evolved" for name in agent]
    own = f"{method}.agent."  # options that decide the shape of the policy
    same += [f"--set {n}={as_text(v)}" for n, v in settings.items() if n.startswith(own)]
    part = found["parts"].rpartition(".")[0]
    print(f"use it with: fedjax-sim run {method} {' '.join(same)} --start-from {out}:{part}")
    return 0
