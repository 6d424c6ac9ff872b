"""The commands: read options, start JAX, call `api`, print. JAX is imported only when needed."""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Any

from fedjax_sim.cli import registries
from fedjax_sim.cli.settings import as_path, method_of, output_directory, read_values, settings_of
from fedjax_sim.errors import UserError, first_line, unknown
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.given import experiment_of, layered
from fedjax_sim.experiment.settings import FOLLOW
from fedjax_sim.methods import METHODS, controlled, make_method, method_class
from fedjax_sim.options import names, shown
from fedjax_sim.transforms import TRANSFORMS, transform_class, transformed

if TYPE_CHECKING:
    from fedjax_sim.data.federation import Federation
    from fedjax_sim.runner.many import Federations
    from fedjax_sim.runner.prepare import Objects, Setup


def note(text: str) -> None:
    print(text, file=sys.stderr)


_json = False  # --json: the standard output has only JSON lines


def say(text: str) -> None:
    """Print `text`, in the first process only and not with --json."""
    if text and not _json and first_process():
        print(text)


def first_process() -> bool:
    import jax

    return jax.process_index() == 0


def start(experiment: Experiment, args: argparse.Namespace | None = None) -> None:
    """Configure JAX before its backend starts: host devices, other processes, compilation cache."""
    global _json
    _json = getattr(args, "json", False)
    if args is not None and getattr(args, "device", None):
        use_cpu_compilers(args)
    from fedjax_sim.runner.compilation import use_compilation_cache, want_host_devices

    coordinator = getattr(args, "coordinator", None)
    number, which = getattr(args, "num_processes", None), getattr(args, "process_id", None)
    if coordinator == "auto" and not (number is None and which is None):
        raise UserError(
            "--coordinator auto finds the number of processes; leave --num-processes and"
            " --process-id out"
        )
    want_host_devices(experiment, number or 1)
    if coordinator:
        import jax

        given = () if coordinator == "auto" else (coordinator, number, which)
        try:
            jax.distributed.initialize(*given)
        except (RuntimeError, ValueError) as problem:
            why = first_line(problem)
            raise UserError(f"cannot join the processes at '{coordinator}': {why}") from None
    elif number is not None or which is not None:
        raise UserError("--num-processes and --process-id need --coordinator HOST:PORT")
    use_compilation_cache()


def use_cpu_compilers(args: argparse.Namespace) -> None:
    """--device: keep everything on the CPU and only compile for the other device."""
    from fedjax_sim import accelerators

    accelerators.parse(args.device)
    if not args.dry_run:
        raise UserError(
            "--device needs --dry-run; a run uses the devices that JAX finds, --devices of them"
        )
    accelerators.quiet_environment()
    import jax

    jax.config.update("jax_platforms", "cpu")


def output(args: argparse.Namespace) -> dict[str, Any]:
    """The outputs of a run while it runs: the terminal, JSON lines, other tools."""
    from fedjax_sim.runner.sinks import JsonLines, named

    sinks = [*([JsonLines()] if args.json else []), *named(names(args.log))]
    return dict(progress=not args.quiet and not args.json, say=note, sinks=sinks)


def resume_command(args: argparse.Namespace, out: pathlib.Path) -> str:
    """This command line with its directory: repeating it resumes everything."""
    return shlex.join(["fedjax-sim", *args.argv, *([] if args.out else ["--out", str(out)])])


def ready(
    experiment: Experiment,
    args: argparse.Namespace,
    given: Objects | None = None,
    feds: Federations | None = None,
) -> Setup:
    """One prepared run; with --device as it would be set up there."""
    from fedjax_sim.runner import many

    if not args.device:
        return many.ready(experiment, given, feds, note, measure=not args.dry_run)
    from fedjax_sim.runner.ahead import prepare_for
    from fedjax_sim.runner.facts import check_counters

    if getattr(args, "vmap", "") or (getattr(args, "seeds", 1) > 1 and args.seeds_mode == "vmap"):
        raise UserError(
            "--device is for one run, not several side by side; leave --vmap and --seeds-mode"
            " vmap out"
        )
    fed = (feds or many.Federations()).of(experiment)
    setup = prepare_for(args.device, experiment, fed, note)
    check_counters(setup)
    return setup


def announce(setup: Setup, args: argparse.Namespace, data: bool = True) -> None:
    """Print the description of a run; with --dry-run also that of the data (if `data`), and with
    --json the numbers."""
    from fedjax_sim.cli import describe

    say(describe.report(setup))
    if not args.dry_run:
        return
    found = describe.facts(setup)
    if args.device:
        from fedjax_sim.runner.ahead import fits

        found["on_device"] = fits(setup, args.device)
        say(describe.fits_line(found["on_device"]))
    say(setup.fed.describe() if data else "")
    if getattr(args, "json", False) and first_process():
        from fedjax_sim.runner.sinks import json_line

        experiment = setup.experiment
        which = dict(method=experiment.method.name, seed=experiment.training.seed)
        print(json_line("dry-run", **which, config_hash=setup.hash, **found))


