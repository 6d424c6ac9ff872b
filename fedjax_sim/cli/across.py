"""`fedjax-sim train METHOD --over …`: one policy for many federations."""

from __future__ import annotations

import argparse
import pathlib
import sys

from fedjax_sim.cli.parser import TRAINING
from fedjax_sim.cli.settings import free_directory, make_config, own_path

ROUNDS = 50  # of a run in training, unless somebody says


def train_across(args: argparse.Namespace) -> int:
    """Tune, search, score; the same command with the same --out goes on."""
    from fedjax_sim.runner.across.evolve import train_over
    from fedjax_sim.runner.start import start_jax

    if args.rounds == TRAINING:
        args.rounds = ROUNDS
    agent = f"{args.method}.agent="
    if not any(text.startswith(agent) for text in args.sets):
        args.sets = [*args.sets, f"{agent}evolved"]
    config = make_config(args, args.method, [args.method])
    start_jax(config)
    out = (
        own_path(args.out) if args.out else free_directory(f"train-{args.method}-over-s{args.seed}")
    )
    quiet = (lambda text: None) if args.quiet else lambda text: print(text, file=sys.stderr)
    train_over(args.over, config, pathlib.Path(out), say=quiet)
    print(
        f"use it with: fedjax-sim run {args.method} --set {agent}evolved --start-from {out}:agent"
    )
    return 0
