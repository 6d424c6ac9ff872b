"""The commands and their options. Defaults come from `Config`, lists of names from the registries;
nothing heavy here."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable
from typing import Any

from fedjax_sim import __version__, options
from fedjax_sim.cli import registries
from fedjax_sim.errors import UserError
from fedjax_sim.runner.config import BACKENDS, FULL, Config

DEFAULT = Config()
TRAINING = 600  # rounds
EXAMPLES = """examples:
  fedjax-sim run fedavg                        the embedded job: real digits
  fedjax-sim run fedprox --set fedprox.mu=0.1 --rounds 50 --out runs/prox
  fedjax-sim run fedavg --dataset fashion_mnist --data-dir DATA \\
        --partition dirichlet:0.1 --clients 100 --participation 0.1 \\
        --epochs 5 --batch-size 64 --lr 0.01 --rounds 105
  fedjax-sim run --preset fedpolicy-fmnist --data-dir DATA --seeds 3
  fedjax-sim compare fedavg ditto scaffold     same data, weights and cohorts
  fedjax-sim sweep grid.toml --workers 2       methods x settings x seeds
  fedjax-sim resume runs/prox --rounds 100     continue, or extend
  fedjax-sim report runs/prox runs/other --out figures
  fedjax-sim list methods"""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence and exit code 2."""

    def error(self, message: str) -> Any:
        raise UserError(f"{options.shown(message, 400)} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():
            if re.fullmatch(r"--[\w-]+=--", word):  # argparse would take the value away
                raise UserError(f"{word[:-3]} '--' is not a value (see {self.prog} --help)")
        told, rest = self.parse_known_args(args, namespace)
        if rest:
            command = f"{self.prog} {getattr(told, 'command', '')}".strip()
            word = rest[0].partition("=")[0]
            close = difflib.get_close_matches(word, self.flags(getattr(told, "command", "")), 1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise UserError(
                f"'{options.shown(word)}' is not an option of {command}{hint}; see {command} --help"
            )
        return told

    def flags(self, command: str) -> list[str]:
        """The options of one of its commands."""
        inner = [
            a.choices[command]
            for a in self._actions
            if isinstance(a.choices, dict) and command in a.choices
        ]
        return list(inner[0]._option_string_actions) if inner else list(self._option_string_actions)


class Help(argparse.RawDescriptionHelpFormatter):
    """`{models}` in a help text becomes the names in that registry; looked up only when help is
    asked for."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(
            " ".join(text.split()), width, break_on_hyphens=False
        )  # names with a hyphen stay whole

    def _get_help_string(self, action: argparse.Action) -> str:
        return re.sub(
            r"\{(\w+)\}", lambda found: ", ".join(registries.names(found[1])), action.help or ""
        )


def read(converter: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter of `options` for argparse: its reason becomes the sentence."""

    def convert(text: str) -> Any:
        try:
            return converter(text)
        except ValueError as reason:
            raise argparse.ArgumentTypeError(f"'{options.shown(text)}' is {reason}") from None

    return convert


WHOLE, REAL = read(options.whole), read(options.real)
COUNT = read(options.at_most(2**31 - 1, options.whole))  # what is counted in 32 bits
POSITIVE = read(options.at_least(1, options.at_most(2**31 - 1, options.whole)))


BATCH = read(lambda text: text if text == FULL else options.at_most(2**31 - 1, options.whole)(text))
SEED = read(lambda text: text if text == "follow" else options.whole(text))


def _add(group: Any, name: str, kind: Any, text: str, metavar: str | None = None) -> None:
    """An option named and defaulted by a field of Config."""
    default, flag = getattr(DEFAULT, name), f"--{name.replace('_', '-')}"
    if kind is bool:
        group.add_argument(flag, action="store_true", help=text)
        return
    shown = (
        ""
        if default in (None, "", 0) and kind not in (WHOLE, COUNT, SEED)
        else f" (default: {default})"
    )
    if default is None:
        shown = ""
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)


# of a run with its rounds and its directory; what measures one round has no use for them, so it
# does not take them
OF_A_RUN = {"seeds": 1, "seeds_mode": "loop"} | {
    name: getattr(DEFAULT, name)
    for name in ("eval_every", "personal_every", "checkpoint_every", "keep")
}


def add_options(parser: argparse.ArgumentParser, whole_run: bool = True) -> None:
    """Every option of a run; without those `OF_A_RUN`, and progress, for a command that runs no
    rounds."""
    add_data(parser.add_argument_group("data"))
    add_model(parser.add_argument_group("model"))
    add_training(training := parser.add_argument_group("training"))
    add_evaluation(evaluation := parser.add_argument_group("evaluation"))
    add_computation(computation := parser.add_argument_group("computation"))
    if whole_run:
        add_seeds(training)
        add_cadence(evaluation)
        add_saving(computation)
    else:
        parser.set_defaults(**OF_A_RUN)


def add_data(data: Any) -> None:
    _add(
        data,
        "dataset",
        str,
        "{datasets}, or a .npz or .csv file; some take options: NAME:key=value,"
        " FILE.csv:label=L,client=C,features=A+B",
        "D",
    )
    _add(data, "partition", str, "{partitions}; with options as in dirichlet:0.1 or shards:2", "P")
    _add(data, "protocol", str, "train/val/test protocol: {protocols}", "S")
    _add(data, "task", str, "{tasks}, or auto: what the data look like")
    _add(data, "norm", str, "normalisation: dataset, pfllib (0.5, 0.5) or none")
    _add(
        data,
        "clients",
        WHOLE,
        "number of clients N (default: 20, or the values of a client column)",
        "N",
    )
    _add(
        data,
        "unseen",
        REAL,
        "clients kept out of training but evaluated: a fraction, or a number from 1 up",
        "U",
    )
    _add(
        data,
        "data_seed",
        SEED,
        "seed of the partition and splits, or 'follow': the same as --seed",
        "s",
    )
    text = "examples the server holds back for validation (default: 1000, or 10 %% of a small set)"
    _add(data, "server_val", WHOLE, text, "n")
    _add(
        data,
        "val_fraction",
        REAL,
        "share of a client's data kept for validation (default: the protocol's)",
        "f",
    )
    _add(
        data,
        "data_dir",
        str,
        "folder with NAME.npz files; also the environment variable FEDJAX_SIM_DATA",
        "DIR",
    )
    _add(data, "download", bool, "fetch a missing dataset through tensorflow-datasets")


def add_model(model: Any) -> None:
    _add(model, "model", str, "{models}", "M")
    _add(model, "conv", str, "how convolutions are computed (equal values): {convolutions}")
    _add(
        model,
        "init",
        str,
        "initial weights from a .npz or .msgpack file, such as export writes",
        "FILE",
    )
    text = "parts of another run's state to start with, e.g. runs/first:agent,server"
    _add(model, "start_from", str, text, "RUN:PART,PART")
    _add(
        model,
        "bn_stats",
        str,
        "BatchNorm running statistics: average (on the server) or local (stay on the client)",
    )


def add_training(train: Any) -> None:
    _add(
        train,
        "participation",
        str,
        "per round: a fraction 0.1, a number of clients 10, a range 0.5:1 or 5:20, or n of N as"
        " 10/50",
        "r",
    )
    _add(train, "rounds", COUNT, "rounds T", "T")
    _add(train, "epochs", REAL, "local epochs E; fractions are counted in steps", "E")
    _add(
        train, "batch_size", BATCH, "batch size B, or full: a client's whole data in one batch", "B"
    )
    _add(
        train,
        "shuffle",
        str,
        "on, or off: minibatches in the order of a client's rows, in every epoch",
    )
    _add(train, "lr", REAL, "local learning rate", "η")
    text = (
        "learning rate over rounds: {schedules}; with options as in step:every=30,gamma=0.1 or"
        " cosine:end=0"
    )
    _add(train, "schedule", str, text)
    text = (
        "local optimiser: {optimizers}; its numbers behind its name, as in"
        " adamw:lr=1e-3,weight_decay=0.01"
    )
    _add(train, "optimizer", str, text, "NAME[:OPTION=VALUE,…]")
    text = (
        "the optimiser's state: begins anew in every round, or stays with the client: round, client"
    )
    _add(train, "optimizer_state", str, text)
    _add(
        train,
        "clip_norm",
        REAL,
        "gradients no longer than this, in every step (0: as they are)",
        "c",
    )
    text = (
        "learning rate within a round: {local_schedules}; with options as in linear:end=0.1 or"
        " warmup:steps=10"
    )
    _add(train, "local_schedule", str, text)
    _add(train, "momentum", REAL, "SGD momentum", "m")
    _add(train, "weight_decay", REAL, "SGD's coupled weight decay, as PyTorch has it", "w")
    _add(train, "decay_groups", str, "parameter groups that decay: all, or names joined by +")
    _add(train, "loss", str, "local loss: {losses}; auto: the method's own", "L")
    _add(train, "dropout", REAL, "chance that a participant fails to report", "p")
    _add(
        train,
        "stragglers",
        str,
        "p or p:least: chance of being slow, and the least share of the work done",
        "p",
    )
    _add(train, "seed", WHOLE, "seed of weights, cohorts and shuffles", "s")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME.OPTION=VALUE",
        dest="sets",
        help=(
            "option of a method, of its agent ({agents}), of the model, or of the loss, e.g."
            " fedavg.weights=uniform, fedpolicy.agent.lr=0.01, model.stem=cifar, loss.gamma=1; may"
            " be repeated"
        ),
    )
    train.add_argument(
        "--transform",
        action="append",
        default=[],
        metavar="NAME[:VALUE,…]",
        dest="transforms",
        help=(
            "a transform around the method: {transforms}, e.g. clip:1.0 or"
            " server_optimizer:rule=adam,lr=0.01; may be repeated, the first one nearest to the"
            " method"
        ),
    )


