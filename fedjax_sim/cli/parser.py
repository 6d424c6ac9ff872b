"""The parser of the command line. Settings of a run come from their declarations in `experiment`,
lists of names from the registries; it imports nothing heavy."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from fedjax_sim import __version__, options
from fedjax_sim.cli import registries
from fedjax_sim.errors import UserError
from fedjax_sim.experiment.settings import PARTS, Setting, declared

Options = argparse._ActionsContainer  # a parser, or a group of its options
EXAMPLES = """examples:
  fedjax-sim run fedavg                        the embedded data: real digits
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
    """argparse with one-sentence errors, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{options.shown(message, 400)} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        for argument in args or ():
            if re.fullmatch(r"--[\w-]+=--", argument):  # argparse would drop the value
                raise UserError(f"{argument[:-3]} '--' is not a value (see {self.prog} --help)")
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            command = f"{self.prog} {getattr(found, 'command', '')}".strip()
            flag = rest[0].partition("=")[0]
            close = difflib.get_close_matches(flag, self.flags(getattr(found, "command", "")), 1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise UserError(
                f"'{options.shown(flag)}' is not an option of {command}{hint}; see {command} --help"
            )
        return found

    def flags(self, command: str) -> list[str]:
        """The options of a command."""
        inner = [
            a.choices[command]
            for a in self._actions
            if isinstance(a.choices, dict) and command in a.choices
        ]
        return list(inner[0]._option_string_actions) if inner else list(self._option_string_actions)


class Help(argparse.RawDescriptionHelpFormatter):
    """Replaces `{models}` in a help text by the names in that registry, only when help is shown."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        # names with a hyphen stay whole
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        return re.sub(
            r"\{(\w+)\}", lambda found: ", ".join(registries.names(found[1])), action.help or ""
        )


