"""What one calls from Python, and what the command line calls."""

from __future__ import annotations

import dataclasses
import html
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.experiment import Experiment
from fedjax_sim.experiment.given import OF_THE_COMMAND, experiment_of, layered, read_entry
from fedjax_sim.experiment.imports import load_file
from fedjax_sim.experiment.settings import FOLLOW, NEVER, Data
from fedjax_sim.experiment.tree import SETTINGS
from fedjax_sim.hooks import Method
from fedjax_sim.options import names, shown
from fedjax_sim.report import comparison, text
from fedjax_sim.report.notebook import Picture, Rows, as_html, picture
from fedjax_sim.report.runs import write_order
from fedjax_sim.report.tables import figures_of
from fedjax_sim.runner import execute, many, run_directory
from fedjax_sim.runner import result as results
from fedjax_sim.runner.compilation import first_process
from fedjax_sim.runner.files import exists
from fedjax_sim.runner.many import Federations, ready
from fedjax_sim.runner.prepare import Objects, Setup
from fedjax_sim.runner.result import Step, steps_of
from fedjax_sim.runner.run_directory import RunDirectory
from fedjax_sim.runner.sinks import SINKS, Callback, Segment, Sink, named

if TYPE_CHECKING:
    from fedjax_sim.data.federation import Federation
    from fedjax_sim.types import Tree

OF_DATA = [field.name for field in dataclasses.fields(Data) if "seed" not in field.name]
OF_DATA.remove("unseen")


class Result(results.Result):
    """The results of a run: evaluated rows, rows of all rounds, counts per client, the summary, the
    final State."""

    def table(self, which: str = "metrics") -> Rows:
        """Rows as in metrics.csv (evaluated rounds) or in rounds.csv ("rounds"): a list
        that shows as a table."""
        return Rows(lookup("table", which, {"metrics": self.rows, "rounds": self.rounds}))

    def to_pandas(self, which: str = "metrics") -> Any:
        """The same as a pandas.DataFrame."""
        return self.table(which).to_pandas()

    def plot(self, path: str | pathlib.Path | None = None, against: str = "rounds") -> Picture:
        """Accuracy against rounds or bytes: a picture that a notebook shows; path: also written, as
        PNG and PDF."""
        return picture([self], path, against)


def shown_result(found: results.Result) -> Result:
    return Result(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)})


# ---- one run -------------------------------------------------------------------------------------
def asked(
    method: str | Method, settings: Mapping[str, Any], others: Sequence[str] = (), **objects: Any
) -> tuple[Experiment, Objects]:
    """Keywords of `run` as an experiment, and the objects among them. others: methods whose options
    may stand there too."""
    if not isinstance(method, str | Method):
        raise UserError(
            "method is a name or a Method, such as fedjax_sim.FedProx(mu=0.1), not"
            f" {shown(repr(method))}"
        )
    chosen = dict(settings)
    for name in ("model", "optimizer", "loss"):
        if isinstance(objects.get(name), str):
            chosen[name] = objects.pop(name)
    given = Objects(method=method if isinstance(method, Method) else None, **objects)
    beside = [name for name in OF_DATA if chosen.get(name) is not None]
    if given.fed is not None and beside:
        raise UserError(
            f"{beside[0]}={chosen[beside[0]]!r} says which data to load, but fed= gives them; leave"
            " one out"
        )
    options = "model_options" in chosen or any(name.startswith("model.") for name in chosen)
    if given.model is not None and options:
        raise UserError(
            "model_options belong to a model given by name, but model= is an object; leave one out"
        )
    return experiment_of(method, chosen, others), given


def set_up(
    method: str | Method = "fedavg",
    fed: Federation | None = None,
    *,
    model: Any = None,
    net: Tree | None = None,
    optimizer: Any = None,
    loss: Any = None,
    **settings: Any,
) -> Setup:
    """A run as `run` takes it, prepared."""
    objects = dict(fed=fed, model=model, net=net, optimizer=optimizer, loss=loss)
    return ready(*asked(method, settings, **objects))


def sinks_of(
    callback: Callable[[Segment], Any] | None, log: str | Sequence[str | Sink]
) -> list[Sink]:
    """A function and names or sinks as sinks."""
    items = names(log) if isinstance(log, str) else tuple(log)
    for item in items:
        if not isinstance(item, (str, Sink)):
            raise UserError(
                f"log takes names ({', '.join(SINKS)}) and objects of fedjax_sim.runner.sinks.Sink,"
                f" not {item!r}"
            )
    given = [item if isinstance(item, Sink) else named([item])[0] for item in items]
    return [*([Callback(callback)] if callback is not None else []), *given]


