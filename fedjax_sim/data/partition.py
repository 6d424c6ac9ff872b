"""Partitioners: who owns which examples. Every one is a pure function of the labels and the random
generator.

A partitioner receives the labels `y` [n] of the examples to share out and returns one list of
positions per client; the lists are disjoint, and where a partition leaves examples over, its
docstring says so. All of them terminate.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedjax_sim.data.arrays import MOST_CLASSES
from fedjax_sim.data.memory import refuse_if_too_large
from fedjax_sim.data.spec import (
    Converter,
    boolean,
    check_whole,
    fraction,
    mix,
    parse_options,
    positive_float,
    positive_int,
    shown,
    split_spec,
    text,
)
from fedjax_sim.errors import UserError, lookup

log = logging.getLogger(__name__)
Rows = list[np.ndarray]
Extra = Mapping[str, np.ndarray]
Rng = np.random.Generator


def shuffled_by_class(y: np.ndarray, classes: int, rng: Rng) -> Rows:
    """Positions of each class, in random order: `classes` arrays that together cover 0..n-1."""
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(y, minlength=classes))[:-1])


def deal(by_class: Rows, counts: np.ndarray) -> Rows:
    """Hand out `counts[i, k]` positions of class k to client i, in order; what exceeds them is left
    over."""
    pieces = [
        np.split(rows, np.cumsum(counts[:, k]))[: len(counts)] for k, rows in enumerate(by_class)
    ]
    return [np.concatenate([piece[i] for piece in pieces]) for i in range(len(counts))]


def iid(y: np.ndarray, clients: int, rng: Rng, extra: Extra) -> Rows:
    """Shuffle, then equal parts (sizes differ by at most one). Covers everything."""
    return np.array_split(rng.permutation(len(y)), clients)


def dirichlet(
    y: np.ndarray,
    clients: int,
    rng: Rng,
    extra: Extra,
    *,
    alpha: float,
    min: int = 10,
    tries: int = 1000,
) -> Rows:
    """Per class p ~ Dir(alpha 1_N), p_j = 0 for clients already holding >= n/N, cut by cumulative
    sums.

    Redrawn until every client holds `min` examples. After `tries` draws the best of them is kept
    and its deficient clients are topped up from the largest one, which is logged. Covers
    everything.
    """
    total, classes = len(y), int(y.max()) + 1
    if min * clients > total:
        raise UserError(
            f"dirichlet: {clients} clients with at least {min} examples each need {min * clients}, "
            f"but there are {total}; use fewer clients or a smaller min"
        )
    by_class = shuffled_by_class(y, classes, rng)
    per_class = np.array([len(rows) for rows in by_class])
    best, best_deficit = np.zeros((clients, classes), np.int64), np.inf
    for _ in range(tries):
        counts = _dirichlet_counts(per_class, clients, alpha, rng)
        deficit = np.maximum(min - counts.sum(1), 0).sum()
        if deficit < best_deficit:
            best, best_deficit = counts, deficit
        if deficit == 0:
            break
    rows = deal(by_class, best)
    return rows if best_deficit == 0 else _top_up(rows, min, tries, rng)


def _dirichlet_counts(per_class: np.ndarray, clients: int, alpha: float, rng: Rng) -> np.ndarray:
    """ONE draw of the [N, classes] table; only counts, so a rejected draw moves no examples."""
    total = per_class.sum()
    shares = rng.dirichlet(np.full(clients, alpha), size=len(per_class))  # [classes, N]
    counts = np.zeros((clients, len(per_class)), np.int64)
    given = np.zeros(clients, np.int64)
    for k, number in enumerate(per_class):
        open_ = given * clients < total  # below the mean client; never empty while examples remain
        p = np.where(open_, shares[k], 0.0)
        if not p.sum() > 0:  # a tiny alpha may put all its mass on clients that are full
            p = open_.astype(float)
        ends = np.cumsum(p)
        # the last open client reaches exactly `number`
        cuts = (ends / ends[-1] * number).astype(np.int64)
        counts[:, k] = np.diff(cuts, prepend=0)
        given += counts[:, k]
    return counts


def _top_up(rows: Rows, least: int, tries: int, rng: Rng) -> Rows:
    """Bring every client to `least` examples, always taking random ones from the currently largest
    client."""
    rows = [rng.permutation(r) for r in rows]
    size = np.array([len(r) for r in rows])
    poor = np.flatnonzero(size < least)
    for i in poor:
        while size[i] < least:
            # holds more than `least`: N least <= n and client i is below it
            donor = int(size.argmax())
            moved = int(np.minimum(least - size[i], size[donor] - least))
            rows[i] = np.concatenate([rows[i], rows[donor][-moved:]])
            rows[donor] = rows[donor][:-moved]
            size[i] += moved
            size[donor] -= moved
    log.warning(
        "dirichlet: after %d draws %d of %d clients had fewer than %d examples and were topped up"
        " from the largest clients",
        tries,
        len(poor),
        len(rows),
        least,
    )
    return rows


def shards(y: np.ndarray, clients: int, rng: Rng, extra: Extra, *, s: int) -> Rows:
    """McMahan's pathological split: sort by label, cut into s N equal shards, s random shards per
    client.

    Covers everything: what does not fill a shard (fewer than s N examples) goes to the last client.
    """
    width = len(y) // (s * clients)
    if width == 0:
        raise UserError(
            f"shards: {clients} clients with {s} shards each need at least {s * clients} examples,"
            f" but there are {len(y)}"
        )
    order = np.concatenate(shuffled_by_class(y, int(y.max()) + 1, rng))
    cut = order[: s * clients * width].reshape(s * clients, width)
    rows = list(cut[rng.permutation(s * clients)].reshape(clients, s * width))
    rows[-1] = np.concatenate([rows[-1], order[s * clients * width :]])
    return rows


def pathological(
    y: np.ndarray,
    clients: int,
    rng: Rng,
    extra: Extra,
    *,
    s: int,
    balance: bool = True,
    min: int = 10,
) -> Rows:
    """PFLlib's pathological split: each class goes to the next ceil(N s / C) clients that still
    miss classes.

    Equal parts, or with balance=false random parts in [max(mean/10, min/C), mean); the last holder
    of a class takes what is over. Clients form about C/s groups with identical label sets. Classes
    that come after every client has its s classes (N s not divisible by C, or N s < C) are left
    out, which is logged.
    """
    classes = int(y.max()) + 1
    _check_classes("pathological", s, classes)
    by_class = shuffled_by_class(y, classes, rng)
    missing = np.full(clients, s)
    counts = np.zeros((clients, classes), np.int64)
    for k, rows in enumerate(by_class):
        holders = np.flatnonzero(missing > 0)[: -(-clients * s // classes)]
        if len(holders) == 0:
            break
        mean = len(rows) / len(holders)
        if balance:
            part = np.full(len(holders), int(mean))
        else:
            high = max(int(mean), 1)
            # never above the mean: what is over is >= 0
            low = np.minimum(int(max(mean / 10, min / classes)), high - 1)
            part = rng.integers(low, high, size=len(holders))
        part[-1] = len(rows) - part[:-1].sum()
        counts[holders, k] = part
        missing[holders] -= 1
    _log_unheld("pathological", counts, by_class)
    return deal(by_class, counts)


def fixed(y: np.ndarray, clients: int, rng: Rng, extra: Extra, *, fc: int) -> Rows:
    """Client i holds class i mod C and fc-1 other random classes; each is shared evenly among its
    holders.

    Covers everything as soon as N >= C; a class that nobody holds is left out, which is logged.
    """
    classes = int(y.max()) + 1
    _check_classes("fixed", fc, classes)
    own = np.arange(clients) % classes
    keys = rng.random((clients, classes))
    keys[np.arange(clients), own] = -1.0  # the smallest key: always among the first fc
    holds = np.argsort(np.argsort(keys, axis=1), axis=1) < fc  # [N, C]
    by_class = shuffled_by_class(y, classes, rng)
    counts = np.zeros((clients, classes), np.int64)
    for k, rows in enumerate(by_class):
        holders = np.flatnonzero(holds[:, k])
        if len(holders):
            counts[holders, k] = len(rows) // len(holders) + (
                np.arange(len(holders)) < len(rows) % len(holders)
            )
    _log_unheld("fixed", counts, by_class)
    return deal(by_class, counts)


def mnist_star(
    y: np.ndarray, clients: int, rng: Rng, extra: Extra, *, mix: tuple[int, ...] = (40, 40, 20)
) -> Rows:
    """Clients by domain: with 100 clients and 40/40/20, clients 0-39 MNIST, 40-79 USPS, 80-99
    MNIST-M.

    Every client has the same number of examples, IID inside its domain: the number that the
    scarcest domain allows (232 for the merged sets and 100 clients). The rest of each domain is
    left out.
    """
    domain = _needs("mnist_star", "domain", extra)
    if len(mix) != int(domain.max()) + 1:
        raise UserError(
            f"mnist_star: the mix {'/'.join(map(str, mix))} has {len(mix)} shares, "
            f"but the dataset has {int(domain.max()) + 1} domains"
        )
    ends = np.rint(np.cumsum(mix) / sum(mix) * clients).astype(int)
    number = np.diff(ends, prepend=0)  # clients per domain
    pools = shuffled_by_class(domain, len(mix), rng)
    width = min(len(pool) // n for pool, n in zip(pools, number, strict=True) if n)
    cut = [pool[: n * width].reshape(n, width) for pool, n in zip(pools, number, strict=True)]
    return [rows for several in cut for rows in several]


def omniglot(y: np.ndarray, clients: int, rng: Rng, extra: Extra, *, drop: float = 0.0) -> Rows:
    """Client j holds drawing j of every character (20 clients, 1,623 images each, labels =
    alphabets).

    drop: the fraction of labels every client loses at random (0.2 is the pre-training scenario);
    with fewer than 20 clients the other drawings are left out.
    """
    drawer = _needs("omniglot", "drawer", extra)
    drawers = np.unique(drawer)
    if clients > len(drawers):
        raise UserError(
            f"omniglot: there are {len(drawers)} drawings of each character, "
            f"so at most {len(drawers)} clients; got {clients}"
        )
    labels = np.unique(y)
    dropped = round(drop * len(labels))
    rows = []
    for j in range(clients):
        mine = np.flatnonzero(drawer == drawers[j])
        rows.append(mine[~np.isin(y[mine], rng.permutation(labels)[:dropped])])
    return rows


def column(y: np.ndarray, clients: int, rng: Rng, extra: Extra, *, name: str, min: int = 1) -> Rows:
    """One client for every distinct value of a column of the data (a person, a hospital), in sorted
    order.

    Values with fewer than `min` examples are left out, which is logged. `clients` must be the
    number of values left.
    """
    values, owner = column_values(name, extra, min)
    if clients != len(values):
        raise UserError(
            f"column:{shown(name)} makes {len(values)} clients, one for each value of the column, "
            f"but {clients} were asked for; use clients={len(values)}"
        )
    place = np.searchsorted(values, owner)
    kept = np.flatnonzero(values[np.minimum(place, len(values) - 1)] == owner)
    if len(kept) < len(y):
        log.warning(
            "column:%s: %d examples of small clients left out", shown(name), len(y) - len(kept)
        )
    order = kept[np.argsort(place[kept], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(place[kept], minlength=len(values)))[:-1])


def column_values(name: str, extra: Extra, least: int) -> tuple[np.ndarray, np.ndarray]:
    """The values with at least `least` examples, sorted, and the value of every example."""
    if name not in extra:
        has = ", ".join(sorted(extra)) or "none"
        raise UserError(
            f"the data has no column '{shown(name)}' for the partition; it has {shown(has)}"
        )
    owner = np.asarray(extra[name])
    if owner.dtype.kind not in "iuUSb":
        raise UserError(
            f"the column '{shown(name)}' must be whole numbers or text to tell clients, got"
            f" {owner.dtype}"
        )
    values, count = np.unique(owner, return_counts=True)
    if not (count >= least).any():
        raise UserError(
            f"column:{shown(name)}: no client has {least} examples; the largest has"
            f" {count.max(initial=0)}"
        )
    return values[count >= least], owner


def clients_of(spec: str, extra: Extra) -> int | None:
    """How many clients the data itself has under a partition, None where the partition leaves that
    open.

    >>> clients_of("column:who", {"who": np.array(["ann", "bob", "ann"])}), clients_of("iid", {})
    (2, None)
    """
    name, options = parse_partition(spec)
    if name != "column":
        return None
    return len(column_values(options["name"], extra, options.get("min", 1))[0])


def _check_classes(name: str, wanted: int, classes: int) -> None:
    if wanted > classes:
        raise UserError(
            f"{name}:{wanted} asks for {wanted} classes per client, but there are {classes}"
        )


def _log_unheld(name: str, counts: np.ndarray, by_class: Rows) -> None:
    unheld = [k for k, rows in enumerate(by_class) if len(rows) and not counts[:, k].any()]
    if unheld:
        log.warning(
            "%s: no client holds class %s (%d examples left out)",
            name,
            ", ".join(map(str, unheld[:10])) + (" ..." if len(unheld) > 10 else ""),
            sum(len(by_class[k]) for k in unheld),
        )


def _needs(name: str, key: str, extra: Extra) -> np.ndarray:
    if key not in extra:
        raise UserError(
            f"the partition {name} needs the '{key}' of every example, which only the dataset"
            f" {name} has"
        )
    values = np.asarray(extra[key])
    whole = values.dtype.kind in "iu"  # of text there is no least and no most
    if not (whole and values.min(initial=0) >= 0 and values.max(initial=0) < MOST_CLASSES):
        raise UserError(
            f"the partition {name} needs whole numbers from 0 up as '{key}', got {values.dtype}"
        )
    return values.astype(np.int64)


def draws(value: str) -> int:
    number = positive_int(value)
    if number > 100_000:
        raise ValueError("it must be at most 100000")
    return number


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """A registered partitioner: its function, its options as written in a spec string, one line of
    help."""

    split: Callable[..., Rows]
    help: str
    options: Mapping[str, Converter] = dataclasses.field(default_factory=dict)
    positional: str | None = None
    required: bool = False  # the positional option


PARTITIONS: dict[str, Partitioner] = {
    "iid": Partitioner(iid, "iid: shuffle, equal parts"),
    "column": Partitioner(
        column,
        "column:client (option min): one client for each value of a column of the data",
        {"name": text, "min": positive_int},
        "name",
        True,
    ),
    "dirichlet": Partitioner(
        dirichlet,
        "dirichlet:0.1 (alpha; options min, tries): Dirichlet label shares, near-balanced sizes",
        {"alpha": positive_float, "min": positive_int, "tries": draws},
        "alpha",
        True,
    ),
    "shards": Partitioner(
        shards,
        "shards:2: sort by label, 2 shards per client (McMahan)",
        {"s": positive_int},
        "s",
        True,
    ),
    "pathological": Partitioner(
        pathological,
        "pathological:2 (options balance, min): 2 classes per client, groups with equal labels"
        " (PFLlib)",
        {"s": positive_int, "balance": boolean, "min": positive_int},
        "s",
        True,
    ),
    "fixed": Partitioner(
        fixed,
        "fixed:2: class i mod C plus random others, 2 classes per client",
        {"fc": positive_int},
        "fc",
        True,
    ),
    "mnist_star": Partitioner(
        mnist_star,
        "mnist_star:40/40/20: clients by domain, MNIST / USPS / MNIST-M, equal sizes",
        {"mix": mix},
        "mix",
    ),
    "omniglot": Partitioner(
        omniglot,
        "omniglot (option drop=0.2): client j has drawing j of every character",
        {"drop": fraction},
        "drop",
    ),
}


def parse_partition(spec: str) -> tuple[str, dict[str, Any]]:
    """A spec string as (name, options).

    >>> parse_partition("dirichlet:0.1")
    ('dirichlet', {'alpha': 0.1})
    >>> parse_partition("pathological:2,balance=false")
    ('pathological', {'s': 2, 'balance': False})
    >>> parse_partition("mnist_star:40/40/20")
    ('mnist_star', {'mix': (40, 40, 20)})
    """
    name, body = split_spec(spec)
    entry = lookup("partition", shown(name), PARTITIONS)
    options = parse_options(spec, body, entry.options, entry.positional)
    if entry.required and entry.positional not in options:
        raise UserError(
            f"the partition '{shown(spec)}' needs its {entry.positional}, e.g."
            f" {entry.help.split(' ')[0].rstrip(':')}"
        )
    return name, options


def partition(
    spec: str,
    y: np.ndarray,
    clients: int,
    rng: Rng | int = 0,
    extra: Extra | None = None,
    least: int = 1,
) -> Rows:
    """Share out the examples with labels `y` among `clients`: one array of positions per client.

    `least` is what every client must hold at the end (a client that ends below is an error, in one
    sentence).

    >>> import numpy as np
    >>> parts = partition("iid", np.zeros(10, int), clients=3, rng=0)
    >>> [len(p) for p in parts], sorted(np.concatenate(parts).tolist()) == list(range(10))
    ([4, 3, 3], True)
    """
    name, options = parse_partition(spec)
    y = np.asarray(y)
    clients = check_whole("clients", clients, 1)
    if clients * least > len(y):
        raise UserError(
            f"{clients} clients with at least {least} example{'s' * (least > 1)} each are too many"
            f" for {len(y)} examples"
        )
    rng = rng if isinstance(rng, np.random.Generator) else np.random.default_rng(rng)
    if name == "dirichlet":  # 10, or half the mean client where that is less
        options["min"] = max(options.get("min", min(10, len(y) // (2 * clients))), least)
    if name not in ("iid", "column"):  # tables of clients x classes, a few of them at a time
        table = 40 * clients * (int(y.max()) + 1)
        refuse_if_too_large(
            table,
            f"{shown(spec)} with {clients} clients and {int(y.max()) + 1} classes",
            "use fewer",
        )
    rows = PARTITIONS[name].split(y, clients, rng, extra or {}, **options)
    size = np.array([len(r) for r in rows])
    if size.min() < least:
        if name == "column":
            raise UserError(
                f"client {size.argmin()} of {shown(spec)} has {size.min()} of the at least {least}"
                " examples it needs; leave out small clients with"
                f" column:{shown(options['name'])},min={least}"
            )
        raise UserError(
            f"{shown(spec)} leaves client {size.argmin()} with {size.min()} of the at least {least}"
            f" examples it needs; use fewer than {clients} clients or a milder partition"
        )
    return rows
