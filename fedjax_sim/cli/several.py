"""Runs of one command: seeds of a set-up, and whether the partition follows them."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from fedjax_sim.errors import UserError
from fedjax_sim.runner.config import Config, check

FOLLOW = "follow"
DATA = (
    "dataset",
    "partition",
    "clients",
    "protocol",
    "data_seed",
    "data_dir",
    "download",
    "norm",
    "batch_size",
    "server_val",
    "val_fraction",
)


class Federations:
    """Every federation is loaded once, however many methods use it."""

    def __init__(self) -> None:
        self.loaded: dict[tuple, Any] = {}

    def of(self, config: Config) -> Any:
        from fedjax_sim.runner.prepare import load_federation

        key = tuple(getattr(config, name) for name in DATA)
        if key not in self.loaded:
            self.loaded[key] = load_federation(config)
        return self.loaded[key]


def set_ups(
    config: Config, args: argparse.Namespace, feds: Federations, say: Callable[[str], None]
) -> list[Any]:
    """The prepared runs of one method: one for all seeds, or one per seed where the partition
    follows it."""
    from fedjax_sim.runner.facts import check_reach
    from fedjax_sim.runner.prepare import prepare

    configs = [config]
    if args.data_seed == FOLLOW and args.seeds > 1:
        if args.seeds_mode == "vmap":
            raise UserError(
                "--data-seed follow gives every seed its own data; use --seeds-mode loop"
            )
        configs = [
            dataclasses.replace(config, seed=s, data_seed=s)
            for s in range(config.seed, config.seed + args.seeds)
        ]
    out = []
    for one in configs:
        check(one)
        if args.device:
            out.append(foreseen(one, args, feds.of(one), say))
            continue
        setup = prepare(one, fed=feds.of(one), loaded=True, say=say, measure=not args.dry_run)
        check_reach(setup)
        out.append(setup)
    return out


def foreseen(config: Config, args: argparse.Namespace, fed: Any, say: Callable[[str], None]) -> Any:
    """The run as it would be set up on --device."""
    from fedjax_sim.runner.ahead import prepare_for
    from fedjax_sim.runner.facts import check_counters

    if getattr(args, "vmap", "") or (args.seeds > 1 and args.seeds_mode == "vmap"):
        raise UserError(
            "--device foretells one run, not several side by side; leave --vmap and --seeds-mode"
            " vmap out"
        )
    setup = prepare_for(args.device, config, fed, say)
    check_counters(setup)
    return setup


def execute_all(
    setups: list[Any], args: argparse.Namespace, out: pathlib.Path, **more: Any
) -> list[Any]:
    """The results of all seeds; a single one has `out` for itself. What was begun there goes on
    where it was."""
    from fedjax_sim.runner.driver import drive
    from fedjax_sim.runner.execute import resume_begun
    from fedjax_sim.runner.run_directory import RunDirectory
    from fedjax_sim.runner.seeds import run_seeds, with_seed
    from fedjax_sim.runner.values import read, run_values

    first, several, vmap = setups[0], args.seeds > 1, getattr(args, "vmap", "")  # of `run` alone
    if several and len(setups) == 1 and not out.exists() and not vmap:
        return run_seeds(first, args.seeds, out, args.seeds_mode, **more)
    every = (
        setups
        if len(setups) > 1
        else [with_seed(first, first.config.seed + i) if i else first for i in range(args.seeds)]
    )
    results: list[Any] = []
    for one in every:
        path = out / f"seed-{one.config.seed}" if several else out
        if vmap:
            results += run_values(one, *read(vmap), path, **more)
            continue
        done = resume_begun(one, path, **more)
        results += [done] if done is not None else drive([one], [RunDirectory(path)], **more)
    return results
