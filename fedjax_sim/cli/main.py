"""The command line: run, compare, resume, profile, report, list. Nothing heavy is imported before the options are read."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import Any

from fedjax_sim import __version__
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.runner.config import Config

DEFAULT = Config()
EXAMPLES = """examples:
  fedjax-sim run fedavg                                       the embedded job: real digits, no download
  fedjax-sim run fedprox --set fedprox.mu=0.1 --rounds 50 --out runs/prox
  fedjax-sim run fedavg --dataset fashion_mnist --data-dir DATA --partition dirichlet:0.1 --clients 100 \\
                 --participation 0.1 --epochs 5 --batch-size 64 --lr 0.01 --rounds 105
  fedjax-sim compare fedavg ditto scaffold --rounds 30        same partition, initial weights and cohorts
  fedjax-sim resume runs/prox --rounds 100                    continue, or extend
  fedjax-sim report runs/prox runs/other --out figures        accuracy, actions, communication
  fedjax-sim list methods"""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence and exit code 2."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (see {self.prog} --help)")


def _add(group: Any, name: str, kind: Any, text: str, **more: Any) -> None:
    default = getattr(DEFAULT, name)
    shown = "" if default in (None, "", 0) and kind is not int else f" (default: {default})"
    if kind is bool:
        group.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
        return
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        default=default,
        metavar=more.pop("metavar", None),
        help=text + shown,
        **more,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    _add(data, "dataset", str, "digits, synthetic[:options], fashion_mnist, cifar10, …, or a .npz file", metavar="D")
    _add(data, "partition", str, "iid, dirichlet:0.1, shards:2, pathological:2, fixed:2, …", metavar="P")
    _add(data, "protocol", str, "train/val/test protocol: fedpolicy, pfllib, pfedrlla, qbandit", metavar="S")
    _add(data, "norm", str, "normalisation: dataset, pfllib (0.5, 0.5) or none")
    _add(data, "clients", int, "number of clients N", metavar="N")
    _add(data, "unseen", float, "clients kept out of training but evaluated: a fraction, or a number from 1 up", metavar="U")
    _add(data, "data_seed", int, "seed of the partition and splits", metavar="s")
    _add(
        data,
        "server_val",
        int,
        "examples the server holds back for validation (default: 1000, or 10 %% of a small set)",
        metavar="n",
    )
    _add(data, "val_fraction", float, "share of a client's data kept for validation (protocol fedpolicy)", metavar="f")
    _add(data, "data_dir", str, "folder with NAME.npz files; also the environment variable FEDJAX_SIM_DATA", metavar="DIR")
    _add(data, "download", bool, "fetch a missing dataset through tensorflow-datasets")
    model = parser.add_argument_group("model")
    _add(model, "model", str, "mlp, lenet5, lenet5_pad2, cnn4, cnn6, resnet18", metavar="M")
    _add(model, "conv", str, "how convolutions are computed (equal values): auto, lax, patches, block, winograd")
    _add(model, "init", str, "initial weights from a .npz file", metavar="FILE")
    _add(model, "bn_stats", str, "BatchNorm running statistics: average (on the server) or local (stay on the client)")
    train = parser.add_argument_group("training")
    _add(train, "participation", str, "per round: a fraction 0.1, a range 0.5:1, or n of N as 10/50", metavar="r")
    _add(train, "rounds", int, "rounds T", metavar="T")
    _add(train, "epochs", float, "local epochs E; fractions are counted in steps", metavar="E")
    _add(train, "batch_size", int, "batch size B", metavar="B")
    _add(train, "lr", float, "local learning rate", metavar="η")
    _add(train, "schedule", str, "learning rate over rounds: constant, step:every=30,gamma=0.1, cosine[:end=0]")
    _add(train, "momentum", float, "SGD momentum, reset every round", metavar="m")
    _add(train, "weight_decay", float, "coupled weight decay, as PyTorch's SGD", metavar="w")
    _add(train, "decay_groups", str, "parameter groups that decay: all, or names joined by +")
    _add(
        train,
        "loss",
        str,
        "local loss: ce, focal, fedlc, cb, ls, c3e; auto: the method's own (fedpolicy c3e, else ce)",
        metavar="L",
    )
    _add(train, "dropout", float, "chance that a participant fails to report", metavar="p")
    _add(train, "stragglers", str, "p or p:least: chance of being slow, and the least share of the work done", metavar="p")
    _add(train, "seed", int, "seed of weights, cohorts and shuffles", metavar="s")
    train.add_argument("--seeds", type=int, default=1, metavar="K", help="K runs with seeds s, s+1, …; one compilation")
    train.add_argument(
        "--seeds-mode",
        choices=("loop", "vmap"),
        default="loop",
        help="one seed after another (default), or side by side in one program",
    )
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME.OPTION=VALUE",
        dest="sets",
        help="option of a method, of the model, or of the loss, e.g. fedavg.weights=uniform, "
        "model.stem=cifar, loss.gamma=1; may be repeated",
    )
    score = parser.add_argument_group("evaluation")
    _add(score, "eval_every", int, "evaluate every k rounds", metavar="k")
    score.add_argument(
        "--evaluate",
        default=",".join(DEFAULT.evaluations),
        metavar="MODES",
        dest="evaluations",
        help="comma list of global, global@clients, personal, personal@global, resident "
        f"(default: {','.join(DEFAULT.evaluations)})",
    )
    _add(
        score,
        "personal_every",
        int,
        "methods that fine-tune at evaluation do so every k rounds (0: at the end only)",
        metavar="k",
    )
    _add(score, "probe", bool, "record participants' accuracy before and after local training")
    how = parser.add_argument_group("computation")
    _add(how, "dtype", str, "float32 or float64")
    _add(how, "precision", str, "matmul precision on accelerators: default (TF32 on NVIDIA), high, highest")
    _add(how, "chunk", str, "clients side by side on one device: auto, or a number", metavar="n")
    _add(how, "devices", str, "devices to share the cohort: auto (one per core on a CPU), or a number", metavar="n")
    _add(how, "backend", str, "auto, loop (debug: names the failing client), chunked, vmap, sharded")
    _add(how, "state_on", str, "clients' stored rows: device, or host (only the cohort's travel to the device)")
    _add(how, "checkpoint_every", int, "rounds between checkpoints (0: about once a minute)", metavar="k")
    _add(how, "keep", int, "checkpoints kept", metavar="k")
    how.add_argument(
        "--coordinator",
        default=None,
        metavar="HOST:PORT",
        help="several processes: address of process 0 (under SLURM or on TPU pods: 'auto')",
    )
    how.add_argument("--num-processes", type=int, default=None, metavar="P", help="several processes: how many")
    how.add_argument("--process-id", type=int, default=None, metavar="i", help="several processes: which one this is")
    how.add_argument("--out", default=None, metavar="DIR", help="run directory (default: a new one under runs/)")
    how.add_argument("--dry-run", action="store_true", help="print sizes, bytes, memory and steps, and stop")
    how.add_argument("--quiet", action="store_true", help="no progress bar")


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="fedjax-sim",
        formatter_class=formatter,
        epilog=EXAMPLES,
        description="Federated learning, one XLA program per round.",
    )
    parser.add_argument("--version", action="version", version=f"fedjax-sim {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    run = commands.add_parser("run", help="run one method", formatter_class=formatter, epilog=EXAMPLES)
    run.add_argument("method", metavar="METHOD", help="see: fedjax-sim list methods")
    compare = commands.add_parser(
        "compare", help="run several methods on the same draws", formatter_class=formatter, epilog=EXAMPLES
    )
    compare.add_argument("methods", metavar="METHOD", nargs="+")
    profile = commands.add_parser("profile", help="seconds and bytes of each part of a round", formatter_class=formatter)
    profile.add_argument("method", metavar="METHOD")
    for sub in (run, compare, profile):
        add_options(sub)
    resume = commands.add_parser("resume", help="continue a run directory")
    resume.add_argument("directory", metavar="DIR")
    resume.add_argument("--rounds", type=int, default=None, metavar="T", help="new total, to extend the run")
    resume.add_argument("--data-dir", default=None, metavar="DIR", help="where the dataset is now, if it moved")
    resume.add_argument("--quiet", action="store_true", help="no progress bar")
    report = commands.add_parser("report", help="figures from run directories")
    report.add_argument("directories", metavar="DIR", nargs="+", help="run directories, or a folder that compare wrote")
    report.add_argument("--out", default=None, metavar="DIR", help="where the figures go (default: the first directory)")
    listing = commands.add_parser("list", help="what there is, by name")
    listing.add_argument(
        "what",
        nargs="?",
        default="all",
        metavar="WHAT",
        help="methods, datasets, models, partitions, protocols, losses, agents, evaluations",
    )
    return parser


# ---- options to Config ------------------------------------------------------------------------------------------
def split_sets(sets: list[str], methods: list[str]) -> tuple[dict[str, dict[str, str]], dict, dict]:
    """--set NAME.OPTION=VALUE -> (options per method, model options, loss options)."""
    per: dict[str, dict[str, str]] = {m: {} for m in methods}
    model: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    for item in sets:
        left, equals, value = item.partition("=")
        owner, dot, option = left.partition(".")
        if not (equals and dot and option):
            raise UserError(f"--set '{item}' cannot be read; use NAME.OPTION=VALUE, e.g. fedavg.weights=uniform")
        if owner == "model":
            model[option] = hidden_widths(value) if option == "hidden" else value
        elif owner == "loss":
            loss[option] = value
        elif owner in per:
            per[owner][option] = value
        else:
            raise unknown("name in --set", owner, ["model", "loss", *methods])
    return per, model, {k: _number(v) for k, v in loss.items()}


def hidden_widths(text: str) -> tuple[int, ...]:
    """'200x100' -> (200, 100)."""
    try:
        return tuple(int(v) for v in text.split("x"))
    except ValueError:
        raise UserError(f"model.hidden={text} cannot be read; use widths joined by x, e.g. 64 or 200x100") from None


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text


def make_config(args: argparse.Namespace, method: str, methods: list[str]) -> Config:
    per, model, loss = split_sets(args.sets, methods)
    names = {f.name for f in dataclasses.fields(Config)} - {
        "method",
        "options",
        "model_options",
        "loss_options",
        "evaluations",
        "schedule_rounds",
    }
    values = {name: getattr(args, name) for name in names}
    modes = tuple(m.strip() for m in args.evaluations.split(",") if m.strip())
    return Config(method=method, options=per[method], model_options=model, loss_options=loss, evaluations=modes, **values)


def free_directory(stem: str) -> pathlib.Path:
    root = pathlib.Path("runs")
    for i in range(1, 100_000):
        path = root / f"{stem}-{i:03d}"
        if not path.exists():
            return path
    raise UserError(f"no free directory name for '{stem}' under runs/")


def note(text: str) -> None:
    print(text, file=sys.stderr)


def say(text: str) -> None:
    """Print, once: of several processes only the first speaks."""
    if first_process():
        print(text)


def first_process() -> bool:
    import jax

    return jax.process_index() == 0


# ---- commands ---------------------------------------------------------------------------------------------------
def start(config: Config, args: argparse.Namespace | None = None) -> None:
    """Before JAX's backend starts: host devices, the other processes, the compilation cache."""
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
    from fedjax_sim.runner.cache import use_compilation_cache

    use_compilation_cache()


