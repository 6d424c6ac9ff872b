"""A table of results: ours ± sd beside the published figure, Kendall's τ, footnotes; as text,
Markdown and JSON. Sweeps use it too, without published figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report.tables import markdown_lines
from fedjax_sim.report.text import aligned


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure over seeds, with its rounds and the published figure."""

    values: tuple[float, ...] = ()  # one per seed; nan: missing, inf: never reached
    seeds: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    planned: int = 0  # rounds of a finished run; 0: not a figure of runs
    published: str = ""  # as printed
    theirs: float | None = None
    marks: str = ""
    digits: int = 2
    better: int = 1
    reading: str = ""
    figure: str = ""  # cells of one figure are ranked together
    note: str = ""  # why there is no value

    @property
    def known(self) -> np.ndarray:
        return np.array([v for v in self.values if not math.isnan(v)])

    @property
    def mean(self) -> float | None:
        """None: no value; inf: no seed reached it."""
        found = self.known
        if not len(found):
            return None
        reached = found[np.isfinite(found)]
        return float(reached.mean()) if len(reached) else math.inf

    @property
    def sd(self) -> float:
        reached = self.known[np.isfinite(self.known)]
        return float(reached.std(ddof=1)) if len(reached) > 1 else 0.0

    @property
    def ours(self) -> str:
        """Our figure as text.

        >>> Cell((1.0, 2.0)).ours, Cell((math.inf,)).ours, Cell().ours, Cell(
        ...     (3.0, math.inf), digits=0
        ... ).ours
        ('1.50 ± 0.71', '×', '', '3 (1 of 2)')
        """
        mean, several = self.mean, len(self.known)
        if mean is None:
            return self.note or ("–" if self.values else "")
        if math.isinf(mean):
            return "×"
        text = f"{mean:.{self.digits}f}"
        if self.sd:
            text += f" ± {self.sd:.{self.digits}f}"
        missed = several - int(np.isfinite(self.known).sum())
        return text + (f" ({several - missed} of {several})" if missed else "")

    @property
    def by_seed(self) -> dict[int, float]:
        """The finite values."""
        pairs = zip(self.seeds, self.values, strict=False)
        return {seed: value for seed, value in pairs if math.isfinite(value)}

    @property
    def unfinished(self) -> bool:
        return any(r < self.planned for r in self.rounds)


