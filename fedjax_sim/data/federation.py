"""The federation: one pool of examples, and for every client the rows it owns.

The dataset is stored once (uint8, all splits in one pool); a client is a row of indices and a
length. Nothing is copied or padded per client, so a client of 12 examples costs 12 integers beside
a client of 4,000.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_sim.data.arrays import MOST_CLASSES, check_inputs, check_targets, outputs_of
from fedjax_sim.data.provenance import Origin, fingerprint
from fedjax_sim.data.spec import check_whole, shown
from fedjax_sim.errors import UserError
from fedjax_sim.tasks import CLASS, LABELS, REAL, TOKENS, task_called, task_of

Array = Any  # np.ndarray at construction, jax.Array (or a tracer) inside a compiled round
SPLITS = ("train", "val", "test")
SMALLEST = float(np.finfo(np.float32).tiny)  # a standard deviation below it is 0 in training


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Federation:
    """A federated dataset as a pytree: pass it as an *argument* of the compiled round, never close
    over it.

    A minibatch of client i is `x[rows["train"][i, j]]` for positions `j < size["train"][i]`,
    normalised when gathered: `(x * scale - mean) / std`. The constants are float64; cast the result
    to the dtype you train in.

    >>> import numpy as np
    >>> x, y = np.zeros((6, 2, 2), np.uint8), np.array([0, 1, 0, 1, 0, 1])
    >>> fed = Federation.from_arrays(x, y, {"train": [[0, 1], [2]]}, test=[4, 5], mean=0.0, std=1.0)
    >>> fed.num_clients, fed.shape, fed.rows["train"].tolist(), fed.size["train"].tolist()
    (2, (2, 2, 1), [[0, 1], [2, 0]], [2, 1])
    >>> fed.label_counts().tolist()
    [[1, 1], [1, 0]]
    """

    x: Array  # [D, H, W, C] uint8 (or float), or tokens [D, T] int32
    y: Array  # [D] int32; or what the task has: [D, K] float or uint8, [D, T] int32
    rows: dict[str, Array]  # split -> [N, S_split] int32, padded with row 0 (a valid row)
    size: dict[str, Array]  # split -> [N] int32, true lengths
    # server-side rows [R] int32: "test" always, "val" only if the protocol has it
    server_rows: dict[str, Array]
    mean: Array  # [C]
    std: Array  # [C]
    scale: Array  # []  1/255 for uint8, 1 for floats
    classes: int = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(default="arrays", metadata={"static": True})
    # "" or "crop_flip": the engine applies it
    augment: str = dataclasses.field(default="", metadata={"static": True})
    task: str = dataclasses.field(default="classification", metadata={"static": True})
    # equal to every other one
    origin: Origin = dataclasses.field(default=Origin("arrays"), metadata={"static": True})

    def __repr__(self) -> str:
        # inside JAX the leaves may be anything
        sides = "x".join(map(str, getattr(self.x, "shape", ())))
        sizes = self.size.get("train") if isinstance(self.size, dict) else None
        clients = (*getattr(sizes, "shape", ()), "?")[0]
        what = "classes" if self.task == "classification" else f"outputs of a {self.task} task"
        return (
            f"Federation({self.name}: examples {sides}, {self.classes} {what}, {clients} clients;"
            f" {self.description})"
        )

    @property
    def description(self) -> str:
        """How it was made, in one line; "arrays" for own arrays. A copy by `dataclasses.replace`
        keeps it."""
        return self.origin.text

    @functools.cached_property
    def _fingerprint(self) -> str:  # of this object: replaced or moved copies compute their own
        return fingerprint(self)

    def fingerprint(self) -> str:
        """sha256 of the content (examples, labels, rows, normalisation), computed on the host once
        per object."""
        return self._fingerprint

    @property
    def num_clients(self) -> int:
        return int(self.size["train"].shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W, C) of one example, or (T,) of tokens."""
        return tuple(int(side) for side in self.x.shape[1:])

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """What each token stands for, where the data are text."""
        return self.origin.vocabulary

    def client_rows(self, client: int, split: str = "train") -> np.ndarray:
        """The unpadded rows of ONE client, on the host."""
        return np.asarray(self.rows[split])[client, : int(np.asarray(self.size[split])[client])]

    def label_counts(self, split: str = "train") -> np.ndarray:
        """[N, classes] int64: how many examples of each class each client holds in `split`.

        Of a sequence its tokens, of labels those that are 1, of regression the examples, for every
        output.
        """
        rows, size, y = map(np.asarray, (self.rows[split], self.size[split], self.y))
        target = task_called(self.task).target
        if target == REAL:
            return np.repeat(size[:, None].astype(np.int64), self.classes, 1)
        if target != CLASS:
            each = [y[rows[i, : size[i]]] for i in range(len(size))]
            if target == LABELS:
                return np.stack([own.sum(0, dtype=np.int64) for own in each])
            return np.stack([np.bincount(own[own >= 0], minlength=self.classes) for own in each])
        filled = np.arange(rows.shape[1]) < size[:, None]
        owner, labels = np.nonzero(filled)[0], y[rows[filled]]  # both row by row
        flat = np.bincount(owner * self.classes + labels, minlength=self.num_clients * self.classes)
        return flat.reshape(self.num_clients, self.classes)

    def describe(self) -> str:
        """A short table: sizes per split, label skew, and the label counts of the first clients."""
        return described(self)

    def plot(self, path: str | os.PathLike[str], split: str = "train", most: int = 100) -> None:
        """Draw who has how many examples of which class: a bubble per client (the first `most`) and
        class.

        >>> import fedjax_sim as fs
        >>> fs.federate("digits", "dirichlet:0.3", clients=10).plot("labels.png")
        """
        from fedjax_sim.data.figure import bubble_plot

        bubble_plot(self, path, split, most)

    @classmethod
    def from_arrays(
        cls,
        x: Array,
        y: Array | None,
        rows: Mapping[str, Sequence[Any]],
        *,
        test: Any = None,
        server_val: Sequence[int] | np.ndarray | None = None,
        classes: int | None = None,
        mean: Any = None,
        std: Any = None,
        name: str = "arrays",
        augment: str = "",
        description: str = "arrays",
        task: str = "",
        vocabulary: Sequence[str] = (),
    ) -> Federation:
        """A federation from your own arrays and explicit row lists.

        x: [D, H, W] or [D, H, W, C], uint8 or bool (scaled to 0..1) or float (taken as it is), or a
        table of features [D, F], which becomes [D, 1, 1, F]; y: [D] integer labels. rows: {"train":
        [rows of client 0, rows of client 1, ...], optionally "val" and "test" likewise}. test: the
        global test set, a list of rows or arrays (x, y) to append to the pool; without it, the
        union of the clients' test rows. server_val: rows the server may validate on. mean, std: per
        channel, after scaling; computed from the clients' training rows when left out. A test row
        that is also a training or validation row is an error. description: how it was made, for the
        records of a run.

        task: classification, regression, multilabel, sequence or one of your own; by default what x
        and y look like: a float y is regression, y [D, K] of 0 and 1 multilabel, whole numbers x
        [D, T] tokens, and without y (None) they are to be predicted, each from those before it.
        mean and std of tables are per column; tokens are never normalised.
        """
        task = task or task_of(x, y)
        pool_x, pool_y, test = _pool(x, y, test, task)
        _check_text(name=name, augment=augment, description=description)
        if classes is not None:
            classes = check_whole("classes", classes, 1)
        limit = len(pool_x)
        lists = _client_lists(rows, limit)
        pool_x, pool_y, tested = _with_test(pool_x, pool_y, test, lists, task)
        server = {"test": tested}
        if server_val is not None:
            server["val"] = _row_list(server_val, limit, "server_val")
        _refuse_leaks(lists, server, len(pool_x))
        classes = _classes(outputs_of(task, pool_x, pool_y), classes)
        scale = 1.0 / 255.0 if pool_x.dtype == np.uint8 else 1.0
        mean, std = _moments(pool_x, lists["train"], scale, mean, std)
        padded = {split: pad_rows(per_client) for split, per_client in lists.items()}
        tables = {split: table for split, (table, _) in padded.items()}
        size = {split: length for split, (_, length) in padded.items()}
        numbers = dict(mean=mean, std=std, scale=np.asarray(scale))
        origin = Origin(shown(description, 1000), tuple(vocabulary))
        facts: dict[str, Any] = dict(classes=classes, name=name, augment=augment, task=task)
        return cls(pool_x, pool_y, tables, size, server, **numbers, **facts, origin=origin)