def add_seeds(train: Any) -> None:
    train.add_argument(
        "--seeds",
        type=COUNT,
        default=1,
        metavar="K",
        help="K runs with seeds s, s+1, …; one compilation",
    )
    train.add_argument(
        "--seeds-mode",
        choices=("loop", "vmap"),
        default="loop",
        help="one seed after another (default), or side by side in one program",
    )


def add_evaluation(score: Any) -> None:
    score.add_argument(
        "--evaluate",
        default=",".join(DEFAULT.evaluations),
        metavar="MODES",
        dest="evaluations",
        help=f"comma list of {{evaluations}} (default: {','.join(DEFAULT.evaluations)})",
    )
    score.add_argument(
        "--metrics",
        default="",
        metavar="NAMES",
        help="comma list of {metrics}, beside accuracy, loss and worst_decile",
    )
    _add(score, "probe", bool, "record participants' accuracy before and after local training")


def add_cadence(score: Any) -> None:
    _add(score, "eval_every", COUNT, "evaluate every k rounds", "k")
    text = "methods that fine-tune at evaluation do so every k rounds (0: at the end only)"
    _add(score, "personal_every", COUNT, text, "k")


def add_computation(how: Any) -> None:
    _add(how, "dtype", str, "float32 or float64")
    _add(
        how,
        "precision",
        str,
        "float32 products on accelerators: default (one bfloat16 pass on TPU, TF32 on NVIDIA),"
        " high, highest",
    )
    text = (
        "between layers: auto (as --dtype), float32, or bfloat16, where weights, their gradients"
        " and sums stay float32"
    )
    _add(how, "activations", str, text)
    _add(how, "chunk", str, "clients side by side on one device: auto, or a number", "n")
    _add(
        how,
        "devices",
        str,
        "devices to share the cohort: auto (one per core on a CPU), or a number",
        "n",
    )
    _add(
        how,
        "backend",
        str,
        f"{', '.join(BACKENDS)}; loop is for debugging and names the failing client",
    )
    _add(
        how,
        "state_on",
        str,
        "clients' stored rows: device, or host (only the cohort's travel to the device)",
    )
    add_processes(how)
    how.add_argument(
        "--dry-run", action="store_true", help="print sizes, bytes, memory and steps, and stop"
    )
    text = (
        "with --dry-run: whether it fits this device, which need not be there: {accelerators}, or a"
        " mesh such as v5e:2x4"
    )
    how.add_argument("--device", default="", metavar="D", help=text)