def run_one(args: argparse.Namespace) -> int:
    from fedjax_sim.methods import METHODS

    if args.method not in METHODS:
        raise unknown("method", args.method, METHODS)
    config = make_config(args, args.method, [args.method])
    config = several_seeds(args, config)
    out = pathlib.Path(args.out) if args.out else free_directory(f"{args.method}-{dataset_word(config)}-s{config.seed}")
    if out.exists() and not args.dry_run:
        raise UserError(
            f"output directory '{out}' exists already; choose another --out, or resume it with fedjax-sim resume {out}"
        )
    start(config, args)
    from fedjax_sim.cli import describe
    from fedjax_sim.runner.prepare import prepare

    setup = prepare(config, say=note, measure=not args.dry_run)
    say(describe.report(setup))
    if args.dry_run:
        return 0
    results = execute_all(setup, args, out)
    say(describe.results_table([label(r, args.seeds) for r in results]))
    if args.seeds > 1:
        from fedjax_sim.runner.seeds import seeds_line

        say(seeds_line([r.summary for r in results]))
        say(f"run directories: {', '.join(str(r.out) for r in results)}")
    else:
        say(describe.speed_line(results[0].summary))
        say(f"run directory: {out}")
    return 0


def several_seeds(args: argparse.Namespace, config: Config) -> Config:
    """Seeds side by side share one device."""
    if args.seeds < 1:
        raise UserError(f"seeds {args.seeds} is not allowed; use a whole number of 1 or more")
    if args.seeds == 1 or args.seeds_mode == "loop":
        return config
    if config.devices not in ("auto", "1"):
        raise UserError(f"--seeds-mode vmap runs on one device, not {config.devices}; use --seeds-mode loop")
    return dataclasses.replace(config, devices="1")