def read(converter: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter of `options` for argparse, with its error message."""

    def convert(text: str) -> Any:
        try:
            return converter(text)
        except ValueError as reason:
            raise argparse.ArgumentTypeError(f"'{options.shown(text)}' is {reason}") from None

    return convert


COUNT = read(options.at_most(2**31 - 1, options.whole))  # fits 32 bits
POSITIVE = read(options.at_least(1, options.at_most(2**31 - 1, options.whole)))
# settings that need rounds and a run directory; `profile` has neither
OF_A_RUN = ("eval_every", "personal_every", "checkpoint_every", "keep")


def text(group: Options, flag: str, metavar: str, help: str, default: str | None = None) -> None:
    group.add_argument(flag, metavar=metavar, default=default, help=help)


def count(group: Options, flag: str, metavar: str, help: str, default: int | None = None) -> None:
    group.add_argument(flag, metavar=metavar, default=default, type=COUNT, help=help)


def switch(group: Options, flag: str, help: str) -> None:
    group.add_argument(flag, action="store_true", help=help)


def several(group: Options, flag: str, metavar: str, help: str, dest: str) -> None:
    group.add_argument(flag, action="append", default=[], metavar=metavar, dest=dest, help=help)


def subcommands(
    parser: argparse.ArgumentParser, dest: str, metavar: str
) -> Callable[..., argparse.ArgumentParser]:
    kinds = parser.add_subparsers(dest=dest, required=True, metavar=metavar, parser_class=Parser)
    return lambda name, help, epilog=None: kinds.add_parser(
        name, help=help, formatter_class=Help, epilog=epilog
    )


# ---- settings of a run ---------------------------------------------------------------------------
def add_settings(parser: argparse.ArgumentParser, whole_run: bool) -> dict[str, Options]:
    """Add every declared setting of a run, in a group per part; `OF_A_RUN` only for a whole run.

    Options that are not given are absent after parsing. The experiment converts text to values.
    """
    groups: dict[str, Options] = {}
    for part, kind in PARTS.items():
        groups[part] = parser.add_argument_group("computation" if part == "compute" else part)
        for key, one, _, default in declared(kind):
            if one.flag == "" or (key in OF_A_RUN and not whole_run):
                continue
            flag = f"--{(one.flag or key).replace('_', '-')}"
            more: dict[str, Any] = dict(dest=key, default=argparse.SUPPRESS)
            if isinstance(default, bool) and one.kind.text(default) is default:
                groups[part].add_argument(flag, action="store_true", help=one.help, **more)
                continue
            more |= dict(action="append") if one.flag == "transform" else {}
            usual = default_text(one, default)
            groups[part].add_argument(flag, metavar=one.metavar, help=one.help + usual, **more)
    help = (
        "option of a method, of its agent ({agents}), of the model, or of the loss, e.g."
        " fedavg.weights=uniform, fedpolicy.agent.lr=0.01, model.stem=cifar, loss.gamma=1; may be"
        " repeated"
    )
    several(groups["method"], "--set", "NAME.OPTION=VALUE", help, "sets")
    help = "settings of a published experiment, which other options override: {presets}"
    text(parser, "--preset", "NAME", help)
    return groups


def default_text(one: Setting, default: Any) -> str:
    value = one.otherwise if default is None else default
    if value is None or (value in ((), 0.0) and not isinstance(value, int)):
        return ""
    shown = one.kind.text(value)
    return f" (default: {','.join(shown) if isinstance(shown, list) else shown})"


def add_run(parser: argparse.ArgumentParser, whole_run: bool) -> None:
    """The options of a command that runs one or several experiments."""
    groups = add_settings(parser, whole_run)
    group = groups["compute"]
    if whole_run:
        seeds = groups["training"]
        count(seeds, "--seeds", "K", "K runs with seeds s, s+1, …; one compilation", 1)
        help = "one seed after another (default), or side by side in one program"
        seeds.add_argument("--seeds-mode", choices=("loop", "vmap"), default="loop", help=help)
        text(group, "--out", "DIR", "run directory (default: a new one under runs/)")
        switch(group, "--quiet", "no progress")
        add_output(parser)
    else:
        help = "also write profile.json there; report draws it (default: only print)"
        text(group, "--out", "DIR", help)
    add_processes(group)
    switch(group, "--dry-run", "print sizes, bytes, memory and steps, and stop")
    help = (
        "with --dry-run: whether it fits this device, which this machine need not have:"
        " {accelerators}, or a mesh such as v5e:2x4"
    )
    text(group, "--device", "D", help, "")


def add_output(group: Options) -> None:
    help = "progress and results as JSON lines on the standard output, and nothing else there"
    switch(group, "--json", help)
    help = "also log the numbers to a comma list of {logs}; CSV files are always written"
    text(group, "--log", "NAMES", help, "")


def add_processes(group: Options) -> None:
    help = "several processes: address of process 0 (under SLURM or on TPU pods: 'auto')"
    text(group, "--coordinator", "HOST:PORT", help)
    count(group, "--num-processes", "P", "several processes: their number")
    count(group, "--process-id", "i", "several processes: the number of this one")


# ---- commands ------------------------------------------------------------------------------------
def add_sweep(sweep: argparse.ArgumentParser) -> None:
    help = "methods, seeds, [settings] and [grid]: see docs/sweep.md"
    sweep.add_argument("file", metavar="FILE.toml", help=help)
    text(sweep, "--out", "DIR", "folder of the sweep (default: runs/FILE)")
    help = "runs at a time (default: one per accelerator, or one on all cores)"
    count(sweep, "--workers", "W", help, 0)
    help = "where they run: this machine, a SLURM array job, or a Ray cluster (default: local)"
    sweep.add_argument("--launcher", choices=("local", "slurm", "ray"), default="local", help=help)
    text(sweep, "--slurm", "OPTIONS", "options for sbatch, e.g. --slurm '--partition=gpu -c 4'", "")
    help = (
        "print the results as a table of two settings, mean ± sd over seeds, e.g. method,partition"
    )
    text(sweep, "--pivot", "ROWS,COLUMNS", help, "")
    help = (
        "which figure --pivot shows, e.g. best:global_acc, last:client_pooled,"
        " rounds_to:50:global_acc (docs/papers.md)"
    )
    text(sweep, "--read", "READING", help, "")
    switch(sweep, "--gather", "start no runs: collect the results of those that have ended")
    count(sweep, "--task", "i", "run only run number i, in this process")
    switch(sweep, "--dry-run", "list the runs and stop")
    switch(sweep, "--quiet", "no progress table")
    add_output(sweep)


def add_paper(paper: argparse.ArgumentParser) -> None:
    add = subcommands(paper, "what", "list|run|show")
    listing = add("list", "papers and their tables, or the rows and columns of a table")
    listing.add_argument("tables", metavar="PAPER[:TABLE]", nargs="*")
    for one in (
        add("run", "run the missing cells of a table, and show it"),
        add("show", "show the finished cells of a table"),
    ):
        help = "as in fedpolicy:T5; see fedjax-sim paper list"
        one.add_argument("tables", metavar="PAPER:TABLE", nargs="+", help=help)
        help = (
            "smoke (seconds a cell, embedded data), small (minutes), or paper: as published"
            " (default: paper)"
        )
        text(one, "--scale", "S", help, "paper")
        help = "comma list of rows (default: the published ones; all: also the extra ones)"
        text(one, "--rows", "NAMES", help, "")
        text(one, "--cols", "NAMES", "comma list of columns, likewise", "")
        help = "seeds 0 … K-1 (default: as the table says)"
        one.add_argument("--seeds", type=POSITIVE, default=None, metavar="K", help=help)
        help = "a setting of all runs, e.g. model=lenet5 or fedprox.mu=0.1; may be repeated"
        several(one, "--set", "NAME=VALUE", help, "sets")
        count(one, "--rounds", "T", "rounds of the cells' runs")
        text(one, "--out", "DIR", "folder with a folder per paper (default: runs/papers)")
        count(one, "--client", "k", "the client, for figures of one client")
        help = "folder with NAME.npz files; also the environment variable FEDJAX_SIM_DATA"
        text(one, "--data-dir", "DIR", help)
        text(one, "--devices", "n", "devices to share the cohort")
        text(one, "--chunk", "n", "clients side by side on one device")
        switch(one, "--dry-run", "list the runs and stop")
        switch(one, "--quiet", "no progress")
        add_output(one)


def add_files(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands about run directories: resume, report, export."""
    moved = "folder of the dataset, if it has moved"
    resume = add("resume", "continue a run directory")
    resume.add_argument("directory", metavar="DIR")
    count(resume, "--rounds", "T", "new total number of rounds, to extend the run")
    text(resume, "--data-dir", "DIR", moved)
    add_processes(resume)
    switch(resume, "--quiet", "no progress")
    add_output(resume)
    report = add("report", "figures (PNG, PDF) and one page (report.html) from run directories")
    help = "run directories, or folders of compare and sweep"
    report.add_argument("directories", metavar="DIR", nargs="+", help=help)
    text(report, "--out", "DIR", "folder for the figures (default: the first directory)")
    switch(report, "--no-titles", "no titles above the panels, for papers")
    export = add("export", "a run's model as a file, with an example that loads it")
    export.add_argument("directory", metavar="RUN")
    help = "export the model of client k (default: the global model)"
    count(export, "--client", "k", help)
    help = "a .npz or .msgpack file (default: global.npz or client-k.npz in RUN)"
    text(export, "--out", "FILE", help)
    text(export, "--data-dir", "DIR", moved)
    for one in (resume, export):
        add_import(one)


def add_import(parser: argparse.ArgumentParser) -> None:
    help = "a Python file that registers methods, models, agents or datasets; may be repeated"
    several(parser, "--import", "FILE.py", help, "imports")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fedjax-sim",
        formatter_class=Help,
        epilog=EXAMPLES,
        description="Federated learning, one XLA program per round.",
    )
    parser.add_argument("--version", action="version", version=f"fedjax-sim {__version__}")
    add = subcommands(parser, "command", "COMMAND")
    run = add("run", "run one method", epilog=EXAMPLES)
    compare = add("compare", "run several methods on the same draws", epilog=EXAMPLES)
    profile = add("profile", "seconds and bytes of each stage of a round")
    help = "train a method's agent for later runs, which start from it with --start-from"
    train = add("train", help)
    sweep = add("sweep", "run a grid of settings; the same command resumes it")
    help = "published tables and figures beside our results: paper list | run | show"
    paper = add("paper", help)
    add_files(add)
    listing = add("list", "list methods, datasets, models and so on by name")
    for one in (run, profile, train):
        help = "a method with an agent" if one is train else "{methods}"
        one.add_argument("method", metavar="METHOD", nargs="?", help=help)
    help = "{methods}; with its own options as in fedprox:mu=0.1,lr=0.05"
    compare.add_argument("methods", metavar="METHOD[:OPTION=VALUE,…]", nargs="+", help=help)
    help = (
        "values of one real setting side by side in one program, a run directory each, e.g."
        " lr=0.01,0.03,0.1"
    )
    text(run, "--vmap", "NAME=V,V,…", help, "")
    help = (
        "train one policy across federations drawn at random, by an evolution strategy, e.g."
        " 'dirichlet:0.03..1, clients:20..60, participation:0.1..0.3, data:mnist|digits'"
    )
    text(train, "--over", "NAME:A..B,…", help, "")
    for one in (run, compare, profile, train):
        add_run(one, whole_run=one is not profile)
    for one in (run, train):
        help = (
            "also draw the number of examples of each class per client, as .png, .pdf or .svg (see"
            " also --dry-run)"
        )
        text(one, "--labels", "FILE", help)
    add_sweep(sweep)
    add_paper(paper)
    help = ", ".join(registries.LISTED)
    listing.add_argument("what", nargs="?", default="all", metavar="WHAT", help=help)
    for one in (run, compare, profile, train, sweep, listing):
        add_import(one)
    return parser