def tables(summaries: list[dict[str, Any]], seeds: int) -> None:
    """Print the tables of results; with the seed if there are several."""
    from fedjax_sim.report import text

    name = lambda s: f"{s['method']} seed {s['seed']}" if seeds > 1 else s["method"]
    labelled = [s | {"method": name(s)} for s in summaries]
    say(text.results_table(labelled))
    say(text.targets_table(labelled))


def run(args: argparse.Namespace) -> int:
    method = method_of(args)
    return run_experiment(args, method, settings_of(args, method))


def run_experiment(args: argparse.Namespace, method: str, settings: dict[str, Any]) -> int:
    experiment = experiment_of(method, settings)
    values = read_values(args.vmap) if getattr(args, "vmap", "") else None  # only `run` has it
    out = output_directory(args, method, experiment, args.seeds)
    start(experiment, args)
    from fedjax_sim.report import text
    from fedjax_sim.runner import many

    follow = settings.get("data_seed") == FOLLOW
    each = many.for_seeds(experiment, args.seeds, args.seeds_mode, follow)
    if values:
        if args.seeds > 1 and args.seeds_mode == "vmap":
            raise UserError(
                "--seeds-mode vmap does not go with --vmap, whose values are side by side; use"
                " --seeds-mode loop"
            )
        instead = "use --devices 1, or run the values one after another"
        each = [many.on_one_device(one, "--vmap", instead) for one in each]
    feds = many.Federations()
    setups = [ready(one, args, None, feds) for one in each]
    if values:
        many.with_values(setups[0], *values)  # errors come before anything runs
    announce(setups[0], args)
    if args.labels and first_process():
        setups[0].fed.plot(as_path(args.labels))
        say(f"written: {args.labels}")
    if args.dry_run:
        return 0
    if values:
        results = many.run_all_values(setups, args.seeds, *values, out, **output(args))
        label = lambda i: f"{method} {values[0]}={values[1][i % len(values[1])]}"
    else:
        again = resume_command(args, out) if args.seeds > 1 else ""
        more = output(args) | dict(resume_command=again)
        results = many.run_all(setups, args.seeds, out, args.seeds_mode, **more)
        label = lambda i: method
    tables([r.summary | {"method": label(i)} for i, r in enumerate(results)], args.seeds)
    if args.seeds > 1 and not values:
        say(text.seeds_line([r.summary for r in results]))
    if len(results) > 1:
        say(f"run directories: {', '.join(str(r.out) for r in results)}")
    else:
        say(text.speed_line(results[0].summary))
        say(f"run directory: {out}")
    return 0


def train(args: argparse.Namespace) -> int:
    """`run` to train an agent, the method's or a transform's; prints how to use it."""
    method = method_of(args)
    settings = settings_of(args, method)
    if args.over:
        from fedjax_sim.cli.across import train_across

        return train_across(args, method, settings)
    if controlled(method):
        fixed = dict(method_class(method).training)  # type: ignore[attr-defined]
        settings = layered(settings, {f"{method}.{name}": value for name, value in fixed.items()})
    experiment = experiment_of(method, settings)
    chosen = experiment.method
    trained: Any = transformed(make_method(method, **chosen.options), chosen.transforms)
    while not hasattr(trained, "agent") and hasattr(trained, "inner"):
        trained = trained.inner
    if not hasattr(trained, "agent"):
        able = [name for name in METHODS if controlled(name)]
        others = [name for name in TRANSFORMS if hasattr(transform_class(name), "agent")]
        able += [f"or any method with --transform {name}" for name in others]
        raise UserError(f"method '{method}' has no agent to train; allowed: {', '.join(able)}")
    if not args.out:
        args.out = str(output_directory(args, f"train-{method}", experiment))
        args.argv = [*args.argv, "--out", args.out]
    done = run_experiment(args, method, settings)
    if not args.dry_run:
        number = experiment.training.seed
        first = args.out if args.seeds == 1 else f"{args.out}/seed-{number}"
        # the agent saw models with these initial weights
        seed = f" --seed {number}" if number else ""
        around = "".join(f" --transform {text}" for text in chosen.transforms)
        say(
            f"use it with: fedjax-sim run {method}{around}{seed} --start-from"
            f" {first}:{','.join(trained.hands_over)}"
        )
    return done