def execute_all(setup: Any, args: argparse.Namespace, out: pathlib.Path) -> list[Any]:
    """The results of all seeds; a single one has `out` for itself."""
    from fedjax_sim.runner import execute as runner
    from fedjax_sim.runner.seeds import run_seeds

    if args.seeds > 1:
        return run_seeds(setup, args.seeds, out, args.seeds_mode, progress=not args.quiet)
    from fedjax_sim.runner.directory import RunDirectory

    return [runner.execute(setup, RunDirectory(out), progress=not args.quiet)]


def label(result: Any, seeds: int) -> dict[str, Any]:
    """A result's summary as a row of the table; its seed is named where there are several."""
    summary = result.summary
    return {**summary, "method": f"{summary['method']} seed {summary['seed']}"} if seeds > 1 else summary


def dataset_word(config: Config) -> str:
    return pathlib.Path(config.dataset.split(":")[0]).stem


def run_compare(args: argparse.Namespace) -> int:
    from fedjax_sim.methods import METHODS

    for method in args.methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    if len(set(args.methods)) < len(args.methods):
        raise UserError("compare names a method twice; name each method once")
    configs = [make_config(args, m, args.methods) for m in args.methods]
    configs = [several_seeds(args, config) for config in configs]
    out = pathlib.Path(args.out) if args.out else free_directory(f"compare-{dataset_word(configs[0])}-s{configs[0].seed}")
    if out.exists() and not args.dry_run:
        raise UserError(f"output directory '{out}' exists already; choose another --out")
    start(configs[0], args)
    from fedjax_sim.cli import describe
    from fedjax_sim.methods import make_method
    from fedjax_sim.runner.config import check
    from fedjax_sim.runner.prepare import load_federation, prepare
    from fedjax_sim.runner.seeds import seeds_line

    for config in configs:  # every mistake is found before the first method runs
        check(config)
        make_method(config.method, **config.options)
    fed = load_federation(configs[0])
    results, lines = [], []
    for config in configs:
        setup = prepare(config, fed=fed, say=note, measure=not args.dry_run)
        say(describe.report(setup))
        if args.dry_run:
            continue
        runs = execute_all(setup, args, out / config.method)
        results += runs
        if args.seeds > 1:
            lines.append(f"{config.method} {seeds_line([r.summary for r in runs])}")
    if results:
        say(describe.results_table([label(r, args.seeds) for r in results]))
        for line in lines or [describe.speed_line(r.summary) for r in results]:
            say(line)
        figure = describe.save_curves(results, out / "curves.png") if first_process() else None
        say(f"run directories: {', '.join(str(r.out) for r in results)}" + (f"; figure: {figure}" if figure else ""))
    return 0


