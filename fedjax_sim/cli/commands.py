"""What each command does: read options, start JAX, hand over to `runner`, print. JAX is imported on
the way, not before."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from typing import Any

from fedjax_sim.cli import registries
from fedjax_sim.cli.settings import for_values, make_config, output_directory, own_path
from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.methods import METHODS, controlled, make_method, method_class
from fedjax_sim.options import names, shown
from fedjax_sim.runner.config import Config


def note(text: str) -> None:
    print(text, file=sys.stderr)


_for_programs = False  # --json: the standard output has JSON lines and nothing else


def say(text: str) -> None:
    """Print, once: of several processes only the first speaks."""
    if text and not _for_programs and first_process():
        print(text)


def first_process() -> bool:
    import jax

    return jax.process_index() == 0


def start(config: Config, args: argparse.Namespace | None = None) -> None:
    """Before JAX's backend starts: host devices, the other processes, the compilation cache."""
    global _for_programs
    _for_programs = getattr(args, "json", False)
    if args is not None and getattr(args, "device", None):
        foresee(args)
    from fedjax_sim.runner.compilation import use_compilation_cache
    from fedjax_sim.runner.prepare import want_host_devices

    coordinator = getattr(args, "coordinator", None)
    number, which = getattr(args, "num_processes", None), getattr(args, "process_id", None)
    if coordinator == "auto" and not (number is None and which is None):
        raise UserError(
            "--coordinator auto finds out how many processes there are; leave --num-processes and"
            " --process-id out"
        )
    want_host_devices(config, number or 1)
    if coordinator:
        import jax

        try:
            jax.distributed.initialize(
                *(() if coordinator == "auto" else (coordinator, number, which))
            )
        except (RuntimeError, ValueError) as problem:
            raise UserError(
                f"cannot join the processes at '{coordinator}': {str(problem).splitlines()[0]}"
            ) from None
    elif number is not None or which is not None:
        raise UserError("--num-processes and --process-id need --coordinator HOST:PORT")
    use_compilation_cache()


def foresee(args: argparse.Namespace) -> None:
    """--device: everything here stays on the CPU, and another device's compiler is asked."""
    from fedjax_sim import accelerators

    accelerators.parse(args.device)
    if not args.dry_run:
        raise UserError(
            "--device foretells with --dry-run; a run takes the devices that JAX sees, --devices of"
            " them"
        )
    accelerators.quiet_environment()
    import jax

    jax.config.update("jax_platforms", "cpu")


def passed_on(args: argparse.Namespace) -> list[str]:
    """What a command hands on to the processes it starts."""
    files = [word for file in args.imports for word in ("--import", str(own_path(file).resolve()))]
    return [*(["--log", args.log] if args.log else []), *files]


def talk(args: argparse.Namespace) -> dict[str, Any]:
    """How a run speaks while it runs: to people, to programs, to other tools."""
    from fedjax_sim.runner.sinks import JsonLines, named

    told = [*([JsonLines()] if args.json else []), *named(names(args.log))]
    return dict(progress=not args.quiet and not args.json, say=note, sinks=told)


def the_same(args: argparse.Namespace, out: Any) -> str:
    """The command line again, with the directory that it took: it goes on with everything."""
    words = [*args.words, *([] if args.out else ["--out", str(out)])]
    return shlex.join(["fedjax-sim", *words])


def foretell(setup: Any, args: argparse.Namespace, data: bool = True) -> None:
    """What is said before a run; with --dry-run also who has which data (`data`), and for programs
    the same as numbers."""
    from fedjax_sim.cli import describe

    say(describe.report(setup))
    if args.dry_run:
        found: dict[str, Any] = describe.facts(setup)
        if args.device:
            from fedjax_sim.runner.ahead import fits

            found["on_device"] = fits(setup, args.device)
            say(describe.fits_line(found["on_device"]))
        say(setup.fed.describe() if data else "")
        if getattr(args, "json", False) and first_process():
            from fedjax_sim.runner.sinks import json_line

            config = setup.config
            print(
                json_line(
                    "dry-run",
                    method=config.method,
                    seed=config.seed,
                    config_hash=config.hash(),
                    **found,
                )
            )


def tables(summaries: list[dict[str, Any]], seeds: int) -> None:
    """What every command prints of its results; the seed is named where there are several."""
    from fedjax_sim.cli import describe

    name = lambda s: f"{s['method']} seed {s['seed']}" if seeds > 1 else s["method"]
    labelled = [s | {"method": name(s)} for s in summaries]
    say(describe.results_table(labelled))
    say(describe.targets_table(labelled))


def run(args: argparse.Namespace) -> int:
    lookup("method", args.method, METHODS)
    config = make_config(args, args.method, [args.method])
    config = for_values(config, args) if args.vmap else config
    out = output_directory(args, args.method, config)
    start(config, args)
    from fedjax_sim.cli import describe
    from fedjax_sim.cli.several import Federations, execute_all, set_ups

    speech = talk(args)
    setups = set_ups(config, args, Federations(), note)
    if args.vmap:
        from fedjax_sim.runner import values

        name, several = values.read(args.vmap)
        values.lanes_for(setups[0], name, several)  # mistakes are said before anything runs
    foretell(setups[0], args)
    if args.labels and first_process():
        setups[0].fed.plot(own_path(args.labels))
        say(f"written: {args.labels}")
    if args.dry_run:
        return 0
    several_runs = args.seeds > 1 and not args.vmap
    results = execute_all(
        setups, args, out, again=the_same(args, out) if several_runs else "", **speech
    )
    label = lambda i: (
        f"{args.method} {name}={several[i % len(several)]}" if args.vmap else args.method
    )
    tables([r.summary | {"method": label(i)} for i, r in enumerate(results)], args.seeds)
    if args.seeds > 1 and not args.vmap:
        say(describe.seeds_line([r.summary for r in results]))
    if len(results) > 1:
        say(f"run directories: {', '.join(str(r.out) for r in results)}")
    else:
        say(describe.speed_line(results[0].summary))
        say(f"run directory: {out}")
    return 0