@dataclasses.dataclass(frozen=True)
class Pivot:
    title: str
    rows: Sequence[tuple[str, str]]  # (key, label)
    cols: Sequence[tuple[str, str]]
    cells: Mapping[tuple[str, str], Cell]
    rank: str = "rows"  # whether rows or cols are compared
    head: Sequence[str] = ()  # sentences above it
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    foot: Sequence[str] = ()  # sentences below it
    reference: str = ""  # the line that the others are compared with, seed by seed

    @property
    def compared(self) -> bool:
        return any(cell.theirs is not None for cell in self.cells.values())

    def taus(self) -> dict[tuple[str, str], tuple[float, int]]:
        """{(line, figure): (Kendall's τ between our and the published ranking in that line, number
        of cells)}."""
        found: dict[tuple[str, str], list[Cell]] = {}
        for (row, col), cell in self.cells.items():
            if cell.theirs is not None and cell.mean is not None:
                key = (col if self.rank == "rows" else row), cell.figure
                found.setdefault(key, []).append(cell)
        tau = lambda cells: kendall([c.mean or 0 for c in cells], [c.theirs or 0 for c in cells])
        return {key: (tau(cells), len(cells)) for key, cells in found.items() if len(cells) > 2}

    def paired(self) -> dict[tuple[str, str], Cell]:
        """Every cell minus the reference in its line, seed by seed, for seeds that both have."""
        out = {}
        for (row, col), cell in self.cells.items():
            line = (self.reference, col) if self.rank == "rows" else (row, self.reference)
            other = self.cells.get(line)
            if other is None or other is cell:
                continue
            ours, theirs = cell.by_seed, other.by_seed
            gaps = tuple(ours[s] - theirs[s] for s in ours if s in theirs)
            if gaps:
                out[row, col] = Cell(gaps, digits=cell.digits)
        return out

    def differences(self) -> list[list[str]]:
        """`paired` as text, the head first; [] for none."""
        found = self.paired()
        if not found:
            return []
        label = dict([*self.rows, *self.cols])[self.reference]
        signed = lambda cell: (
            "" if cell is None else cell.ours if cell.ours.startswith("-") else f"+{cell.ours}"
        )
        cells = lambda row: [signed(found.get((row, col))) for col, _ in self.cols]
        lines = [[name, *cells(row)] for row, name in self.rows]
        head = [f"minus {label}", *(name for _, name in self.cols)]
        return [head, *(line for line in lines if any(line[1:]))]

    # ---- text ------------------------------------------------------------------------------------
    def same(self) -> str:
        """Rounds and seeds if all cells have the same, else ''; then each cell shows its own."""
        known = [cell for cell in self.cells.values() if cell.mean is not None]
        kinds = {(cell.rounds, cell.planned) for cell in known}
        if len(kinds) != 1:
            return ""
        rounds, planned = next(iter(kinds))
        if not planned or len(set(rounds)) != 1:
            return ""
        of = f" of {planned}" if rounds[0] < planned else ""
        return f"{rounds[0]}{of} rounds, {counted(len(rounds), 'seed')}"

    def text_of(self, cell: Cell | None) -> str:
        """One cell: our figure, rounds and seeds where they differ, the published figure in
        brackets with its footnotes."""
        if cell is None:
            return ""
        parts = [cell.ours] if cell.ours else []
        if cell.mean is not None and cell.planned and not self.same():
            least, most = min(cell.rounds), max(cell.rounds)
            span = f"{least}" if least == most else f"{least}-{most}"
            of = f"/{cell.planned}" if cell.unfinished else ""
            parts.append(f"[{span}{of} r, {counted(len(cell.rounds), 'seed')}]")
        if cell.published:
            parts.append(f"({cell.published}{'^' + cell.marks if cell.marks else ''})")
        return " ".join(parts)

    def grid(self) -> list[list[str]]:
        """The table as text, the head first; Kendall's τ in the last row or column."""
        taus = self.taus()
        figures = list(dict.fromkeys(figure for _, figure in taus))
        one = lambda tau: "–" if math.isnan(tau) else f"{tau:.2f}"  # all cells are equal
        shown = lambda key: ", ".join(one(taus[key, f][0]) for f in figures if (key, f) in taus)
        head = ["", *(label for _, label in self.cols)]
        cells = lambda row: [self.text_of(self.cells.get((row, col))) for col, _ in self.cols]
        body = [[label, *cells(row)] for row, label in self.rows]
        if taus and self.rank == "rows":
            body.append(["Kendall τ", *(shown(col) for col, _ in self.cols)])
        elif taus:
            head.append("Kendall τ")
            for line, (row, _) in zip(body, self.rows, strict=True):
                line.append(shown(row))
        return [head, *body]

    def sentences(self) -> tuple[list[str], list[str]]:
        """Sentences (above, below) the table."""
        above, same = [*self.head], self.same()
        if self.compared:
            above.append("In brackets: published." + (f" Ours: {same}." if same else ""))
        elif same:
            above.append(f"{same}.")
        used = {m for cell in self.cells.values() for m in cell.marks}
        below = [f"^{m}: {self.notes[m]}" for m in self.notes if m in used]
        return above, [*below, *self.foot]

    def as_text(self) -> str:
        above, below = self.sentences()
        lines = [self.title, *above, "", *aligned(self.grid())]
        if more := self.differences():
            lines += ["", "Differences, seed by seed:", *aligned(more)]
        return "\n".join([*lines, *(["", *below] if below else [])])

    def as_markdown(self) -> str:
        above, below = self.sentences()
        parts = [f"## {self.title}", "", *above, "", *markdown_lines(self.grid())]
        if more := self.differences():
            parts += ["", "Differences, seed by seed:", "", *markdown_lines(more)]
        parts += ["", *(f"* {text}" for text in below)] if below else []
        return "\n".join([*parts, ""])

    def as_json(self) -> dict[str, Any]:
        clean = lambda v: None if v is None or not math.isfinite(v) else v
        cells = [
            dict(
                row=row,
                col=col,
                ours=clean(cell.mean),
                sd=cell.sd,
                values=["never" if math.isinf(v) else clean(v) for v in cell.values],
                seeds=len(cell.values),
                rounds=list(cell.rounds),
                planned=cell.planned,
                published=cell.theirs,
                printed=cell.published,
                footnotes=cell.marks,
                reading=cell.reading,
                note=cell.note,
            )
            for (row, col), cell in self.cells.items()
        ]
        taus = [
            dict(line=line, figure=figure, tau=clean(tau), of=n)
            for (line, figure), (tau, n) in self.taus().items()
        ]
        above, below = self.sentences()
        paired = [
            dict(row=row, col=col, values=list(c.values)) for (row, col), c in self.paired().items()
        ]
        more = dict(kendall=taus, reference=self.reference, paired=paired, said=[*above, *below])
        head = dict(title=self.title, rows=dict(self.rows), cols=dict(self.cols))
        return head | dict(cells=cells, **more)


def counted(number: int, what: str) -> str:
    """A number with a singular or plural noun.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{number} {what}" + ("s" if number != 1 else "")


def kendall(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Kendall's τ-b of two rankings; nan if all values of one are equal.

    >>> kendall([1, 2, 3], [10, 20, 30]), kendall([1, 2, 3], [3, 2, 1]), round(
    ...     kendall([1, 2, 2], [1, 2, math.inf]), 3
    ... )
    (1.0, -1.0, 0.816)
    """
    from scipy.stats import kendalltau  # slow to load, and few tables need it

    return float(kendalltau(ours, theirs).statistic)
