"""`fs.compare`: the Python form of `fedjax-sim compare`, with data, models and methods of one's
own."""

from __future__ import annotations

import argparse
import dataclasses
import html
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from fedjax_sim.cli import describe
from fedjax_sim.cli.compare import folder_of, write
from fedjax_sim.cli.settings import is_comparison
from fedjax_sim.cli.several import FOLLOW, Federations, execute_all
from fedjax_sim.cli.words import OF_THE_COMMAND, read_entry
from fedjax_sim.errors import UserError
from fedjax_sim.notebook import plot
from fedjax_sim.notebook.rows import Rows, as_html
from fedjax_sim.report.runs import write_order
from fedjax_sim.report.tables import figures_of
from fedjax_sim.runner import run_directory
from fedjax_sim.runner.execute import execute, set_up, sinks_of
from fedjax_sim.runner.files import exists
from fedjax_sim.runner.result import Result
from fedjax_sim.runner.seeds import run_seeds
from fedjax_sim.runner.sinks import Segment


@dataclasses.dataclass(repr=False)
class Comparison:
    """Results of several methods on the same draws, seed by seed; entries: as each was named."""

    entries: list[str]
    results: list[Result]
    out: pathlib.Path | None = None

    def __repr__(self) -> str:
        return "\n".join(
            [describe.results_table(self._summaries()), *describe.differing_lines(self.differs)]
        )

    def _repr_html_(self) -> str:
        """The same in a notebook: a table, and below it what a reader must not miss."""
        told = self._summaries()
        said = [*describe.rows_lines(told), *(line for s in told for line in describe.warnings(s))]
        lines = [html.escape(line) for line in (*said, *describe.differing_lines(self.differs))]
        return as_html(describe.results_cells(told)) + (
            f"<p>{'<br>'.join(lines)}</p>" if lines else ""
        )

    def _summaries(self) -> list[dict[str, Any]]:
        return [r.summary | {"method": e} for e, r in zip(self.entries, self.results, strict=True)]

    @property
    def differs(self) -> dict[str, dict[str, Any]]:
        """{setting: {entry: value}} of what the entries do not have in common, whoever chose it."""
        return describe.differing(
            {e: r.setup for e, r in zip(self.entries, self.results, strict=True)}
        )

    def table(self) -> Rows:
        """A row per entry and seed: every figure of its summary."""
        head = lambda entry, result: dict(method=entry, seed=result.summary["seed"])
        told = zip(self.entries, self.results, strict=True)
        return Rows(head(entry, result) | figures_of(result.summary) for entry, result in told)

    def to_pandas(self) -> Any:
        return self.table().to_pandas()

    def plot(self, path: str | pathlib.Path | None = None, against: str = "rounds") -> plot.Picture:
        """All accuracies in one picture; see `Result.plot`."""
        return plot.curves(self.results, path, against)


def compare(
    *methods: Any,
    fed: Any = None,
    model: Any = None,
    net: Any = None,
    seeds: int = 1,
    out: str | pathlib.Path | None = None,
    progress: bool | None = None,
    callback: Callable[[Segment], Any] | None = None,
    log: str | Sequence[Any] = (),
    **options: Any,
) -> Comparison:
    """Several methods on the same partition, initial weights and cohorts; the Python form of
    `fedjax-sim compare`.

    methods: names, with options of their own as in "fedprox:mu=0.1,lr=0.05", or Methods. Everything
    else as in `run`. seeds: runs with seeds s, s+1, …; out: run directories and compare.csv, .json,
    .md, .tex; what was begun goes on.

    >>> both = compare("fedavg", "fedprox:mu=0.1", model="mlp", clients=4, rounds=1, epochs=1)
    >>> [row["method"] for row in both.table()]
    ['fedavg', 'fedprox:mu=0.1']
    """
    if not methods:
        raise UserError('compare needs methods, for example fs.compare("fedavg", "fedprox:mu=0.1")')
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise UserError(f"seeds {seeds!r} is not allowed; use a whole number of 1 or more")
    folder = pathlib.Path(out) if out is not None else None
    if (
        folder is not None
        and exists(folder)
        and not run_directory.empty(folder)
        and not is_comparison(folder)
    ):
        raise UserError(f"output directory '{folder}' exists already; choose another out")
    feds, sinks = Federations(), sinks_of(callback, log)
    ready: dict[str, list[Any]] = {}
    hashes: dict[str, str] = {}
    for given in methods:  # all, before one trains
        entry, method, own = read(given)
        told = dict(fed=fed, model=model, net=net, load=feds.of) | options | own
        first = set_up(method, **told)
        seed = first.config.seed
        more = range(seed + 1, seed + seeds) if told.get("data_seed") == FOLLOW else ()
        same = hashes.setdefault(first.config.hash(), entry)
        if same != entry or entry in ready:
            raise UserError(f"'{same}' and '{entry}' are the same run; compare names each once")
        ready[entry] = [first, *(set_up(method, **told | dict(seed=s)) for s in more)]
    if folder is not None:
        write_order(folder, [folder_of(entry) for entry in ready])
    entries, results = [], []
    for entry, setups in ready.items():
        if folder is not None:
            args = argparse.Namespace(seeds=seeds, seeds_mode="loop")
            speech: dict[str, Any] = dict(
                progress=progress, sinks=sinks, say=print, again="the same call of compare"
            )
            runs = execute_all(setups, args, folder / folder_of(entry), **speech)
        elif len(setups) > 1:
            runs = [execute(s, None, progress=progress, sinks=sinks) for s in setups]
        else:
            runs = run_seeds(setups[0], seeds, None, progress=progress, sinks=sinks)
        entries += [entry] * len(runs)
        results += runs
    if folder is not None:
        summaries = [r.summary | {"method": e} for e, r in zip(entries, results, strict=True)]
        differs = describe.differing({entry: setups[0] for entry, setups in ready.items()})
        write(folder, [r.out for r in results], summaries, differs)
    return Comparison(entries, results, folder)


def read(given: Any) -> tuple[str, Any, dict[str, Any]]:
    """(name of the entry, the method, its own options)."""
    if not isinstance(given, str):
        return getattr(given, "name", str(given)), given, {}
    method, own = read_entry(given)
    for name in own:
        if name.replace("_", "-") in OF_THE_COMMAND:
            raise UserError(
                f"'{name}' is an option of the whole comparison, not of one run; give it as"
                f" {name}=…"
            )
    return given, method, own
