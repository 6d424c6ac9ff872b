"""The style of all figures: one colour and line per label, units, ticks, legends below the data,
PNG and PDF."""

from __future__ import annotations

import contextlib
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.options import shown

# safe for colour blindness (after Paul Tol's "bright" and "muted" sets), on white and on dark
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccaa22",
    "#aa3377",
    "#33aacc",
    "#e07b39",
    "#7a6fc0",
    "#888888",
    "#117766",
)
LINES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
ACTIONS = {"full": "#4477aa", "backbone": "#66aa55", "head": "#cc6655", "partial": "#ddaa44"}
BYTES = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
SECONDS = (("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))
DPI = 220
FEW_ROWS, LINE = 3, 0.19  # rows of a legend that panels have room for; inches for each more
LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,  # text stays editable
}


def load_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "figures need matplotlib; install it with: pip install 'fedjax-sim[report]'"
        ) from None
    return matplotlib


def drawing() -> Any:
    """matplotlib.pyplot without a display, in this style."""
    matplotlib = load_matplotlib()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(matplotlib.rcParamsDefault)
    plt.rcParams.update(LOOK)
    return plt


def safe(text: str) -> str:
    """A name that matplotlib draws literally: not as mathematics, and not hidden in a legend.

    >>> safe("_a$b")
    ' _a\\\\$b'
    """
    text = shown(text, 120).replace("$", r"\$")
    return " " + text if text.startswith("_") else text


_titled = True


@contextlib.contextmanager
def titled(wanted: bool) -> Iterator[None]:
    """Inside, panels have titles, or not for a paper, which has captions."""
    global _titled
    before, _titled = _titled, wanted
    try:
        yield
    finally:
        _titled = before


def title(axis: Any, *parts: str) -> None:
    """Set the title of a panel, wrapped to its width."""
    if not _titled:
        return
    wide = axis.get_figure().get_size_inches()[0] / axis.get_gridspec().ncols
    lines = [line for part in parts for line in textwrap.wrap(part, max(20, int(13 * wide)))]
    axis.set_title("\n".join(map(safe, lines)))


def looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and line of each label, the same in every figure; neighbours differ in both, also for
    black-and-white print.

    >>> looks(["a", "b"])["b"]["color"], len(
    ...     {str(look) for look in looks([str(i) for i in range(40)]).values()}
    ... )
    ('#ee6677', 40)
    """
    n, m = len(COLOURS), len(LINES)
    return {
        name: dict(color=COLOURS[i % n], linestyle=LINES[(i + i // n) % m])
        for i, name in enumerate(labels)
    }


def band(
    axis: Any, x: np.ndarray, mean: np.ndarray, std: np.ndarray, label: str, look: dict[str, Any]
) -> None:
    """Draw a line and ± one standard deviation, with markers where there are few points."""
    few = len(x) <= 12
    axis.plot(x, mean, label=safe(label), marker="o" if few else None, markersize=3, **look)
    if std.any():
        axis.fill_between(x, mean - std, mean + std, color=look["color"], alpha=0.18, linewidth=0)


def far_apart(axis: Any, curves: Sequence[np.ndarray]) -> None:
    """Use a logarithmic x-axis if one curve ends more than 20 times as far as another, which would
    be too short to see."""
    drawn = [x for x in curves if len(x)]
    starts, ends = [float(x[0]) for x in drawn], [float(x[-1]) for x in drawn]
    if drawn and min(*starts, *ends) > 0 and max(ends) / min(ends) > 20:
        axis.set_xscale("log")


def unit(values: Any, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit of which the largest value is at least one and a half.

    >>> unit([3 * 10**6], BYTES), unit([100], SECONDS), unit([], BYTES)
    (('MB', 1000000), ('minutes', 60), ('B', 1))
    """
    largest = max(
        (
            float(np.nanmax(v))
            for v in map(np.atleast_1d, values)
            if np.size(v) and not np.isnan(v).all()
        ),
        default=0,
    )
    return [u for u in units if largest >= 1.5 * u[1] or u is units[0]][-1]


def panels(
    plt: Any, number: int, width: float = 4.6, height: float = 3.3, most: int = 3
) -> tuple[Any, list[Any]]:
    """A figure with `number` axes in rows of at most `most`."""
    columns = min(most, max(1, number))
    rows = -(-max(1, number) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows + 0.25), squeeze=False
    )
    for axis in axes.flat[number:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:number])


def whole_numbers(ruler: Any, most: int = 8) -> None:
    """Ticks of one axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    ruler.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10]))


def rounds_axis(axis: Any, name: str = "round") -> None:
    whole_numbers(axis.xaxis)
    axis.set_xlabel(name)


def legend(
    figure: Any, axes: Sequence[Any], title: str | None = None, first: Sequence[str] = ()
) -> None:
    """Draw one legend for all axes, below them, so that it never covers data; first: labels that
    come first, in this order."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    order = [safe(name) for name in first]
    found = dict(
        sorted(
            found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)
        )
    )
    if found:
        wide, high = figure.get_size_inches()
        longest = max(map(len, found)) * 0.075 + 0.6  # inches
        columns = int(max(1, min(len(found), (wide - 0.3) // longest)))
        rows = -(-len(found) // columns)
        if rows > FEW_ROWS:  # else the panels would shrink, down to nothing
            figure.set_size_inches(wide, high + LINE * (rows - FEW_ROWS))
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns, title=title
        )


def save(plt: Any, figure: Any, path: pathlib.Path) -> list[pathlib.Path]:
    """Save the figure as `path`.png and .pdf."""
    out = [path.with_suffix(".png"), path.with_suffix(".pdf")]
    try:
        figure.savefig(out[0], dpi=DPI)
        figure.set_layout_engine("none")  # keep the layout of the PNG
        figure.savefig(out[1], metadata={"CreationDate": None})
    finally:
        plt.close(figure)
    return out