def add_saving(how: Any) -> None:
    _add(how, "checkpoint_every", COUNT, "rounds between checkpoints (0: about once a minute)", "k")
    _add(how, "keep", COUNT, "checkpoints kept", "k")
    how.add_argument(
        "--out", default=None, metavar="DIR", help="run directory (default: a new one under runs/)"
    )
    how.add_argument("--quiet", action="store_true", help="no progress")


def add_speech(how: Any) -> None:
    text = "progress and results as JSON lines on the standard output, nothing else there"
    how.add_argument("--json", action="store_true", help=text)
    text = "where else the numbers go, comma list of {logs}; CSV files are always written"
    how.add_argument("--log", default="", metavar="NAMES", help=text)


def add_import(parser: Any) -> None:
    text = "a file of yours that registers methods, models, agents or datasets; may be repeated"
    parser.add_argument(
        "--import", action="append", default=[], dest="imports", metavar="FILE.py", help=text
    )


def add_processes(how: Any) -> None:
    how.add_argument(
        "--coordinator",
        default=None,
        metavar="HOST:PORT",
        help="several processes: address of process 0 (under SLURM or on TPU pods: 'auto')",
    )
    how.add_argument(
        "--num-processes", type=COUNT, default=None, metavar="P", help="several processes: how many"
    )
    how.add_argument(
        "--process-id",
        type=COUNT,
        default=None,
        metavar="i",
        help="several processes: which one this is",
    )