def train(args: argparse.Namespace) -> int:
    """`run` for the sake of the method's agent, and what that run is good for."""
    from fedjax_sim.hooks import Controlled

    lookup("method", args.method, METHODS)
    if args.over:
        from fedjax_sim.cli.across import train_across

        return train_across(args)
    if not controlled(args.method):
        able = ", ".join(name for name in METHODS if controlled(name))
        raise UserError(f"method '{args.method}' has no agent to train; allowed: {able}")
    kind = method_class(args.method)
    assert issubclass(kind, Controlled)
    args.sets = [
        *args.sets,
        *(f"{args.method}.{option}={value}" for option, value in kind.training),
    ]
    config = make_config(args, args.method, [args.method])
    if not args.out:
        args.out = str(output_directory(args, f"train-{args.method}", config))
        args.words = [*args.words, "--out", args.out]
    done = run(args)
    if not args.dry_run:
        first = args.out if args.seeds == 1 else f"{args.out}/seed-{args.seed}"
        made = make_method(config.method, **config.options)
        assert isinstance(made, Controlled)
        parts = made.hands_over
        seed = (
            f" --seed {args.seed}" if args.seed else ""
        )  # the same initial weights, as what it saw are models
        say(
            f"use it with: fedjax-sim run {args.method}{seed} --start-from"
            f" {first}:{','.join(parts)}"
        )
    return done


def compare(args: argparse.Namespace) -> int:
    from fedjax_sim.cli.compare import compare

    return compare(args)


def sweep(args: argparse.Namespace) -> int:
    from fedjax_sim.cli.sweep.command import sweep

    return sweep(args)


def paper(args: argparse.Namespace) -> int:
    from fedjax_sim.cli.paper.command import paper

    return paper(args)


def resume(args: argparse.Namespace) -> int:
    from fedjax_sim.runner.run_directory import RunDirectory

    path = own_path(args.directory)
    if not path.is_dir():
        raise UserError(f"there is no run directory '{shown(args.directory)}'")
    config, resolved, _ = RunDirectory(path).read_config()
    if config.method not in METHODS and not config.own_method:
        raise UserError(
            f"'{path}' was run with '{config.method}', a method of a file; name that file with"
            " --import FILE.py"
        )
    start(dataclasses.replace(config, devices=str(resolved.get("devices", config.devices))), args)
    from fedjax_sim.runner import execute as runner

    speech = talk(args)
    more = dict(progress=speech["progress"], log=speech["sinks"], say=note)
    result = runner.resume(path, args.rounds, data_dir=args.data_dir, **more)
    tables([result.summary], 1)
    say(f"run directory: {path}")
    return 0


def profile(args: argparse.Namespace) -> int:
    lookup("method", args.method, METHODS)
    config = make_config(args, args.method, [args.method])
    out = output_directory(args, "profile", config)
    start(config, args)
    from fedjax_sim.cli import describe
    from fedjax_sim.runner.facts import check_reach
    from fedjax_sim.runner.files import checksum, write_json
    from fedjax_sim.runner.prepare import prepare
    from fedjax_sim.runner.profile import stage_seconds

    repeats = 3
    if args.device:
        from fedjax_sim.cli.several import foreseen
        from fedjax_sim.runner.config import check
        from fedjax_sim.runner.prepare import load_federation

        check(config)
        foretell(foreseen(config, args, load_federation(config), note), args)
        return 0
    setup = prepare(config, say=note, measure=not args.dry_run)
    check_reach(setup)
    if args.dry_run:
        foretell(setup, args)
        return 0
    seconds = stage_seconds(setup, repeats, note)
    say(describe.stage_table(setup, seconds, repeats))
    if args.out and first_process():
        out.mkdir(parents=True)
        found = {"method": config.method, "config": setup.config.to_json(), "seconds": seconds}
        write_json(out / "profile.json", found | {"checksum": checksum(found)})
        say(f"written: {out / 'profile.json'}")
    return 0


def report(args: argparse.Namespace) -> int:
    from fedjax_sim.report.page import report

    out = own_path(args.out) if args.out else None
    for path in report(
        [own_path(d) for d in args.directories], out, note, titles=not args.no_titles
    ):
        print(path)
    return 0


def export(args: argparse.Namespace) -> int:
    from fedjax_sim.runner import export as exporting
    from fedjax_sim.runner.files import exists, write_bytes

    out = own_path(args.out) if args.out else None
    if out is not None and exists(out):
        raise UserError(f"'{shown(str(out), 200)}' exists already; choose another --out")
    file = exporting.export(own_path(args.directory), out, args.client, data_dir=args.data_dir)
    text = exporting.example(file)
    beside = file.with_name(f"use_{file.stem.replace('-', '_')}.py")
    write_bytes(beside, text.encode())
    print(f"{text}\nwritten: {file}, {beside}; a run starts from it with --init {file}")
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
    "sweep": sweep,
    "paper": paper,
    "train": train,
    "resume": resume,
    "profile": profile,
    "report": report,
    "export": export,
    "list": list_names,
}