def _pool(x: Any, y: Any, test: Any, task: str) -> tuple[np.ndarray, np.ndarray, Any]:
    """(inputs, targets, test set), checked against the task."""
    x, y, test = _next_tokens(x, y, test, task)
    pool_x, pool_y = check_inputs(x, "x", task), check_targets(y, "y", task)
    if len(pool_x) != len(pool_y):
        raise UserError(f"x has {len(pool_x)} examples but y has {len(pool_y)}")
    return pool_x, pool_y, test


def _next_tokens(x: Any, y: Any, test: Any, task: str) -> tuple[Any, Any, Any]:
    """Without targets, tokens are predicted from those before them: x without its last, y without
    its first place."""
    if y is not None:
        return x, y, test
    x = np.asarray(x)
    tokens = task_called(task).target == TOKENS and x.dtype.kind in "iu"
    if not tokens or x.ndim != 2 or x.shape[1] < 2:
        raise UserError(
            f"y may be left out for tokens [D, T] with T >= 2 alone; x has the shape {x.shape},"
            f" task {task}"
        )
    if isinstance(test, tuple) and len(test) == 2 and test[1] is None:
        test = (np.asarray(test[0])[:, :-1], np.asarray(test[0])[:, 1:])
    return x[:, :-1], x[:, 1:], test