def add_sweep(sweep: Any) -> None:
    sweep.add_argument(
        "file", metavar="FILE.toml", help="methods, seeds, [settings] and [grid]: see docs/sweep.md"
    )
    sweep.add_argument(
        "--out", default=None, metavar="DIR", help="folder of the sweep (default: runs/FILE)"
    )
    text = "runs at a time (default: one per accelerator, or one on all cores)"
    sweep.add_argument("--workers", type=COUNT, default=0, metavar="W", help=text)
    text = "who runs them: this machine, an array job of SLURM, or a Ray cluster (default: local)"
    sweep.add_argument("--launcher", choices=("local", "slurm", "ray"), default="local", help=text)
    text = "options for sbatch, e.g. --slurm '--partition=gpu -c 4'"
    sweep.add_argument("--slurm", default="", metavar="OPTIONS", help=text)
    text = (
        "print the results as a table of two settings, mean ± sd over seeds, e.g. method,partition"
    )
    sweep.add_argument("--pivot", default="", metavar="ROWS,COLUMNS", help=text)
    text = (
        "which figure --pivot shows, e.g. best:global_acc, last:client_pooled,"
        " rounds_to:50:global_acc (docs/papers.md)"
    )
    sweep.add_argument("--read", default="", metavar="READING", help=text)
    sweep.add_argument(
        "--gather", action="store_true", help="start nothing: results of what has ended so far"
    )
    sweep.add_argument(
        "--task",
        type=COUNT,
        default=None,
        metavar="i",
        help="run only run number i, in this process",
    )
    sweep.add_argument("--dry-run", action="store_true", help="list the runs and stop")
    sweep.add_argument("--quiet", action="store_true", help="no table of progress")
    add_speech(sweep)


