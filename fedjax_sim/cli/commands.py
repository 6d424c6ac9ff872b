"""What each command does: read options, start JAX, hand over to `runner`, print. JAX is imported on the way, not before."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

from fedjax_sim.cli import registries
from fedjax_sim.cli.settings import make_config, output_directory, own_path
from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.methods import METHODS, options_of
from fedjax_sim.options import shown
from fedjax_sim.runner.config import Config


def note(text: str) -> None:
    print(text, file=sys.stderr)


def say(text: str) -> None:
    """Print, once: of several processes only the first speaks."""
    if text and first_process():
        print(text)


def first_process() -> bool:
    import jax

    return jax.process_index() == 0


def start(config: Config, args: argparse.Namespace | None = None) -> None:
    """Before JAX's backend starts: host devices, the other processes, the compilation cache."""
    from fedjax_sim.runner.cache import use_compilation_cache
    from fedjax_sim.runner.prepare import want_host_devices

    coordinator = getattr(args, "coordinator", None)
    number = getattr(args, "num_processes", None)
    want_host_devices(config, number or 1)
    if coordinator:
        import jax

        try:
            jax.distributed.initialize(*(() if coordinator == "auto" else (coordinator, number, args.process_id)))  # type: ignore[union-attr]
        except (RuntimeError, ValueError) as problem:
            raise UserError(f"cannot join the processes at '{coordinator}': {str(problem).splitlines()[0]}") from None
    elif number or getattr(args, "process_id", None) is not None:
        raise UserError("--num-processes and --process-id need --coordinator HOST:PORT")
    use_compilation_cache()


def execute_all(setup: Any, args: argparse.Namespace, out: pathlib.Path) -> list[Any]:
    """The results of all seeds; a single one has `out` for itself. What was begun there goes on where it was."""
    from fedjax_sim.runner.directory import RunDirectory
    from fedjax_sim.runner.driver import drive
    from fedjax_sim.runner.execute import gone_on
    from fedjax_sim.runner.seeds import run_seeds, with_seed

    shown = not args.quiet
    if args.seeds > 1 and not out.exists():
        return run_seeds(setup, args.seeds, out, args.seeds_mode, progress=shown)
    results: list[Any] = []
    for i in range(args.seeds):
        one = with_seed(setup, setup.config.seed + i) if i else setup
        path = out / f"seed-{one.config.seed}" if args.seeds > 1 else out
        done = gone_on(one, path, progress=shown, say=note)
        results += [done] if done is not None else drive([one], [RunDirectory(path)], progress=shown)
    return results


def label(result: Any, seeds: int) -> dict[str, Any]:
    """A result's summary as a row of the table; its seed is named where there are several."""
    summary = result.summary
    return {**summary, "method": f"{summary['method']} seed {summary['seed']}"} if seeds > 1 else summary


def tables(results: list[Any], seeds: int) -> None:
    """What every command prints of its results."""
    from fedjax_sim.cli import describe

    labelled = [label(r, seeds) for r in results]
    say(describe.results_table(labelled))
    say(describe.targets_table(labelled))


def run(args: argparse.Namespace) -> int:
    lookup("method", args.method, METHODS)
    config = make_config(args, args.method, [args.method])
    out = output_directory(args, args.method, config)
    start(config, args)
    from fedjax_sim.cli import describe
    from fedjax_sim.runner.facts import check_reach
    from fedjax_sim.runner.prepare import prepare

    setup = prepare(config, say=note, measure=not args.dry_run)
    check_reach(setup)
    say(describe.report(setup))
    if args.dry_run:
        return 0
    results = execute_all(setup, args, out)
    tables(results, args.seeds)
    if args.seeds > 1:
        say(describe.seeds_line([r.summary for r in results]))
        say(f"run directories: {', '.join(str(r.out) for r in results)}")
    else:
        say(describe.speed_line(results[0].summary))
        say(f"run directory: {out}")
    return 0


