"""From parsed options to a Config and a directory."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from fedjax_sim import options
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.models import check_options
from fedjax_sim.runner.config import FOUND, Config
from fedjax_sim.transforms import names_of, with_option

MOST_SEEDS = 10_000

# fields of Config that are not an option of the same name
NOT_OPTIONS = FOUND | {
    *("method", "options", "transforms", "model_options", "loss_options"),
    *("evaluations", "metrics", "schedule_rounds", "cohorts"),
}


def split_sets(
    sets: list[str], methods: list[str], around: Sequence[str] = ()
) -> tuple[dict[str, dict[str, str]], dict, dict]:
    """--set NAME.OPTION=VALUE -> (options per method, model options, loss options).

    >>> split_sets(["fedprox.mu=0.1", "model.hidden=64x32", "loss.gamma=1"], ["fedprox"])
    ({'fedprox': {'mu': '0.1'}}, {'hidden': (64, 32)}, {'gamma': 1.0})
    """
    per: dict[str, dict[str, str]] = {m: {} for m in methods}
    model: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    for item in sets:
        left, equals, value = item.partition("=")
        owner, dot, option = left.partition(".")
        if not (equals and dot and option):
            raise UserError(
                f"--set '{options.shown(item)}' cannot be read; use NAME.OPTION=VALUE, e.g."
                " fedavg.weights=uniform"
            )
        if owner == "model":
            model[option] = (
                options.convert(left, value, options.widths) if option == "hidden" else value
            )
        elif owner == "loss":
            loss[option] = options.convert(left, value, options.plain)
        elif owner in per:
            per[owner][option] = value
        else:
            raise unknown(
                "name in --set", options.shown(owner), ["model", "loss", *methods, *around]
            )
    return per, model, loss


def make_config(args: argparse.Namespace, method: str, methods: list[str]) -> Config:
    """One method's Config; `methods` are all whose options may stand in --set."""
    around = names_of(args.transforms)
    texts, rest = tuple(args.transforms), []
    for item in args.sets:
        left, equals, value = item.partition("=")
        owner, _, option = left.partition(".")
        if equals and option and owner in around and owner not in methods:
            texts = with_option(texts, owner, option, value)
        else:
            rest.append(item)
    per, model, loss = split_sets(rest, methods, around)
    check_options(args.model, model)  # also what `build` is told by others: its dtype, its shape
    values = {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(Config)
        if f.name not in NOT_OPTIONS
    }
    if values["data_seed"] == "follow":
        values["data_seed"] = values["seed"]
    modes = options.names(args.evaluations)
    if not modes:
        raise UserError("--evaluate names no mode; write for example --evaluate global,personal")
    values |= dict(transforms=texts, evaluations=modes, metrics=options.names(args.metrics))
    config = Config(
        method=method, options=per[method], model_options=model, loss_options=loss, **values
    )
    return for_seeds(config, args.seeds, args.seeds_mode)


def for_seeds(config: Config, seeds: int, mode: str) -> Config:
    """Seeds side by side share one device."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"seeds {seeds} is not allowed; use a whole number from 1 to {MOST_SEEDS}")
    if config.seed + seeds > 2**63:
        raise UserError(
            f"seed {config.seed} and {seeds} seeds are too large together; the last is at most"
            " 2^63 - 1"
        )
    if seeds == 1 or mode == "loop":
        return config
    return on_one_device(config, "--seeds-mode vmap", "use --seeds-mode loop")


def on_one_device(config: Config, what: str, instead: str) -> Config:
    """What runs side by side shares a device."""
    if config.devices not in ("auto", "1"):
        raise UserError(f"{what} runs on one device, not {config.devices}; {instead}")
    return dataclasses.replace(config, devices="1")


def for_values(config: Config, args: argparse.Namespace) -> Config:
    """Values of `--vmap` share one device."""
    if args.seeds > 1 and args.seeds_mode == "vmap":
        raise UserError(
            "--seeds-mode vmap does not go with --vmap, whose values are side by side; use"
            " --seeds-mode loop"
        )
    return on_one_device(config, "--vmap", "use --devices 1, or run the values one after another")


def output_directory(args: argparse.Namespace, stem: str, config: Config) -> pathlib.Path:
    """--out, or a new name under runs/; an existing one is refused, unless it is empty or what
    stands there goes on."""
    from fedjax_sim.runner.files import exists  # brings NumPy, which the help must not wait for

    word = pathlib.Path(config.dataset.split(":")[0]).stem[:60]
    out = own_path(args.out) if args.out else free_directory(f"{stem}-{word}-s{config.seed}")
    if exists(out) and not args.dry_run and not can_go_on(args, out):
        hint = (
            f", or resume it with fedjax-sim resume {out}"
            if args.command in ("run", "train")
            else ""
        )
        raise UserError(
            f"output directory '{options.shown(str(out))}' exists already; choose another"
            f" --out{hint}"
        )
    return out


def can_go_on(args: argparse.Namespace, out: pathlib.Path) -> bool:
    """Whether the command may write into `out`, which is there; whether the same run began there is
    asked later."""
    from fedjax_sim.runner import run_directory

    if args.command not in ("run", "train", "compare"):
        return False
    if args.command == "compare" or args.seeds > 1:
        return run_directory.empty(out) or (
            not (out / run_directory.CONFIG).exists() and is_comparison(out)
        )
    return run_directory.empty(out) or run_directory.unfinished(out)


def is_comparison(folder: pathlib.Path) -> bool:
    """Whether run directories stand in it, as `compare` and `--seeds` write them, or nothing but
    folders for them."""
    from fedjax_sim.runner import run_directory

    if any(folder.glob("*/config.json")) or any(folder.glob("*/seed-*/config.json")):
        return True
    made = lambda path: (
        path.is_dir() and all(map(run_directory.empty, path.iterdir()))
    )  # a kill before the first file
    inside = (
        [path for path in folder.iterdir() if path.name != "order.json"] if folder.is_dir() else []
    )
    return folder.is_dir() and all(run_directory.empty(path) or made(path) for path in inside)


def free_directory(stem: str) -> pathlib.Path:
    root = pathlib.Path("runs")
    for i in range(1, 100_000):
        path = root / f"{stem}-{i:03d}"
        if not path.exists():
            return path
    raise UserError(f"no free directory name for '{stem}' under runs/")


def own_path(text: str) -> pathlib.Path:
    """A path as it was typed, ~ and ~user meant as the shell means them."""
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"'{options.shown(text)}' is not a path: there is no such user") from None