def run_resume(args: argparse.Namespace) -> int:
    from fedjax_sim.runner.directory import RunDirectory

    path = pathlib.Path(args.directory)
    if not path.is_dir():
        raise UserError(f"there is no run directory '{args.directory}'")
    config, resolved, _ = RunDirectory(path).read_config()
    start(dataclasses.replace(config, devices=str(resolved.get("devices", config.devices))))
    from fedjax_sim.cli import describe
    from fedjax_sim.runner import execute as runner

    result = runner.resume(path, args.rounds, progress=not args.quiet, data_dir=args.data_dir)
    print(describe.results_table([result.summary]))
    print(f"run directory: {path}")
    return 0


def run_profile(args: argparse.Namespace) -> int:
    from fedjax_sim.methods import METHODS

    if args.method not in METHODS:
        raise unknown("method", args.method, METHODS)
    config = make_config(args, args.method, [args.method])
    start(config, args)
    from fedjax_sim.runner.prepare import prepare
    from fedjax_sim.runner.profile import profile

    say(profile(prepare(config, say=note)))
    return 0


def run_report(args: argparse.Namespace) -> int:
    from fedjax_sim.report.figures import report

    for path in report(args.directories, args.out):
        print(path)
    return 0


def run_list(args: argparse.Namespace) -> int:
    from fedjax_sim.cli.catalog import catalog

    names = ["methods", "datasets", "models", "partitions", "protocols", "losses", "agents", "evaluations"]
    if args.what not in (*names, "all"):
        raise unknown("list", args.what, names)
    for name in names if args.what == "all" else [args.what]:
        print(f"{name}:")
        table = catalog(name)
        width = max(map(len, table), default=0)
        for key, text in table.items():
            print(f"  {key:{width}s}  {text}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; a mistake of the user is one sentence on stderr and exit code 2."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        args = make_parser().parse_args(argv)
        commands = {
            "run": run_one,
            "compare": run_compare,
            "resume": run_resume,
            "profile": run_profile,
            "report": run_report,
            "list": run_list,
        }
        return commands[args.command](args)
    except UserError as problem:
        print(f"fedjax-sim: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