def run(
    method: str | Method = "fedavg",
    fed: Federation | None = None,
    *,
    out: str | pathlib.Path | None = None,
    progress: bool | None = None,
    callback: Callable[[Segment], Any] | None = None,
    log: str | Sequence[str | Sink] = (),
    model: Any = None,
    net: Tree | None = None,
    optimizer: Any = None,
    loss: Any = None,
    **settings: Any,
) -> Result:
    """Run one method and return its Result; the Python form of `fedjax-sim run`.

    settings: those of `Experiment` by their keywords, and options of the method by their names.
    method, model, optimizer, loss: names or objects of your own, such as optax.adamw(1e-3); fed:
    data of your own, instead of `dataset` and what belongs to it; net: initial weights; cohorts:
    the participants of every round, taken in turn, instead of drawn ones. progress: a bar or lines
    (default: a line only where compiling takes long). callback: called with every `Segment` (its
    rounds, its rows); log: where else the numbers go, names as in `--log` ("tensorboard,wandb") or
    sinks of your own.

    >>> # digits
    >>> result = run("fedavg", model="mlp", clients=4, participation=1, rounds=2, epochs=1)
    >>> [row["round"] for row in result.rows]
    [1, 2]
    >>> ask = dict(model="mlp", clients=4, cohorts=[[0, 1], [2, 3]], rounds=1)
    >>> run("fedprox", mu=0.1, **ask).setup.experiment.method.options
    {'mu': 0.1}
    """
    sinks = sinks_of(callback, log)
    objects = dict(model=model, net=net, optimizer=optimizer, loss=loss)
    setup = set_up(method, fed, **objects, **settings)
    directory = RunDirectory(pathlib.Path(out)) if out is not None else None
    return shown_result(execute.execute(setup, directory, progress=progress, sinks=sinks))