def pad_rows(per_client: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ragged row lists -> ([N, S] int32 padded with row 0, [N] int32 lengths).

    >>> pad_rows([np.array([3, 4]), np.array([5])])[0].tolist()
    [[3, 4], [5, 0]]
    """
    length = np.array([len(r) for r in per_client], np.int32)
    table = np.zeros((len(per_client), max(1, int(length.max(initial=0)))), np.int32)
    if length.sum():
        table[np.arange(table.shape[1]) < length[:, None]] = np.concatenate(per_client)
    return table, length


def channel_moments(x: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per channel of `x * scale`, [C] each; a constant channel gets std
    1."""
    if x.dtype == np.uint8:
        # exact integer histogram per channel: no float copy of the pool, the same bits on any
        # machine
        counts = [np.bincount(x[..., c].ravel(), minlength=256) for c in range(x.shape[-1])]
        sums = [
            [sum(n * v**power for v, n in enumerate(channel.tolist())) for power in range(3)]
            for channel in counts
        ]
        mean = np.array([s1 / s0 for s0, s1, _ in sums]) * scale
        variance = np.array([(s0 * s2 - s1**2) / s0**2 for s0, s1, s2 in sums]) * scale**2
    else:
        axes = tuple(range(x.ndim - 1))
        mean = x.mean(axes, dtype=np.float64) * scale
        variance = x.var(axes, dtype=np.float64) * scale**2
    std = np.sqrt(variance)
    return mean, np.where(std >= SMALLEST, std, 1.0)


def _row_lists(rows: Any, limit: int, split: str) -> list[np.ndarray]:
    try:
        per_client = list(rows)
    except TypeError:
        raise UserError(
            f"rows['{split}'] must list the rows of every client, got {shown(repr(rows))}"
        ) from None
    return [_row_list(r, limit, f"rows['{split}'][{i}]") for i, r in enumerate(per_client)]


def _row_list(rows: Any, limit: int, what: str) -> np.ndarray:
    try:
        table = np.asarray(rows)
    except (ValueError, TypeError):
        raise UserError(f"{what} must be a list of row numbers, got {shown(rows)}") from None
    if table.size == 0:
        return np.zeros(0, np.int32)
    if table.ndim != 1 or not np.issubdtype(table.dtype, np.integer):
        raise UserError(
            f"{what} must be a list of row numbers, got {table.dtype} of shape {table.shape}"
        )
    if table.min() < 0 or table.max() >= limit:
        raise UserError(
            f"{what} has row {table.max() if table.max() >= limit else table.min()}, but the rows"
            f" are 0 to {limit - 1}"
        )
    return table.astype(np.int32)


def _check_text(**given: Any) -> None:
    for what, text in given.items():
        if not isinstance(text, str):
            raise UserError(f"{what} must be text, got {shown(repr(text))}")


def _moments(
    x: np.ndarray, trained: list[np.ndarray], scale: float, mean: Any, std: Any
) -> tuple[Any, Any]:
    """Mean and deviation per channel: as given, or of the clients' training rows; tokens are taken
    as they are."""
    if x.ndim == 2:
        mean, std = 0.0, 1.0
    elif mean is None or std is None:
        computed = channel_moments(x[np.unique(np.concatenate(trained))], scale)
        mean, std = (computed[0] if mean is None else mean), (computed[1] if std is None else std)
    channels = 1 if x.ndim == 2 else x.shape[-1]
    return _per_channel(mean, channels, "mean"), _per_channel(std, channels, "std")


def _client_lists(rows: Any, limit: int) -> dict[str, list[np.ndarray]]:
    """Rows of every client, split by split, checked."""
    if not isinstance(rows, Mapping):
        raise UserError(
            "rows must be {'train': [rows of client 0, rows of client 1, …]}, got"
            f" {shown(repr(rows))}"
        )
    if "train" not in rows or set(rows) - set(SPLITS):
        raise UserError(
            f"rows must have 'train' and may have 'val' and 'test'; got {', '.join(rows) or 'none'}"
        )
    lists = {split: _row_lists(rows[split], limit, split) for split in SPLITS if split in rows}
    clients = len(lists["train"])
    for split, per_client in lists.items():
        if len(per_client) != clients:
            raise UserError(
                f"rows['{split}'] lists {len(per_client)} clients but rows['train'] lists {clients}"
            )
    if clients == 0:
        raise UserError("a federation needs at least 1 client; rows['train'] is empty")
    empty = [i for i, r in enumerate(lists["train"]) if len(r) == 0]
    if empty:
        raise UserError(
            f"every client needs at least 1 training example; client {empty[0]} has none"
        )
    return lists


def _with_test(
    x: np.ndarray, y: np.ndarray, test: Any, lists: Mapping[str, list[np.ndarray]], task: str
) -> tuple[np.ndarray, ...]:
    """(the pool's x and y, to which a test set of its own is appended; the rows of the test
    set)."""
    found = np.zeros(0, np.int32)
    if isinstance(test, tuple) and len(test) == 2 and np.ndim(test[0]) >= 2:
        test_x = check_inputs(test[0], "test x", task)
        test_y = check_targets(test[1], "test y", task)
        if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype or len(test_x) != len(test_y):
            raise UserError(
                f"test images {test_x.shape} {test_x.dtype} with {len(test_y)} labels do not fit"
                f" the pool {x.shape} {x.dtype}"
            )
        found = np.arange(len(x), len(x) + len(test_x), dtype=np.int32)
        x, y = np.concatenate([x, test_x]), np.concatenate([y, test_y])
    elif test is not None:
        found = _row_list(test, len(x), "test")
    elif "test" in lists:
        found = np.concatenate(lists["test"])
    if len(found) == 0:
        raise UserError(
            "a federation needs a test set: pass test=(x, y), test=rows or rows['test']"
        )
    return x, y, found


def _classes(needed: int, classes: int | None) -> int:
    """How many classes there are: as many as were said, or as the labels need."""
    if classes is not None and not needed <= classes <= MOST_CLASSES:
        raise UserError(
            f"classes={classes} but the labels go up to {needed - 1}, and at most {MOST_CLASSES}"
            " classes are allowed"
        )
    return needed if classes is None else int(classes)


def _refuse_leaks(
    lists: Mapping[str, list[np.ndarray]], server: Mapping[str, np.ndarray], total: int
) -> None:
    """No test row may be trained or validated on, by any client or by the server."""
    tested = np.zeros(total, bool)
    tested[server["test"]] = True
    for rows in lists.get("test", ()):
        tested[rows] = True
    used = [
        ("training", lists["train"]),
        ("validation", lists.get("val", [])),
        ("server validation", [server["val"]] if "val" in server else []),
    ]
    for what, groups in used:
        for rows in groups:
            if tested[rows].any():
                raise UserError(f"row {rows[tested[rows]][0]} is both a test row and a {what} row")


def _per_channel(value: Any, channels: int, what: str) -> np.ndarray:
    try:
        array = np.asarray(value, np.float64)
    except (ValueError, TypeError):
        raise UserError(
            f"{what} must be a number or {channels} numbers, got {shown(value)}"
        ) from None
    if array.ndim > 1 or (array.ndim == 1 and len(array) not in (1, channels)):
        raise UserError(f"{what} must be a number or {channels} numbers, got shape {array.shape}")
    if not (np.abs(array) <= np.finfo(np.float32).max).all():
        raise UserError(f"{what} must be finite, got {shown(array.tolist())}")
    if what == "std" and (array < SMALLEST).any():
        raise UserError(f"std must be positive (as float32), got {shown(array.tolist())}")
    return np.broadcast_to(array, (channels,)).copy()


MOST_LINES, MOST_COLUMNS = 10, 20  # of a table of label counts: clients and classes


def described(fed: Federation) -> str:
    counts = fed.label_counts()
    words = "classes" if fed.task == "classification" else f"outputs ({fed.task})"
    lines = [
        (
            f"{fed.name}: {len(fed.x)} examples {'x'.join(map(str, fed.shape))}, {fed.classes}"
            f" {words}, {fed.num_clients} clients"
        ),
        *([f"  columns: {fed.origin.columns}"] if fed.origin.columns else []),
    ]
    for split in SPLITS:
        if split in fed.size:
            n = np.asarray(fed.size[split])
            lines.append(
                f"  {split:<5} per client min {n.min()}  mean {n.mean():.1f}  max {n.max()}  total"
                f" {n.sum()}"
            )
    lines.append(
        "  server "
        + ", ".join(f"{key} {len(rows)}" for key, rows in sorted(fed.server_rows.items()))
    )
    if fed.vocabulary:
        lines.append(
            f"  vocabulary of {len(fed.vocabulary)}: {shown(''.join(fed.vocabulary), 400)}"
        )
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    overall = counts.sum(0) / max(counts.sum(), 1)
    lines.append(
        f"  label skew: {(counts > 0).sum(1).mean():.1f} classes per client, mean total variation"
        f" from the overall labels {0.5 * np.abs(share - overall).sum(1).mean():.3f}"
    )
    if fed.classes <= MOST_COLUMNS:
        width = max(4, len(str(counts.max())))
        lines.append("  client " + " ".join(f"{c:>{width}}" for c in range(fed.classes)))
        lines += [
            f"  {i:>6} " + " ".join(f"{n:>{width}}" for n in row)
            for i, row in enumerate(counts[:MOST_LINES])
        ]
        if fed.num_clients > MOST_LINES:
            lines.append(f"  ... {fed.num_clients - MOST_LINES} more clients")
    return "\n".join(lines)