def compare(args: argparse.Namespace) -> int:
    methods = [entry.partition(":")[0] for entry in args.methods]
    settings = settings_of(args, *methods)
    first = experiment_of(methods[0], settings, methods)
    out = output_directory(args, "compare", first, args.seeds)
    start(first, args)
    from fedjax_sim import api
    from fedjax_sim.report import text
    from fedjax_sim.runner.many import Federations

    feds = Federations()
    make = lambda experiment, given: ready(experiment, args, given, feds)
    setups = api.set_ups(args.methods, settings, args.seeds, args.seeds_mode, make)
    seen: list[Federation] = []  # federations that have been described

    def before(setup: Setup) -> None:
        announce(setup, args, data=not any(setup.fed is other for other in seen))
        seen.append(setup.fed)

    if args.dry_run:
        for several in setups.values():
            before(several[0])
        differs = api.differing({entry: several[0] for entry, several in setups.items()})
        say("\n".join(text.differing_lines(differs)))
        return 0
    more = dict(before=before, resume_command=resume_command(args, out), **output(args))
    done = api.run_compared(setups, args.seeds, out, args.seeds_mode, **more)
    say("\n".join(text.differing_lines(done.differs)))
    tables(done.summaries, args.seeds)
    say(text.gains_line(done.summaries))
    for entry in setups:
        mine = [summary for summary in done.summaries if summary["method"] == entry]
        one = text.seeds_line(mine) if args.seeds > 1 else ""
        say(f"{entry} {one}" if one else text.speed_line(mine[0]))
    say(f"run directories: {', '.join(str(r.out) for r in done.results)}")
    files = sorted(out.glob("compare.*")) + sorted(out.glob("curves.*"))
    say(f"written: {', '.join(map(str, files))}; figures: fedjax-sim report {out}")
    return 0


def sweep(args: argparse.Namespace) -> int:
    from fedjax_sim.cli.sweep import sweep

    return sweep(args)


def paper(args: argparse.Namespace) -> int:
    from fedjax_sim.cli.paper.command import paper

    return paper(args)


def resume(args: argparse.Namespace) -> int:
    from fedjax_sim.runner.run_directory import RunDirectory

    path = as_path(args.directory)
    if not path.is_dir():
        raise UserError(f"there is no run directory '{shown(args.directory)}'")
    stored = RunDirectory(path).read_config()
    method = stored.experiment.method.name
    if method not in METHODS and not stored.found.custom_method:
        raise UserError(
            f"'{path}' was run with '{method}', a method from a file; name the file with --import"
            " FILE.py"
        )
    devices = stored.resolved.get("devices", stored.experiment.compute.devices)
    start(stored.experiment.replace(devices=devices), args)
    from fedjax_sim import api

    more = output(args)
    more["log"] = more.pop("sinks")
    result = api.resume(path, args.rounds, data_dir=args.data_dir, **more)
    tables([result.summary], 1)
    say(f"run directory: {path}")
    return 0


def profile(args: argparse.Namespace) -> int:
    method = method_of(args)
    experiment = experiment_of(method, settings_of(args, method))
    out = output_directory(args, "profile", experiment)
    start(experiment, args)
    setup = ready(experiment, args)
    if args.dry_run or args.device:
        announce(setup, args)
        return 0
    from fedjax_sim.cli import describe
    from fedjax_sim.runner.files import checksum, write_json
    from fedjax_sim.runner.profile import stage_seconds

    repeats = 3
    seconds = stage_seconds(setup, repeats, note)
    say(describe.stage_table(setup, seconds, repeats))
    if args.out and first_process():
        out.mkdir(parents=True)
        found = {"method": method, "config": setup.experiment.flat(), "seconds": seconds}
        write_json(out / "profile.json", found | {"checksum": checksum(found)})
        say(f"written: {out / 'profile.json'}")
    return 0


def report(args: argparse.Namespace) -> int:
    from fedjax_sim.report.page import report

    out = as_path(args.out) if args.out else None
    folders = list(map(as_path, args.directories))
    print(*report(folders, out, note, titles=not args.no_titles), sep="\n")
    return 0


def export(args: argparse.Namespace) -> int:
    from fedjax_sim.runner import export as exporting
    from fedjax_sim.runner.files import exists, write_bytes

    out = as_path(args.out) if args.out else None
    if out is not None and exists(out):
        raise UserError(f"'{shown(str(out), 200)}' exists already; choose another --out")
    file = exporting.export(as_path(args.directory), out, args.client, data_dir=args.data_dir)
    text = exporting.example(file)
    script = file.with_name(f"use_{file.stem.replace('-', '_')}.py")
    write_bytes(script, text.encode())
    print(f"{text}\nwritten: {file}, {script}; a run starts from it with --init {file}")
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