def resume(
    path: str | pathlib.Path,
    rounds: int | None = None,
    *,
    progress: bool | None = None,
    callback: Callable[[Segment], Any] | None = None,
    log: str | Sequence[str | Sink] = (),
    fed: Federation | None = None,
    method: Method | None = None,
    model: Any = None,
    optimizer: Any = None,
    loss: Any = None,
    data_dir: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Continue a run directory from its newest checkpoint, or from its start where it has none yet;
    `rounds` may extend it.

    fed, method, model, optimizer, loss: what was given as an object when the run was started; it
    must be the same. On fewer devices than before the run continues with other rounding. say: where
    remarks go (default: the standard error stream).
    """
    given = Objects(fed=fed, method=method, model=model, optimizer=optimizer, loss=loss)
    more: dict[str, Any] = dict(sinks=sinks_of(callback, log), data_dir=data_dir, say=say)
    return shown_result(execute.resume(path, rounds, given, progress=progress, **more))


def rounds(
    method: str | Method = "fedavg", fed: Federation | None = None, **settings: Any
) -> Iterator[Step]:
    """The rounds of a run one by one: `for step in fs.rounds("fedavg", fed, rounds=3):
    step.uploads`.

    The arguments are those of `run`, and so are the numbers; nothing is written or evaluated. All
    uploads of a round are in memory at once.

    >>> steps = list(rounds("fedavg", model="mlp", clients=4, participation=1, rounds=2, epochs=1))
    >>> [step.round for step in steps], steps[0].uploads["params"]["fc"]["bias"].shape
    ([1, 2], (4, 10))
    """
    setup = set_up(method, fed, **settings)  # mistakes are said here, not at the first step
    if setup.experiment.compute.state_on == "host":
        raise UserError(
            "rounds keeps all clients' rows on the device; state-on 'host' is not possible here,"
            " use device"
        )
    return steps_of(setup)


# ---- several methods -----------------------------------------------------------------------------
@dataclasses.dataclass(repr=False)
class Comparison:
    """Results of several methods on the same draws, seed by seed; entries: as each was named."""

    entries: list[str]
    results: list[Result]
    out: pathlib.Path | None = None

    def __repr__(self) -> str:
        lines = text.differing_lines(self.differs)
        return "\n".join([text.results_table(self.summaries), *lines])

    def _repr_html_(self) -> str:
        """The same in a notebook: a table, and below it what a reader must not miss."""
        summaries = self.summaries
        said = [*text.notes(summaries), *text.differing_lines(self.differs)]
        lines = [html.escape(line) for line in said]
        below = f"<p>{'<br>'.join(lines)}</p>" if lines else ""
        return as_html(text.results_cells(summaries)) + below

    @property
    def summaries(self) -> list[dict[str, Any]]:
        return [r.summary | {"method": e} for e, r in zip(self.entries, self.results, strict=True)]

    @property
    def differs(self) -> dict[str, dict[str, Any]]:
        """{setting: {entry: value}} of what the entries do not have in common, given or default."""
        return differing({e: r.setup for e, r in zip(self.entries, self.results, strict=True)})

    def table(self) -> Rows:
        """A row per entry and seed: every figure of its summary."""
        head = lambda entry, result: dict(method=entry, seed=result.summary["seed"])
        pairs = zip(self.entries, self.results, strict=True)
        return Rows(head(entry, result) | figures_of(result.summary) for entry, result in pairs)

    def to_pandas(self) -> Any:
        return self.table().to_pandas()

    def plot(self, path: str | pathlib.Path | None = None, against: str = "rounds") -> Picture:
        """All accuracies in one picture; see `Result.plot`."""
        return picture(self.results, path, against)


def differing(setups: Mapping[str, Setup]) -> dict[str, dict[str, Any]]:
    """{setting: {entry: value}} of what compared entries do not have in common, given or default:
    settings of the run, and the options of methods of one kind."""
    apart = ("method", "options", "seed", "data_seed", "schedule_rounds")  # named by the entry
    keys = [k for k, (_, _, one, _) in SETTINGS.items() if one.hashed != NEVER and k not in apart]
    flat = {entry: setup.experiment.flat() for entry, setup in setups.items()}
    differs = {key: {entry: values[key] for entry, values in flat.items()} for key in keys}
    methods = {entry: setup.simulation.method for entry, setup in setups.items()}
    for kind in dict.fromkeys(map(type, methods.values())):
        alike = {entry: method for entry, method in methods.items() if type(method) is kind}
        name = next(iter(alike.values())).name
        for one in dataclasses.fields(kind):  # type: ignore[arg-type]
            values = {entry: getattr(method, one.name) for entry, method in alike.items()}
            differs.setdefault(f"{name}.{one.name}", values)
    several = lambda values: len(set(map(repr, values.values()))) > 1
    return {name: values for name, values in differs.items() if several(values)}


def set_ups(
    methods: Sequence[str | Method],
    settings: Mapping[str, Any],
    seeds: int = 1,
    mode: str = "loop",
    make: Callable[[Experiment, Objects], Setup] | None = None,
    **objects: Any,
) -> dict[str, list[Setup]]:
    """The prepared runs of every entry of a comparison: one for all seeds, or one per seed where
    the data follow it. All mistakes are said here, before anything trains.

    make: prepares one (default: on data that are read once).
    """
    feds = Federations()
    make = make or (lambda experiment, given: ready(experiment, given, feds))
    read = [read_method(given) for given in methods]
    others = [method for _, method, _ in read if isinstance(method, str)]
    asks: dict[str, Any] = {}
    hashes: dict[str, str] = {}
    for entry, method, own in read:
        chosen = layered(settings, own)
        experiment, given = asked(method, chosen, others, **objects)
        folder = comparison.folder_of(entry)
        same = hashes.get(experiment.hash()) or hashes.get(folder)
        if entry in asks or (same is not None and isinstance(method, str)):
            same = same or entry
            raise UserError(f"'{same}' and '{entry}' are the same run; name each run once")
        hashes |= {experiment.hash(): entry, folder: entry}
        follow = chosen.get("data_seed") == FOLLOW
        asks[entry] = many.for_seeds(experiment, seeds, mode, follow), given
    return {
        entry: [make(one, given) for one in several] for entry, (several, given) in asks.items()
    }


def read_method(given: str | Method) -> tuple[str, str | Method, dict[str, Any]]:
    """(name of the entry, the method, its own settings)."""
    if not isinstance(given, str):
        return getattr(given, "name", str(given)), given, {}
    method, own = read_entry(given)
    for name in own:
        if name.replace("-", "_") in OF_THE_COMMAND | {"dtype"}:
            raise UserError(
                f"'{name}' is an option of the whole comparison, not of one run; give it outside of"
                f" '{shown(given)}'"
            )
    return given, method, own


def compare(
    *methods: str | Method,
    fed: Federation | None = None,
    model: Any = None,
    net: Tree | None = None,
    seeds: int = 1,
    out: str | pathlib.Path | None = None,
    progress: bool | None = None,
    callback: Callable[[Segment], Any] | None = None,
    log: str | Sequence[str | Sink] = (),
    **settings: Any,
) -> Comparison:
    """Several methods on the same partition, initial weights and cohorts; the Python form of
    `fedjax-sim compare`.

    methods: names, with options of their own as in "fedprox:mu=0.1,lr=0.05", or Methods. Everything
    else as in `run`. seeds: runs with seeds s, s+1, …; out: run directories and compare.csv, .json,
    .md, .tex; what was begun is resumed.

    >>> both = compare("fedavg", "fedprox:mu=0.1", model="mlp", clients=4, rounds=1, epochs=1)
    >>> [row["method"] for row in both.table()]
    ['fedavg', 'fedprox:mu=0.1']
    """
    if not methods:
        raise UserError('compare needs methods, for example fs.compare("fedavg", "fedprox:mu=0.1")')
    folder = pathlib.Path(out) if out is not None else None
    taken = folder is not None and exists(folder) and not run_directory.empty(folder)
    if folder is not None and taken and not comparison.is_comparison(folder):
        raise UserError(f"output directory '{folder}' exists already; choose another out")
    more: dict[str, Any] = dict(progress=progress, sinks=sinks_of(callback, log))
    objects = dict(fed=fed, model=model, net=net)
    objects |= {name: settings.pop(name, None) for name in ("optimizer", "loss")}
    setups = set_ups(methods, settings, seeds, **objects)
    return run_compared(setups, seeds, folder, resume_command="the same call of compare", **more)


def run_compared(
    setups: Mapping[str, list[Setup]],
    seeds: int,
    out: pathlib.Path | None,
    mode: str = "loop",
    before: Callable[[Setup], None] = lambda setup: None,
    **more: Any,
) -> Comparison:
    """All entries of a comparison, one after another. before: called with the first set-up of each;
    more: see `driver.drive`."""
    if out is not None and first_process():
        write_order(out, [comparison.folder_of(entry) for entry in setups])
    done = Comparison([], [], out)
    for entry, several in setups.items():
        before(several[0])
        place = None if out is None else out / comparison.folder_of(entry)
        found = many.run_all(several, seeds, place, mode, **more)
        done.entries += [entry] * len(found)
        done.results += map(shown_result, found)
    if out is not None and first_process():
        comparison.write(out, [r.out for r in done.results if r.out], done.summaries, done.differs)
    return done


# ---- many runs in a folder -----------------------------------------------------------------------
def sweep(
    methods: str | pathlib.Path | Sequence[str],
    out: str | pathlib.Path,
    *,
    seeds: int | Sequence[int] = 1,
    grid: Mapping[str, Any] | None = None,
    preset: str | None = None,
    workers: int = 0,
    imports: Sequence[str | pathlib.Path] = (),
    progress: bool = False,
    **settings: Any,
) -> Rows:
    """Methods × grid × seeds, as `docs/sweep.md` has them; a row per run (status, settings, every
    figure), as in results.csv.

    methods: entries as `compare` takes them, or the path of a sweep file, which then has
    all settings. out: the folder; runs that have ended there are skipped. grid: {"lr": [0.01, 0.1],
    "fedprox.mu": [0.1, 1]}; settings: the same in every run. workers: 0 runs them in this process,
    one after another; else so many processes at a time, for which `imports` are files that register
    methods of your own. progress: whether lines or a table are shown.
    """
    from fedjax_sim.sweeps import plan, queue, table, work
    from fedjax_sim.sweeps.folder import result_rows, write_results
    from fedjax_sim.sweeps.launchers import Local

    for path in imports:
        load_file(str(path))
    if isinstance(methods, (str, pathlib.Path)):
        if grid or settings or preset or seeds != 1:
            raise UserError(
                f"'{methods}' is a sweep file, which has all settings; to give settings here,"
                " pass a list of methods"
            )
        data = plan.read(pathlib.Path(methods))
    else:
        data = dict(methods=list(methods), settings=settings, grid=dict(grid or {}))
        data |= dict(seeds=seeds if isinstance(seeds, int) else list(seeds))
        data |= dict(preset=preset) if preset else {}
    jobs, folder = plan.jobs_of(data), work.Shared(pathlib.Path(out))
    folder.begin(data, jobs)
    note = (lambda said: print(said, file=sys.stderr)) if progress else (lambda said: None)
    look = table.Table(jobs, folder, quiet=not progress)
    if workers == 0:
        work.work_here(jobs, folder, note, look, progress=False)
    else:
        files = [str(pathlib.Path(path).resolve()) for path in imports]
        launcher = Local(queue.command(folder, imports=files), folder, workers)
        with folder.locked():
            queue.work_off(folder.pending(jobs), jobs, folder, launcher, look)
    write_results(folder, jobs)
    return Rows(result_rows(folder, jobs))


def register_agent(name: str, kind: type, help: str = "", *, discrete: bool = True) -> None:
    """Register an agent of your own by name: a subclass of agents.Agent, with its
    hyper-parameters as fields."""
    from agents import register

    register(name, kind, help, discrete=discrete)


__all__ = [
    "Comparison",
    "Result",
    "Step",
    "compare",
    "register_agent",
    "resume",
    "rounds",
    "run",
    "sweep",
]
