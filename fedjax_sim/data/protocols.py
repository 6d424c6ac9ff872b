"""Split protocols (what is held back where) and `federate`, from names to a Federation."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.data import frames
from fedjax_sim.data.arrays import check_targets, outputs_of, place_in_class
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.partition import clients_of
from fedjax_sim.data.partition import partition as share_out
from fedjax_sim.data.provenance import Origin
from fedjax_sim.data.sources import DATASETS, Dataset, is_csv, load
from fedjax_sim.data.spec import check_whole, shown, split_spec
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.tasks import CLASS, task_called

log = logging.getLogger(__name__)
TRAIN_ONLY = ("tiny_imagenet",)  # merged protocols use its training folder alone
CLIENTS = 20  # by default
PARTITION = "dirichlet:0.3"  # by default
AUTO = "auto"  # the task that the data look like
NORMS = ("dataset", "pfllib", "none")


@dataclasses.dataclass(frozen=True)
class Protocol:
    """merge: official train + test are partitioned together; the global test set is the clients'
    union.

    fractions: what each client holds back of its examples, at least one example each; the rest is
    training data. least: at least so many validation rows, but no more than a third of what the
    client has: an accuracy on a handful of rows says nothing.
    """

    help: str
    merge: bool
    fractions: Mapping[str, float]
    server_validation: bool = False
    least: int = 0
    # dataset -> augmentation of training batches
    augment: Mapping[str, str] = dataclasses.field(default_factory=dict)


PROTOCOLS: dict[str, Protocol] = {
    "standard": Protocol(
        "server validation out of official train, clients 90/10 train/val (at least 20 val rows),"
        " official test is global",
        merge=False,
        fractions={"val": 0.10},
        server_validation=True,
        least=20,
    ),
    "fedpolicy": Protocol(
        "the standard split, as FedPolicy's paper has it",
        merge=False,
        fractions={"val": 0.10},
        server_validation=True,
    ),
    "pfllib": Protocol(
        "official train and test merged, clients 75/25 train/test",
        merge=True,
        fractions={"test": 0.25},
    ),
    "pfedrlla": Protocol(
        "official train and test merged, clients 65/15/20 train/val/test",
        merge=True,
        fractions={"val": 0.15, "test": 0.20},
    ),
    "qbandit": Protocol(
        "official train partitioned, clients 19:1 train/val (for the reward), official test is"
        " global",
        merge=False,
        fractions={"val": 0.05},
        augment={"cifar10": "crop_flip"},
    ),
}


def stratified(y: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """`number` positions with the class proportions of `y` (largest remainders), ascending.

    >>> import numpy as np
    >>> y = np.array([0] * 60 + [1] * 30 + [2] * 10)
    >>> np.bincount(y[stratified(y, 10, np.random.default_rng(0))]).tolist()
    [6, 3, 1]
    """
    counts = np.bincount(y)
    exact = counts * number / len(y)
    quota = np.floor(exact).astype(int)
    quota[np.argsort(quota - exact, kind="stable")[: number - quota.sum()]] += 1
    return np.flatnonzero(place_in_class(y, rng.permutation(len(y))) < quota[y])


def split_client(
    rows: np.ndarray,
    fractions: Mapping[str, float],
    rng: np.random.Generator,
    val_share: float = 0.0,
    least: int = 0,
) -> dict[str, np.ndarray]:
    """The rows of ONE client, shuffled and cut: round(fraction n), at least 1, each; the rest is
    train.

    val_share: of the rest, this share becomes "val", at least 1 of it but never the last training
    example. least: of "val", at least so many, where they are no more than a third of all.

    >>> [
    ...     len(split_client(np.arange(n), {"val": 0.1}, np.random.default_rng(0), least=20)["val"])
    ...     for n in (9, 80, 500)
    ... ]
    [3, 20, 50]
    >>> parts = split_client(np.arange(20), {"test": 0.25}, np.random.default_rng(0), val_share=0.2)
    >>> {name: len(part) for name, part in parts.items()}
    {'train': 12, 'test': 5, 'val': 3}
    """
    order = rng.permutation(rows)
    parts, start = {}, 0
    for name, fraction in fractions.items():
        number = max(1, int(np.floor(fraction * len(rows) + 0.5)))
        if name == "val":
            number = max(number, min(least, len(rows) // 3))
        parts[name] = order[start : start + number]
        start += number
    if val_share:
        rest = len(order) - start
        number = min(max(1, int(np.floor(val_share * rest + 0.5))), max(rest - 1, 0))
        parts["val"] = order[start : start + number]
        start += number
    return {"train": order[start:], **parts}


BATCH = 64  # by default


def _check_words(norm: str, val_fraction: float | None) -> None:
    if norm not in NORMS:
        raise UserError(f"unknown norm '{shown(norm)}'; allowed: {', '.join(NORMS)}")
    if val_fraction is not None and not _is_fraction(val_fraction):
        raise UserError(
            f"val_fraction must be between 0 and 1 (1 excluded), got {shown(val_fraction)}"
        )


def _facts(data: Dataset, rule: Protocol, norm: str) -> dict[str, Any]:
    """What a federation has of its dataset."""
    mean, std = {"dataset": (data.mean, data.std), "pfllib": (0.5, 0.5), "none": (0.0, 1.0)}[norm]
    same = {n: getattr(data, n) for n in ("classes", "name", "task", "vocabulary")}
    return same | dict(mean=mean, std=std, augment=rule.augment.get(data.name, ""))


def _held_back(
    rule: Protocol, name: str, y: np.ndarray, server_val: int | None, rng: np.random.Generator
) -> np.ndarray:
    """Rows of the official training set that the server keeps for validation."""
    if not rule.server_validation:
        return np.zeros(0, int)
    number = min(1000, len(y) // 10) if server_val is None else server_val
    if not isinstance(number, int | np.integer) or not 0 <= number < len(y):
        raise UserError(
            f"server_val={shown(number)} does not fit: {name} has {len(y)} training examples, and"
            " the clients need some of them"
        )
    return stratified(y, number, rng) if number else np.zeros(0, int)


def _fractions(rule: Protocol, val_fraction: float | None) -> tuple[dict[str, float], float]:
    """(what a client's rows are split into beside training; the validation share of the training
    part)."""
    asked = dict(rule.fractions)
    if "val" in asked and val_fraction is not None:
        asked["val"] = val_fraction
    fractions = {k: f for k, f in asked.items() if f > 0}
    return fractions, val_fraction if val_fraction and "val" not in fractions else 0.0


def _split(
    shares: Sequence[np.ndarray],
    fractions: dict[str, float],
    rng: np.random.Generator,
    val_share: float,
    protocol: str,
    least: int,
) -> dict[str, list[np.ndarray]]:
    """{split: rows of every client}."""
    splits = [split_client(own, fractions, rng, val_share, least) for own in shares]
    starved = [i for i, parts in enumerate(splits) if len(parts["train"]) == 0]
    if starved:
        raise UserError(
            f"client {starved[0]} has {len(shares[starved[0]])} examples and keeps none for"
            f" training after its {protocol} split; use fewer clients"
        )
    return {name: [parts[name] for parts in splits] for name in splits[0]}


def federate(
    dataset: str | os.PathLike[str] | Dataset = "digits",
    partition: str = PARTITION,
    clients: int | None = None,
    protocol: str = "standard",
    data_seed: int = 0,
    *,
    data_dir: str | None = None,
    download: bool = False,
    norm: str = "dataset",
    batch_size: int = BATCH,
    server_val: int | None = None,
    val_fraction: float | None = None,
    task: str = AUTO,
) -> Federation:
    """Load, hold back, partition and split: from names to a `Federation`, deterministic in
    `data_seed`.

    clients: where not given 20, or under column:NAME one for each value. norm: "dataset" (published
    mean and std, else computed from the clients' training rows), "pfllib" (0.5, 0.5) or "none".
    server_val: examples of the official training set kept by the server (protocol standard only),
    default min(1000, 10 % of them), 0 for none. task: auto: by the form of the data.
    val_fraction: None for what the protocol says; a number f replaces the protocol's own validation
    share, and under a protocol without one every client holds back f of its training part (at least
    one example where it has two), the test rows being the same; 0 for none. batch_size: only enters
    the smallest client of a Dirichlet or unbalanced pathological split under pfllib and pfedrlla,
    min(batch / held-back share, n / N / 2).

    >>> fed = federate("digits", "dirichlet:0.3", clients=10)
    >>> sorted(fed.rows), fed.num_clients, len(fed.server_rows["val"]), len(fed.server_rows["test"])
    (['train', 'val'], 10, 144, 355)
    """
    rule = lookup("protocol", shown(protocol), PROTOCOLS)
    _check_words(norm, val_fraction)
    clients = clients if clients is None else check_whole("clients", clients, 1)
    data_seed = check_whole("data_seed", data_seed)
    batch_size = check_whole("batch_size", batch_size, 1)
    data = _load(dataset, data_dir, download, partition, task)
    official = len(data.y_train)
    y = np.concatenate([data.y_train, data.y_test])
    classes = strata(data, y)
    partition = natural_partition(data, partition)
    if not rule.merge:
        _check_official_test(data, protocol)
    server_rng, partition_rng, split_rng = _streams(data_seed)
    pool = np.arange(len(y) if rule.merge and data.name not in TRAIN_ONLY else official)
    validation = _held_back(rule, data.name, classes[:official], server_val, server_rng)
    pool = np.setdiff1d(pool, validation, assume_unique=True)
    fractions, val_share = _fractions(rule, val_fraction)
    extra = {key: values[pool] for key, values in data.extra.items()}
    clients = clients or clients_of(partition, extra) or CLIENTS
    spec = _with_pfllib_minimum(partition, rule, batch_size, len(pool), clients)
    shares = share_out(spec, classes[pool], clients, partition_rng, extra, least=1 + len(fractions))
    least, shares = 0 if val_fraction else rule.least, [pool[own] for own in shares]
    rows = _split(shares, fractions, split_rng, val_share, protocol, least)
    share = "" if val_fraction is None else f" with val_fraction {val_fraction:g}"
    split = f"{spec}, {clients} clients, {protocol}{share}, server_val {len(validation)}"
    how = f"norm {norm}, data_seed {data_seed}, {_examples(data)}"
    description = f"{_named(dataset)}, {split}, {how}"
    return _assemble(data, y, rows, validation, rule, norm, description)


def _streams(data_seed: int) -> list[np.random.Generator]:
    """One random stream per stage: another server set does not reshuffle the clients' splits."""
    return [np.random.default_rng([data_seed, stage]) for stage in range(3)]


def _assemble(
    data: Dataset,
    y: np.ndarray,
    rows: dict[str, list[np.ndarray]],
    validation: np.ndarray,
    rule: Protocol,
    norm: str,
    description: str,
) -> Federation:
    """The Federation of a dataset whose rows are dealt out."""
    test = np.concatenate(rows["test"]) if rule.merge else np.arange(len(data.y_train), len(y))
    fed = Federation.from_arrays(
        np.concatenate([data.x_train, data.x_test]),
        y,
        rows,
        test=test,
        server_val=validation if len(validation) else None,
        description=description,
        **_facts(data, rule, norm),
    )
    origin = Origin(fed.origin.text, fed.origin.vocabulary, data.columns)
    return dataclasses.replace(fed, origin=origin)


def _load(
    dataset: str | os.PathLike[str] | Dataset,
    data_dir: str | None,
    download: bool,
    partition: str,
    task: str,
) -> Dataset:
    """The dataset, under the task that was named."""
    if isinstance(dataset, Dataset):
        data = dataset
    else:
        data = load(dataset, data_dir, download, **_client_of(dataset, partition))
    return data if task == AUTO else as_task(data, task)


def _examples(data: Dataset) -> str:
    """What there is, for the description."""
    sides = "x".join(map(str, data.x_train.shape[1:]))
    text = f"{len(data.y_train) + len(data.y_test)} examples {sides}"
    return text + (f", vocabulary of {len(data.vocabulary)}" if data.vocabulary else "")


def _client_of(dataset: str | os.PathLike[str], partition: str) -> dict[str, str]:
    """The column of a table that the partition makes clients of: no feature, whatever it is
    called."""
    name, body = split_spec(partition)
    if name != "column" or not is_csv(os.fspath(dataset)) or frames.is_frame(os.fspath(dataset)):
        return {}
    column = body.split(",")[0].removeprefix("name=").strip()
    return {"client": column} if column else {}


BY_CLASS = ("dirichlet", "shards", "pathological", "fixed", "mnist_star", "omniglot")


def as_task(data: Dataset, task: str) -> Dataset:
    """The same examples under another task; their targets must fit it."""
    train, test = (
        check_targets(getattr(data, name), f"{data.name}: {name}", task)
        for name in ("y_train", "y_test")
    )
    both = np.concatenate([data.x_train, data.x_test]), np.concatenate([train, test])
    same = task_called(task).target == task_called(data.task).target
    classes = data.classes if same else outputs_of(task, *both)
    return dataclasses.replace(data, y_train=train, y_test=test, task=task, classes=classes)


def strata(data: Dataset, y: np.ndarray) -> np.ndarray:
    """[n] the class of every example, by which it is held back and shared out; one for all where
    there are none."""
    return y if task_called(data.task).target == CLASS else np.zeros(len(y), np.int32)


def natural_partition(data: Dataset, partition: str) -> str:
    """The partition to use. Without classes the default becomes the clients that the data have,
    else equal parts, and another partition by classes is refused."""
    if (
        task_called(data.task).target == CLASS
        or partition.partition(":")[0].strip() not in BY_CLASS
    ):
        return partition
    if partition == PARTITION:
        return "column:client" if "client" in data.extra else "iid"
    raise UserError(
        f"the partition '{shown(partition)}' shares out classes, and {shown(data.name)} is a"
        f" {data.task} task without them; allowed: iid, column:NAME"
    )


def _named(dataset: str | os.PathLike[str] | Dataset) -> str:
    """A dataset as the description names it: a file by its name, since where it lies changes
    nothing."""
    if isinstance(dataset, Dataset):
        return f"{shown(dataset.name)} (arrays)"
    text = os.fspath(dataset)
    kind, colon, path = text.partition(":")
    if kind in DATASETS:
        by_path = DATASETS[kind].by_path and colon
        return shown(f"{kind}:{os.path.basename(path.rstrip('/'))}" if by_path else text)
    return shown(os.path.basename(text))


def _is_fraction(value: object) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return number and bool(0 <= value < 1)  # type: ignore[operator]


def _with_pfllib_minimum(
    spec: str, rule: Protocol, batch_size: int, total: int, clients: int
) -> str:
    """PFLlib's smallest client, min(B / (1 - train share), n / N / 2), for its partitions unless
    given."""
    name, _, body = spec.partition(":")
    said = "min=" in body.replace(" ", "")
    if name.strip() not in ("dirichlet", "pathological") or not rule.merge or said:
        return spec
    least = int(min(batch_size / sum(rule.fractions.values()), total / max(clients, 1) / 2))
    return f"{spec},min={max(least, 1)}"


def _check_official_test(data: Dataset, protocol: str) -> None:
    if len(data.y_test) == 0:
        raise UserError(
            f"{data.name} has no official test set, which {protocol} needs; use pfllib or pfedrlla"
        )
    if task_called(data.task).target == CLASS and not np.isin(data.y_test, data.y_train).any():
        raise UserError(
            f"the official test set of {data.name} has no class of its training set, so the"
            f" protocol {protocol} cannot be measured; use pfllib or pfedrlla"
        )