def add_paper(paper: Any) -> None:
    kinds = paper.add_subparsers(
        dest="what", required=True, metavar="list|run|show", parser_class=Parser
    )
    add = lambda name, text: kinds.add_parser(name, help=text, formatter_class=Help)
    listing = add("list", "papers and their tables; of a table its rows and columns")
    listing.add_argument("tables", metavar="PAPER[:TABLE]", nargs="*")
    for one in (
        add("run", "run what is missing of a table, and show it"),
        add("show", "what there is of a table"),
    ):
        one.add_argument(
            "tables",
            metavar="PAPER:TABLE",
            nargs="+",
            help="as in fedpolicy:T5; see fedjax-sim paper list",
        )
        text = (
            "smoke (seconds a cell, embedded data), small (minutes), or paper: as published"
            " (default: paper)"
        )
        one.add_argument("--scale", default="paper", metavar="S", help=text)
        text = "comma list of rows (default: those that were published; all: also the extra ones)"
        one.add_argument("--rows", default="", metavar="NAMES", help=text)
        one.add_argument(
            "--cols", default="", metavar="NAMES", help="comma list of columns, likewise"
        )
        one.add_argument(
            "--seeds",
            type=POSITIVE,
            default=None,
            metavar="K",
            help="seeds 0 … K-1 (default: as the table says)",
        )
        text = "a setting of all runs, e.g. model=lenet5 or fedprox.mu=0.1; may be repeated"
        one.add_argument(
            "--set", action="append", default=[], dest="sets", metavar="NAME=VALUE", help=text
        )
        one.add_argument(
            "--rounds", type=COUNT, default=None, metavar="T", help="rounds of the cells' runs"
        )
        one.add_argument(
            "--out",
            default=None,
            metavar="DIR",
            help="where the papers' folders are (default: runs/papers)",
        )
        one.add_argument(
            "--client",
            type=COUNT,
            default=None,
            metavar="k",
            help="whose picture, where it is of one client",
        )
        text = "folder with NAME.npz files; also the environment variable FEDJAX_SIM_DATA"
        one.add_argument("--data-dir", default=None, metavar="DIR", help=text)
        one.add_argument("--devices", default=None, metavar="n", help="devices to share the cohort")
        one.add_argument(
            "--chunk", default=None, metavar="n", help="clients side by side on one device"
        )
        one.add_argument("--dry-run", action="store_true", help="list the runs and stop")
        one.add_argument("--quiet", action="store_true", help="no progress")
        add_speech(one)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fedjax-sim",
        formatter_class=Help,
        epilog=EXAMPLES,
        description="Federated learning, one XLA program per round.",
    )
    parser.add_argument("--version", action="version", version=f"fedjax-sim {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    add = lambda name, text, **more: commands.add_parser(
        name, help=text, formatter_class=Help, **more
    )
    run = add("run", "run one method", epilog=EXAMPLES)
    run.add_argument("method", metavar="METHOD", nargs="?", help="{methods}")
    text = (
        "values of one real setting side by side in one program, a run directory each, e.g."
        " lr=0.01,0.03,0.1"
    )
    run.add_argument("--vmap", default="", metavar="NAME=V,V,…", help=text)
    compare = add("compare", "run several methods on the same draws", epilog=EXAMPLES)
    text = "{methods}; with options of its own as in fedprox:mu=0.1,lr=0.05"
    compare.add_argument("methods", metavar="METHOD[:OPTION=VALUE,…]", nargs="+", help=text)
    profile = add("profile", "seconds and bytes of each part of a round")
    profile.add_argument("method", metavar="METHOD", nargs="?", help="{methods}")
    train = add(
        "train", "train a method's agent for later runs, which take it over with --start-from"
    )
    train.add_argument("method", metavar="METHOD", nargs="?", help="a method that an agent steers")
    text = (
        "train one policy across federations drawn at random, by an evolution strategy, e.g."
        " 'dirichlet:0.03..1, clients:20..60, participation:0.1..0.3, data:mnist|digits'"
    )
    train.add_argument("--over", default="", metavar="NAME:A..B,…", help=text)
    text = "also write profile.json there; report draws it (default: only print)"
    profile.add_argument("--out", default=None, metavar="DIR", help=text)
    for sub in (run, compare, profile, train):
        add_options(sub, whole_run=sub is not profile)
        text = "settings of a published experiment, each of which may be given as well: {presets}"
        sub.add_argument("--preset", default=None, metavar="NAME", help=text)
    for sub in (run, compare, train):
        add_speech(sub)
    for sub in (run, train):
        text = (
            "also draw who has how many examples of which class, as .png, .pdf or .svg (see also"
            " --dry-run)"
        )
        sub.add_argument("--labels", default=None, metavar="FILE", help=text)
    train.set_defaults(rounds=TRAINING, vmap="")
    sweep = add("sweep", "run a grid of settings; the same command again goes on")
    add_sweep(sweep)
    add_paper(
        add("paper", "published tables and figures, ours beside theirs: paper list | run | show")
    )
    resume = add("resume", "continue a run directory")
    resume.add_argument("directory", metavar="DIR")
    resume.add_argument(
        "--rounds", type=COUNT, default=None, metavar="T", help="new total, to extend the run"
    )
    resume.add_argument(
        "--data-dir", default=None, metavar="DIR", help="where the dataset is now, if it moved"
    )
    add_processes(resume)
    resume.add_argument("--quiet", action="store_true", help="no progress")
    add_speech(resume)
    report = add("report", "figures (PNG, PDF) and one page (report.html) from run directories")
    report.add_argument(
        "directories",
        metavar="DIR",
        nargs="+",
        help="run directories, or folders of compare and sweep",
    )
    report.add_argument(
        "--out",
        default=None,
        metavar="DIR",
        help="where the figures go (default: the first directory)",
    )
    report.add_argument(
        "--no-titles", action="store_true", help="no titles above the panels, for papers"
    )
    export = add("export", "a run's model as a file, with an example that loads it")
    export.add_argument("directory", metavar="RUN")
    text = "what client k predicts with (default: the global model)"
    export.add_argument("--client", type=COUNT, default=None, metavar="k", help=text)
    text = "a .npz or .msgpack file (default: global.npz or client-k.npz in RUN)"
    export.add_argument("--out", default=None, metavar="FILE", help=text)
    export.add_argument(
        "--data-dir", default=None, metavar="DIR", help="where the dataset is now, if it moved"
    )
    listing = add("list", "what there is, by name")
    listing.add_argument(
        "what", nargs="?", default="all", metavar="WHAT", help=", ".join(registries.LISTED)
    )
    for sub in (run, compare, profile, train, sweep, resume, export, listing):
        add_import(sub)
    return parser
