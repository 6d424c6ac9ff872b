"""`fedjax-sim train METHOD --over …`: one policy for many federations."""

from __future__ import annotations

import argparse
import pathlib
import sys

from fedjax_sim.cli.parser import TRAINING
from fedjax_sim.cli.settings import free_directory, make_config, own_path
from fedjax_sim.methods import controlled

ROUNDS = 50  # of a run in training, unless somebody says


def train_across(args: argparse.Namespace) -> int:
    """Tune, search, score; the same command with the same --out goes on."""
    from fedjax_sim.runner.across.evolve import train_over
    from fedjax_sim.runner.compilation import start_jax

    if args.rounds == TRAINING:
        args.rounds = ROUNDS
    agent = f"{args.method}.agent"
    if controlled(args.method) and not any(text.startswith(f"{agent}=") for text in args.sets):
        args.sets = [*args.sets, f"{agent}=evolved"]
    config = make_config(args, args.method, [args.method])
    start_jax(config)
    out = own_path(args.out) if args.out else free_directory(f"over-{args.method}-s{args.seed}")
    quiet = (lambda text: None) if args.quiet else lambda text: print(text, file=sys.stderr)
    found = train_over(args.over, config, pathlib.Path(out), say=quiet)
    same = [f"--transform {text}" for text in args.transforms]
    same += [f"--set {agent}=evolved"] if controlled(args.method) else []
    part = found["parts"].rpartition(".")[0]
    print(f"use it with: fedjax-sim run {args.method} {' '.join(same)} --start-from {out}:{part}")
    return 0