def pretrain(args: argparse.Namespace) -> int:
    """`run` in the regime that trains the method's agent and encoder."""
    lookup("method", args.method, METHODS)
    if "regime" not in options_of(args.method):
        able = ", ".join(name for name in METHODS if "regime" in options_of(name))
        raise UserError(f"method '{args.method}' has nothing to pre-train; allowed: {able}")
    args.sets = [*args.sets, f"{args.method}.regime=pretrain"]
    args.out = args.out or str(
        output_directory(args, f"pretrain-{args.method}", make_config(args, args.method, [args.method]))
    )
    done = run(args)
    if not args.dry_run:
        say(f"use it with: fedjax-sim run {args.method} --start-from {args.out}:agent,server.encoder")
    return done


def compare(args: argparse.Namespace) -> int:
    for method in args.methods:
        lookup("method", method, METHODS)
    if len(set(args.methods)) < len(args.methods):
        raise UserError("compare names a method twice; name each method once")
    configs = [make_config(args, m, args.methods) for m in args.methods]
    out = output_directory(args, "compare", configs[0])
    start(configs[0], args)
    from fedjax_sim.cli import describe
    from fedjax_sim.methods import make_method
    from fedjax_sim.runner.config import check
    from fedjax_sim.runner.facts import check_reach
    from fedjax_sim.runner.files import write_json
    from fedjax_sim.runner.prepare import load_federation, prepare

    for config in configs:  # every mistake is found before the first method runs
        check(config)
        make_method(config.method, **config.options)
    fed = load_federation(configs[0])
    results, lines = [], []
    for config in configs:
        setup = prepare(config, fed=fed, loaded=True, say=note, measure=not args.dry_run)
        check_reach(setup)
        say(describe.report(setup))
        if args.dry_run:
            continue
        runs = execute_all(setup, args, out / config.method)
        results += runs
        if args.seeds > 1:
            lines.append(f"{config.method} {describe.seeds_line([r.summary for r in runs])}")
    if results:
        tables(results, args.seeds)
        summaries = [r.summary for r in results]
        if first_process():
            write_json(out / "compare.json", {"relative_gain": describe.gains(summaries), "runs": summaries})
        say(describe.gains_line(summaries))
        for line in lines or [describe.speed_line(r.summary) for r in results]:
            say(line)
        figure = describe.save_curves(results, out / "curves.png") if first_process() else None
        say(f"run directories: {', '.join(str(r.out) for r in results)}" + (f"; figure: {figure}" if figure else ""))
    return 0


def resume(args: argparse.Namespace) -> int:
    from fedjax_sim.runner.directory import RunDirectory

    path = own_path(args.directory)
    if not path.is_dir():
        raise UserError(f"there is no run directory '{shown(args.directory)}'")
    config, resolved, _ = RunDirectory(path).read_config()
    start(dataclasses.replace(config, devices=str(resolved.get("devices", config.devices))), args)
    from fedjax_sim.runner import execute as runner

    result = runner.resume(path, args.rounds, progress=not args.quiet, data_dir=args.data_dir, say=note)
    tables([result], 1)
    say(f"run directory: {path}")
    return 0


def profile(args: argparse.Namespace) -> int:
    lookup("method", args.method, METHODS)
    config = make_config(args, args.method, [args.method])
    start(config, args)
    from fedjax_sim.cli import describe
    from fedjax_sim.runner.facts import check_reach
    from fedjax_sim.runner.prepare import prepare
    from fedjax_sim.runner.profile import stage_seconds

    repeats = 3
    setup = prepare(config, say=note)
    check_reach(setup)
    say(describe.stage_table(setup, stage_seconds(setup, repeats), repeats))
    return 0


def report(args: argparse.Namespace) -> int:
    from fedjax_sim.report.figures import report

    for path in report(args.directories, args.out):
        print(path)
    return 0


def list_names(args: argparse.Namespace) -> int:
    if args.what not in (*registries.LISTED, "all"):
        raise unknown("list", args.what, registries.LISTED)
    for name in registries.LISTED if args.what == "all" else [args.what]:
        print(f"{name}:")
        table = registries.catalog(name)
        width = max(map(len, table), default=0)
        for key, text in table.items():
            print(f"  {key:{width}s}  {text}")
    return 0


COMMANDS = {
    "run": run,
    "compare": compare,
    "pretrain": pretrain,
    "resume": resume,
    "profile": profile,
    "report": report,
    "list": list_names,
}
